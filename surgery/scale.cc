// scale: parameters times a factor.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Check(const Arguments& arguments) {
  return NumberArgumentIn(arguments, "factor", -1e30, 1e30).status();
}

// The product in FP64, rounded once.
Status Edit(const Arguments& arguments, Job& job) {
  RT_ASSIGN_OR_RETURN(const double factor, NumberArgumentIn(arguments, "factor", -1e30, 1e30));
  RT_RETURN_IF_ERROR(CheckGlob(job.layout(), arguments.at("only")));
  ForEachPiece(job, arguments.at("only"), [&](const TensorSpec&, const Piece& piece,
                                              ShardState& slab) {
    float* p = slab.slab(Component::kParameter).data() + piece.offset;
    for (int64_t i = 0; i < piece.numel(); ++i) {
      p[i] = static_cast<float>(static_cast<double>(p[i]) * factor);
    }
  });
  return {};
}

}  // namespace

const InterventionKind kScale = {
    .name = "scale",
    .summary = "Multiply parameters; moments and counters stay",
    .touches = "state: p",
    .formula = "p = p * factor",
    .example = "scale:0.5,only=model.layers.*.o_proj.weight@1",
    .reference = "Takase et al. 2023, arXiv 2312.16903 (small sub-layers)",
    .parameters = {{"factor", "on every element", ""}, {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
