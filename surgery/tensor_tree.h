// TensorTree: a model's tensors as a tree of globs: the model, its layers, their blocks, tensors.
// Used by blame and by the search for a cause, which look at parts of a model coarse to fine. Pure.
//
//   model         *
//   layer         model.layers.3.*                 and each tensor outside of the layers
//   block         model.layers.3.self_attn.*, model.layers.3.mlp.*, model.layers.3.*layernorm.weight
//   tensor        its name
#ifndef RETRACE_SURGERY_TENSOR_TREE_H_
#define RETRACE_SURGERY_TENSOR_TREE_H_

#include <string>
#include <vector>

#include "core/layout.h"

namespace retrace {

enum class TreeLevel { kModel, kLayer, kBlock, kTensor };

inline constexpr const char* kTreeLevelNames[] = {"model", "layer", "block", "tensor"};
inline const char* TreeLevelName(TreeLevel level) {
  return kTreeLevelNames[static_cast<int>(level)];
}
// `name`: one of kTreeLevelNames.
TreeLevel ParseTreeLevel(const std::string& name);

// One node.
struct TensorGroup {
  std::string name;          // for people: "layer 3 attention"
  std::string glob;          // matches its tensors and no other
  std::vector<int> tensors;  // indices into the layout, ascending; never empty
  TreeLevel level = TreeLevel::kModel;
};

// The nodes of a level, in the order of the model; together they are all tensors, each once.
std::vector<TensorGroup> GroupsAt(const Layout& layout, TreeLevel level);

// The nodes one level below that make up a group; of a tensor: itself.
std::vector<TensorGroup> PartsOf(const Layout& layout, const TensorGroup& group);

}  // namespace retrace

#endif  // RETRACE_SURGERY_TENSOR_TREE_H_
