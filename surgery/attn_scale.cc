// attn-scale: another factor on q k^T.
#include "core/scalar_math.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  const std::string& value = arguments.at("value");
  ModelRecipe& model = recipe->model;
  // The model has one scale for both kinds of layers, so the text says whose dimension it follows.
  if (value == "1/sqrt(head_dim)" || value == "1/sqrt(global_head_dim)") {
    const int64_t dim = value == "1/sqrt(head_dim)" ? model.head_dim : model.global_head_dim;
    model.attention_scale = 1.0 / math::Sqrt(static_cast<double>(dim));
    return {};
  }
  if (value.starts_with("1/")) {
    return UsageError("value: expected a number, 1/sqrt(head_dim) or 1/sqrt(global_head_dim), got '" +
                      value + "'");
  }
  RT_ASSIGN_OR_RETURN(model.attention_scale, NumberArgumentIn(arguments, "value", 0, 1e30));
  return {};
}

}  // namespace

const InterventionKind kAttnScale = {
    .name = "attn-scale",
    .summary = "Scale attention scores by another factor, in all layers",
    .touches = "recipe: model.attention_scale",
    .formula = "s = value * q.k",
    .example = "attn-scale:1/sqrt(head_dim)",
    .reference =
        "Vaswani et al. 2017, arXiv 1706.03762; huggingface/transformers issue 45676 (scale 1.0)",
    .parameters = {{"value",
                    "a number, 1/sqrt(head_dim) (of sliding layers) or 1/sqrt(global_head_dim)",
                    ""}},
    .edit_recipe = Edit};

}  // namespace retrace
