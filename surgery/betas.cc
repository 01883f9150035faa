// beta1, beta2: another decay of Adam's m or v. Two kinds in one file, for they differ in a name.
#include "surgery/registry.h"

namespace retrace {
namespace {

template <double OptimizerRecipe::*kBeta>
Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgumentIn(arguments, "value", 0, 1));
  if (value == 1) {
    return UsageError("value: expected a number below 1, got '" + arguments.at("value") + "'");
  }
  recipe->optimizer.*kBeta = value;
  return {};
}

}  // namespace

const InterventionKind kBeta1 = {
    .name = "beta1",
    .summary = "Decay Adam's m at another rate; the bias correction follows the rate in force",
    .touches = "recipe: optimizer.beta1",
    .formula = "m = beta1 * m + (1 - beta1) * g",
    .example = "beta1:0.8",
    .reference = "Kingma and Ba 2015, arXiv 1412.6980",
    .parameters = {{"value", "0 .. below 1", ""}},
    .edit_recipe = Edit<&OptimizerRecipe::beta1>};

const InterventionKind kBeta2 = {
    .name = "beta2",
    .summary = "Decay Adam's v at another rate; the bias correction follows the rate in force",
    .touches = "recipe: optimizer.beta2",
    .formula = "v = beta2 * v + (1 - beta2) * g^2",
    .example = "beta2:0.9",
    .reference = "Bai et al. 2025, arXiv 2506.04805 (v decouples from the squared gradient)",
    .parameters = {{"value", "0 .. below 1", ""}},
    .edit_recipe = Edit<&OptimizerRecipe::beta2>};

}  // namespace retrace
