// qk-norm: the norms of queries and keys, left out or multiplied by a factor.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  const std::string &state = arguments.at("state"), &gain = arguments.at("gain");
  if (state == "recipe" && gain == "recipe") return UsageError("expected state=off|on, gain=FACTOR, or both");
  if (!recipe->model.qk_norm && (state == "on" || gain != "recipe")) {
    return UsageError("the model has no such norms (model.qk_norm = false)");
  }
  if (state != "recipe") {
    RT_ASSIGN_OR_RETURN(const bool on, OnOffArgument(arguments, "state"));
    recipe->model.bypass_qk_norm = !on;
  }
  if (gain == "recipe") return {};
  RT_ASSIGN_OR_RETURN(recipe->model.qk_norm_gain, NumberArgumentIn(arguments, "gain", 0, 1e30));
  return {};
}

}  // namespace

const InterventionKind kQkNorm = {
    .name = "qk-norm",
    .summary =
        "Leave out the norms of queries and keys, whose weights then stay, or scale what they give",
    .touches = "recipe: model.bypass_qk_norm, model.qk_norm_gain",
    .formula = "q = gain * norm(q), k = gain * norm(k), or gain * q, gain * k",
    .example = "qk-norm:off",
    .reference =
        "Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442 (QK norm)",
    .parameters = {{"state", "off, on, or recipe", "recipe"},
                   {"gain", "factor on both norms' outputs, so its square on the scores, or recipe",
                    "recipe"}},
    .edit_recipe = Edit};

}  // namespace retrace
