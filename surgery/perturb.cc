// perturb: seeded relative Gaussian noise on parameters, the replicas' noise of an ensemble.
#include "core/philox.h"
#include "core/random_streams.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

struct Noise {
  double sigma = 0;
  uint64_t seed = 0;
};

Result<Noise> NoiseOf(const Arguments& arguments) {
  Noise noise;
  RT_ASSIGN_OR_RETURN(noise.sigma, NumberArgument(arguments, "sigma"));
  RT_ASSIGN_OR_RETURN(noise.seed, WholeArgument(arguments, "seed"));
  if (noise.sigma >= 0 && noise.sigma <= 1) return noise;
  return UsageError("sigma: expected a number in 0 .. 1, got '" + arguments.at("sigma") + "'");
}

Status Check(const Arguments& arguments) { return NoiseOf(arguments).status(); }

// p * (1 + sigma * N(0, 1)) in FP64, rounded once; an element's draw depends on its tensor and place
// alone.
Status Edit(const Arguments& arguments, Job& job) {
  RT_ASSIGN_OR_RETURN(const Noise noise, NoiseOf(arguments));
  RT_RETURN_IF_ERROR(CheckGlob(job.layout(), arguments.at("only")));
  ForEachPiece(job, arguments.at("only"), [&](const TensorSpec& spec, const Piece& piece,
                                              ShardState& slab) {
    const RandomStream random = MakeRandomStream(
        noise.seed, static_cast<uint32_t>(RandomPurpose::kParameterNoise), TensorStream(spec.name));
    float* p = slab.slab(Component::kParameter).data() + piece.offset;
    for (int64_t row = piece.row_first; row < piece.row_last; ++row) {
      for (int64_t col = piece.col_first; col < piece.col_last; ++col, ++p) {
        const double draw = RandomNormal(random, static_cast<uint64_t>(row * spec.cols + col));
        *p = static_cast<float>(static_cast<double>(*p) * (1.0 + noise.sigma * draw));
      }
    }
  });
  return {};
}

}  // namespace

const InterventionKind kPerturb = {
    .name = "perturb",
    .summary = "Multiply every parameter by 1 + sigma * N(0, 1): a replica of a noise ensemble",
    .touches = "state: p",
    .formula = "p = p * (1 + sigma * N(0, 1))",
    .example = "perturb:sigma=0.0009765625,seed=3@1",
    .reference = "docs/architecture.md, \"Noise\"",
    .parameters = {{"sigma", "relative standard deviation, 0 .. 1", ""},
                   {"seed", "of the draws, a whole number", ""},
                   {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
