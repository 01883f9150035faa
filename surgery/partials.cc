// partials: the format of shard partials before the tree sums them.
#include "core/precision.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "format", {"bf16", "fp32", "fp64"}));
  return SetPrecision("partials", arguments.at("format"), &recipe->precision);
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  RT_ASSIGN_OR_RETURN(recipe.precision, PrecisionPreset("fp32"));
  return Edit(arguments, &recipe);
}

}  // namespace

const InterventionKind kPartials = {
    .name = "partials",
    .summary =
        "Round the partial sums of tensor-parallel shards to another format before they are added",
    .touches = "recipe: precision.partials",
    .formula = "sum = round(part 0) + ... + round(part V-1)",
    .example = "partials:bf16",
    .reference = "Megatron-LM reduces in the activations' type",
    .parameters = {{"format", "bf16, fp32 or fp64", ""}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
