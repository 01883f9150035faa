// z-loss: a penalty on logsumexp, in what is minimised.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  recipe->model.z_loss = 0;
  if (arguments.at("factor") == "off") return {};
  const Result<double> factor = NumberArgumentIn(arguments, "factor", 0, 1e30);
  if (!factor.ok() || *factor == 0) {
    return UsageError("factor: expected off or a number above 0 and at most 1e+30, got '" +
                      arguments.at("factor") + "'");
  }
  recipe->model.z_loss = *factor;
  return {};
}

}  // namespace

const InterventionKind kZLoss = {
    .name = "z-loss",
    .summary =
        "Minimise the cross entropy plus a factor times logsumexp squared; recorded losses stay "
        "the cross entropy",
    .touches = "recipe: model.z_loss",
    .formula = "loss = cross entropy + factor * logsumexp(z)^2",
    .example = "z-loss:1e-4",
    .reference = "Chowdhery et al. 2022, arXiv 2204.02311, section 5 (z-loss)",
    .parameters = {{"factor", "1e-4 as published, or off", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
