// beta2: another decay of Adam's v.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgumentIn(arguments, "value", 0, 1));
  if (value == 1) return UsageError("value: expected a number below 1, got '" +
                                    arguments.at("value") + "'");
  recipe->optimizer.beta2 = value;
  return {};
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Edit(arguments, &recipe);
}

}  // namespace

const InterventionKind kBeta2 = {
    .name = "beta2",
    .summary = "Decay Adam's v at another rate; the bias correction follows the rate in force",
    .touches = "recipe: optimizer.beta2",
    .example = "beta2:0.9",
    .reference = "Bai et al. 2025, arXiv 2506.04805 (v decouples from the squared gradient)",
    .parameters = {{"value", "0 .. below 1", ""}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
