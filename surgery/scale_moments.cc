// scale-moments: Adam's m and v times a factor each.
#include "surgery/registry.h"

namespace retrace {
namespace {

struct Factors {
  double m = 1, v = 1;
};

Result<Factors> FactorsOf(const Arguments& arguments) {
  Factors factors;
  RT_ASSIGN_OR_RETURN(factors.m, NumberArgumentIn(arguments, "m", -1e30, 1e30));
  RT_ASSIGN_OR_RETURN(factors.v, NumberArgumentIn(arguments, "v", 0, 1e30));
  return factors;
}

Status Check(const Arguments& arguments) { return FactorsOf(arguments).status(); }

// The product in FP64, rounded once.
Status Edit(const Arguments& arguments, Job& job) {
  RT_ASSIGN_OR_RETURN(const Factors factors, FactorsOf(arguments));
  RT_RETURN_IF_ERROR(CheckGlob(job.layout(), arguments.at("only")));
  ForEachPiece(job, arguments.at("only"), [&](const TensorSpec&, const Piece& piece,
                                              ShardState& slab) {
    float* m = slab.slab(Component::kM).data() + piece.offset;
    float* v = slab.slab(Component::kV).data() + piece.offset;
    for (int64_t i = 0; i < piece.numel(); ++i) {
      m[i] = static_cast<float>(static_cast<double>(m[i]) * factors.m);
      v[i] = static_cast<float>(static_cast<double>(v[i]) * factors.v);
    }
  });
  return {};
}

}  // namespace

const InterventionKind kScaleMoments = {
    .name = "scale-moments",
    .summary = "Multiply Adam's moments; t stays",
    .touches = "state: m, v",
    .formula = "m = m * factor, v = v * factor",
    .example = "scale-moments:v=100,only=model.layers.*@6",
    .reference = "Molybog et al. 2023, arXiv 2304.09871 (updates' size against the gradient's)",
    .parameters = {{"m", "factor on m", "1"},
                   {"v", "factor on v, at least 0", "1"},
                   {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
