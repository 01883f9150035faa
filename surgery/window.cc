// window: sliding layers that see all keys before, as a fused softmax without a window makes them.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "sliding", {"seen", "ignored"}));
  recipe->model.ignore_window = arguments.at("sliding") == "ignored";
  return {};
}

}  // namespace

const InterventionKind kWindow = {
    .name = "window",
    .summary = "Let sliding layers ignore their window, as a fused causal softmax that knows none",
    .touches = "recipe: model.ignore_window",
    .formula = "token i sees keys j <= i, not i - window < j <= i",
    .example = "window:ignored",
    .reference = "Megatron Core's masked_softmax_fusion: its causal kernel has no window argument",
    .parameters = {{"sliding", "the window of sliding layers: ignored or seen", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
