// beta1: another decay of Adam's m.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgumentIn(arguments, "value", 0, 1));
  if (value == 1) return UsageError("value: expected a number below 1, got '" +
                                    arguments.at("value") + "'");
  recipe->optimizer.beta1 = value;
  return {};
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Edit(arguments, &recipe);
}

}  // namespace

const InterventionKind kBeta1 = {
    .name = "beta1",
    .summary = "Decay Adam's m at another rate; the bias correction follows the rate in force",
    .touches = "recipe: optimizer.beta1",
    .example = "beta1:0.8",
    .reference = "Kingma and Ba 2015, arXiv 1412.6980",
    .parameters = {{"value", "0 .. below 1", ""}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
