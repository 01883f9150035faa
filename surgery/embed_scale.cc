// embed-scale: whether looked-up rows are multiplied by sqrt(hidden_size), and how that factor is rounded.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  const std::string &on = arguments.at("on"), &rounding = arguments.at("rounding");
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "on", {"recipe", "yes", "no"}));
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "rounding", {"recipe", "none", "bf16"}));
  if (on == "recipe" && rounding == "recipe") {
    return UsageError("expected on=yes|no, rounding=none|bf16, or both");
  }
  if (on != "recipe") recipe->model.embed_scale = on == "yes";
  if (rounding == "none") recipe->model.embed_scale_rounding = EmbedScaleRounding::kNone;
  if (rounding == "bf16") recipe->model.embed_scale_rounding = EmbedScaleRounding::kBf16;
  return {};
}

}  // namespace

const InterventionKind kEmbedScale = {
    .name = "embed-scale",
    .summary =
        "Multiply looked-up embedding rows by sqrt(hidden_size) or not, the factor rounded or not",
    .touches = "recipe: model.embed_scale, model.embed_scale_rounding",
    .formula = "x = sqrt(hidden_size) * row, or row",
    .example = "embed-scale:no",
    .reference =
        "Takase et al. 2023, arXiv 2312.16903 (scaled embedding); transformers rounds the factor "
        "to the weights' type",
    .parameters = {{"on", "yes, no, or recipe", "recipe"},
                   {"rounding", "of the factor itself: none, bf16, or recipe", "recipe"}},
    .edit_recipe = Edit};

}  // namespace retrace
