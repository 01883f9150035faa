// eps: another eps of Adam.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(recipe->optimizer.eps, NumberArgumentIn(arguments, "value", 1e-37, 1e30));
  return {};
}

}  // namespace

const InterventionKind kEps = {
    .name = "eps",
    .summary = "Add another eps to sqrt(v) after bias correction",
    .touches = "recipe: optimizer.eps",
    .formula = "u = m / (sqrt(v) + eps)",
    .example = "eps:1e-15@6..24",
    .reference =
        "Wortsman et al. 2023, arXiv 2309.14322 (updates under eps); OLMo 2, arXiv 2501.00656",
    .parameters = {{"value", "above 0", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
