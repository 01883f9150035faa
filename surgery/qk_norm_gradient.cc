// qk-norm-gradient: gradients of q_norm and k_norm that are not reduced over shards.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "of", {"all-shards", "first-shard"}));
  recipe->model.qk_norm_gradient =
      arguments.at("of") == "all-shards" ? QkNormGradient::kAllShards : QkNormGradient::kFirstShard;
  return {};
}

}  // namespace

const InterventionKind kQkNormGradient = {
    .name = "qk-norm-gradient",
    .summary =
        "Take the gradients of q_norm and k_norm from the first shard alone, as its rank sees "
        "them where ranks do not reduce them; the other ranks' copies, which drift, are not kept",
    .touches = "recipe: model.qk_norm_gradient",
    .formula = "dw = shard 0's part, not the sum of all shards'",
    .example = "qk-norm-gradient:first-shard",
    .reference = "Megatron Core reduces them only with config.qk_layernorm or sequence parallelism",
    .parameters = {{"of", "first-shard or all-shards", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
