// softcap: another cap on the logits, or none.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  recipe->model.final_logit_softcapping = 0;
  if (arguments.at("value") == "off") return {};
  RT_ASSIGN_OR_RETURN(const double cap, NumberArgumentIn(arguments, "value", 0, 1e30));
  if (cap == 0) return UsageError("value: expected a cap above 0, or off, got '" +
                                  arguments.at("value") + "'");
  recipe->model.final_logit_softcapping = cap;
  return {};
}

}  // namespace

const InterventionKind kSoftcap = {
    .name = "softcap",
    .summary = "Cap the logits z as c tanh(z / c) with another c, or not at all",
    .touches = "recipe: model.final_logit_softcapping",
    .formula = "z = c * tanh(z / c), or z",
    .example = "softcap:off",
    .reference = "Gemma Team 2024, arXiv 2408.00118",
    .parameters = {{"value", "c above 0, or off", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
