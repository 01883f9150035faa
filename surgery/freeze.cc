// freeze: tensors whose parameters stay as they are.
#include "core/freeze_rule.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "norm", {"counted", "left-out"}));
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "moments", {"stay", "move"}));
  recipe->optimizer.freeze.push_back({.only = arguments.at("only"),
                                      .counted = arguments.at("norm") == "counted",
                                      .moments_move = arguments.at("moments") == "move"});
  return {};
}

}  // namespace

const InterventionKind kFreeze = {
    .name = "freeze",
    .summary = "Leave parameters as they are",
    .touches = "recipe: optimizer.freeze",
    .formula = "p = p",
    .example = "freeze:model.layers.*.mlp.*,norm=counted,moments=stay",
    .reference =
        "Brock et al. 2017, arXiv 1706.04983 (FreezeOut); docs/architecture.md, \"Surgery\"",
    .parameters = {{"only", "glob over tensor names", ""},
                   {"norm", "whether their gradient is counted in the norm: counted or left-out",
                    ""},
                   {"moments", "m, v and t: move as if they were updated, or stay", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
