// post-norm: the norms at the end of a branch, left out of the computation.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const bool on, OnOffArgument(arguments, "state"));
  if (on && !recipe->model.post_norm) {
    return UsageError("state: expected off, for the model has no such norms (model.post_norm = false), "
                      "got 'on'");
  }
  recipe->model.bypass_post_norm = !on;
  return {};
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Edit(arguments, &recipe);
}

}  // namespace

const InterventionKind kPostNorm = {
    .name = "post-norm",
    .summary = "Leave out the norms at the end of attention and MLP; their weights stay as they are",
    .touches = "recipe: model.bypass_post_norm",
    .example = "post-norm:off",
    .reference = "Ding et al. 2021, arXiv 2105.13290 (sandwich norm)",
    .parameters = {{"state", "off or on", ""}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
