// v-norm: the weightless norm of values.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(recipe->model.v_norm, OnOffArgument(arguments, "state"));
  return {};
}

}  // namespace

const InterventionKind kVNorm = {.name = "v-norm",
                                 .summary = "Norm values, or leave them as they are",
                                 .touches = "recipe: model.v_norm",
                                 .formula = "v = v / rms(v), or v",
                                 .example = "v-norm:off",
                                 .reference = "Gemma 4's weightless value norm, as in transformers",
                                 .parameters = {{"state", "off or on", ""}},
                                 .edit_recipe = Edit};

}  // namespace retrace
