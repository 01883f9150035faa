// pre-norm: the norms at a branch's entry, left out of the computation.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const bool on, OnOffArgument(arguments, "state"));
  if (on && !recipe->model.pre_norm) {
    return UsageError("state: expected off, for the model has no such norms (model.pre_norm = false), "
                      "got 'on'");
  }
  recipe->model.bypass_pre_norm = !on;
  return {};
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Edit(arguments, &recipe);
}

}  // namespace

const InterventionKind kPreNorm = {
    .name = "pre-norm",
    .summary = "Leave out the norms at the entry of attention and MLP; their weights stay as they are",
    .touches = "recipe: model.bypass_pre_norm",
    .example = "pre-norm:off",
    .reference = "Xiong et al. 2020, arXiv 2002.04745 (pre-norm)",
    .parameters = {{"state", "off or on", ""}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
