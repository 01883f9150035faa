// pre-norm, post-norm: the norms at a branch's entry or end, left out of the computation. Two kinds
// in one file, for they differ in a name.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, const char* key, bool has, bool* bypass) {
  RT_ASSIGN_OR_RETURN(const bool on, OnOffArgument(arguments, "state"));
  if (on && !has) {
    return UsageError("state: expected off, for the model has no such norms (" + std::string(key) +
                      " = false), got 'on'");
  }
  *bypass = !on;
  return {};
}

Status EditPre(const Arguments& arguments, Recipe* recipe) {
  ModelRecipe& model = recipe->model;
  return Edit(arguments, "model.pre_norm", model.pre_norm, &model.bypass_pre_norm);
}

Status EditPost(const Arguments& arguments, Recipe* recipe) {
  ModelRecipe& model = recipe->model;
  return Edit(arguments, "model.post_norm", model.post_norm, &model.bypass_post_norm);
}

}  // namespace

const InterventionKind kPreNorm = {
    .name = "pre-norm",
    .summary =
        "Leave out the norms at the entry of attention and MLP; their weights stay as they are",
    .touches = "recipe: model.bypass_pre_norm",
    .formula = "x = x + norm(branch(x)), not x + norm(branch(norm(x)))",
    .example = "pre-norm:off",
    .reference = "Xiong et al. 2020, arXiv 2002.04745 (pre-norm)",
    .parameters = {{"state", "off or on", ""}},
    .edit_recipe = EditPre};

const InterventionKind kPostNorm = {
    .name = "post-norm",
    .summary =
        "Leave out the norms at the end of attention and MLP; their weights stay as they are",
    .touches = "recipe: model.bypass_post_norm",
    .formula = "x = x + branch(norm(x)), not x + norm(branch(norm(x)))",
    .example = "post-norm:off",
    .reference = "Ding et al. 2021, arXiv 2105.13290 (sandwich norm)",
    .parameters = {{"state", "off or on", ""}},
    .edit_recipe = EditPost};

}  // namespace retrace
