// reset-moments: Adam's m, v or both to zero.
#include <algorithm>

#include "surgery/registry.h"

namespace retrace {
namespace {

Status Check(const Arguments& arguments) {
  const std::string& which = arguments.at("which");
  if (which != "m" && which != "v" && which != "both") {
    return UsageError("which: expected m, v or both, got '" + which + "'");
  }
  const std::string& t = arguments.at("t");
  if (t != "keep" && t != "reset") return UsageError("t: expected keep or reset, got '" + t + "'");
  return {};
}

Status Edit(const Arguments& arguments, Job& job) {
  const std::string& which = arguments.at("which");
  const std::string& only = arguments.at("only");
  const Layout& layout = job.layout();
  RT_RETURN_IF_ERROR(CheckGlob(layout, only));
  for (size_t t = 0; arguments.at("t") == "reset" && t < layout.tensors().size(); ++t) {
    if (GlobMatches(only, layout.tensors()[t].name)) job.state().state.counters.adam_t[t] = 0;
  }
  ForEachPiece(job, only, [&](const TensorSpec&, const Piece& piece, ShardState& slab) {
    const auto zero = [&](Component c) {
      std::fill_n(slab.slab(c).data() + piece.offset, piece.numel(), 0.0f);
    };
    if (which != "v") zero(Component::kM);
    if (which != "m") zero(Component::kV);
  });
  return {};
}

}  // namespace

const InterventionKind kResetMoments = {
    .name = "reset-moments",
    .summary = "Set Adam's moments to zero",
    .touches = "state: m, v, and Adam's t where t=reset",
    .formula = "m = 0, v = 0, or both",
    .example = "reset-moments:v,t=keep,only=model.layers.*.mlp.*@6",
    .reference = "Huang et al. 2025, arXiv 2501.06842 (SPAM: momentum reset)",
    .parameters = {{"which", "m, v or both", "both"},
                   {"t", "Adam's step counter: keep or reset (the bias correction starts anew)",
                    ""},
                   {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
