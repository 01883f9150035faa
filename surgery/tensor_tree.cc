#include "surgery/tensor_tree.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "core/glob.h"

namespace retrace {
namespace {

// The node of a level that a tensor belongs to, without its tensors.
TensorGroup NodeOf(const TensorSpec& spec, TreeLevel level) {
  if (level == TreeLevel::kModel) return {"model", "*", {}, level};
  if (level == TreeLevel::kTensor) return {spec.name, spec.name, {}, level};
  if (spec.layer < 0) return {TensorKind(spec), spec.name, {}, level};
  const std::string layer = fmt::format("layer {}", spec.layer);
  if (level == TreeLevel::kLayer) return {layer, LayerTensorName(spec.layer, "*"), {}, level};
  for (const auto& [block, suffix] : {std::pair(" attention", "self_attn.*"),
                                      std::pair(" mlp", "mlp.*"),
                                      std::pair(" norms", "*layernorm.weight")}) {
    std::string glob = LayerTensorName(spec.layer, suffix);
    if (GlobMatches(glob, spec.name)) return {layer + block, std::move(glob), {}, level};
  }
  return {TensorKind(spec) + " of " + layer, spec.name, {}, level};
}

}  // namespace

TreeLevel ParseTreeLevel(const std::string& name) {
  const auto at = std::find(std::begin(kTreeLevelNames), std::end(kTreeLevelNames), name);
  RT_CHECK(at != std::end(kTreeLevelNames));
  return static_cast<TreeLevel>(at - std::begin(kTreeLevelNames));
}

std::vector<TensorGroup> GroupsAt(const Layout& layout, TreeLevel level) {
  std::vector<TensorGroup> groups;
  for (int t = 0; t < std::ssize(layout.tensors()); ++t) {
    TensorGroup node = NodeOf(layout.tensors()[t], level);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const TensorGroup& g) { return g.glob == node.glob; });
    if (group == groups.end()) group = groups.insert(groups.end(), std::move(node));
    group->tensors.push_back(t);
  }
  // Names sort layer 10 before layer 2; what is outside of the layers stands first.
  std::stable_sort(groups.begin(), groups.end(), [&](const TensorGroup& a, const TensorGroup& b) {
    return layout.tensors()[a.tensors[0]].layer < layout.tensors()[b.tensors[0]].layer;
  });
  return groups;
}

std::vector<TensorGroup> PartsOf(const Layout& layout, const TensorGroup& group) {
  if (group.level == TreeLevel::kTensor) return {group};
  const auto below = static_cast<TreeLevel>(static_cast<int>(group.level) + 1);
  std::vector<TensorGroup> parts = GroupsAt(layout, below);
  std::erase_if(parts, [&](const TensorGroup& part) {
    return !std::binary_search(group.tensors.begin(), group.tensors.end(), part.tensors[0]);
  });
  return parts;
}

}  // namespace retrace
