// attention: attention computed in another order of sums.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "kind", {"materialised", "blockwise"}));
  recipe->model.attention = arguments.at("kind") == "blockwise" ? AttentionKind::kBlockwise
                                                                : AttentionKind::kMaterialised;
  return {};
}

}  // namespace

const InterventionKind kAttention = {
    .name = "attention",
    .summary =
        "Compute attention with the whole score matrix, or block by block as flash attention",
    .touches = "recipe: model.attention",
    .formula = "o = softmax(s) v, of whole rows of scores or of 64 keys at a time",
    .example = "attention:blockwise",
    .reference = "Dao et al. 2022, arXiv 2205.14135",
    .parameters = {{"kind", "materialised or blockwise", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
