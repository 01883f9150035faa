// clip: the threshold of the global gradient norm, or none.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Check(const Arguments& arguments) {
  if (arguments.at("norm") == "none") return {};
  RT_ASSIGN_OR_RETURN(const double norm, NumberArgument(arguments, "norm"));
  if (norm > 0) return {};
  return UsageError("norm: expected none or a norm above 0, got '" + arguments.at("norm") + "'");
}

Status Edit(const Arguments& arguments, Recipe* recipe) {
  recipe->optimizer.clip = 0;
  if (arguments.at("norm") == "none") return {};
  RT_ASSIGN_OR_RETURN(recipe->optimizer.clip, NumberArgument(arguments, "norm"));
  return {};
}

}  // namespace

const InterventionKind kClip = {
    .name = "clip",
    .summary = "Clip the global gradient norm at another threshold, or not at all",
    .touches = "recipe: optimizer.clip",
    .example = "clip:none",
    .reference = "Pascanu et al. 2013, arXiv 1211.5063",
    .parameters = {{"norm", "none, or the largest norm of the whole gradient that is not scaled down",
                    ""}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
