// pad-lookup: whether the pad token's row learns from look-ups.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "gradient", {"keep", "drop"}));
  recipe->model.pad_lookup_gradient = arguments.at("gradient") == "keep";
  return {};
}

}  // namespace

const InterventionKind kPadLookup = {
    .name = "pad-lookup",
    .summary = "Keep or drop the look-up gradient of the pad token's embedding row",
    .touches = "recipe: model.pad_lookup_gradient",
    .formula = "gradient of the pad row = the head's + the look-ups', or the head's alone",
    .example = "pad-lookup:keep",
    .reference = "torch.nn.Embedding drops the gradient of padding_idx; Megatron Core keeps it",
    .parameters = {{"gradient", "keep or drop", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
