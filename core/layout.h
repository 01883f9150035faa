// Layout: which parameters a model has, and which virtual shard owns which part of each.
// Used by the trainer, the store and every tool that names tensors. A value, immutable.
//
// Each virtual shard owns a *slab*: the concatenation of its *pieces* in canonical order (ascending
// name bytes). A piece is a rectangle of a whole tensor, stored row by row. Every element of every
// tensor is owned by exactly one shard: replicated tensors by shard 0, a KV head that several shards
// use by the first of them. Depends on (model, V) alone, never on ranks (clause 7).
#ifndef RETRACE_CORE_LAYOUT_H_
#define RETRACE_CORE_LAYOUT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/recipe.h"
#include "core/status.h"

namespace retrace {

enum class Split {
  kReplicated,  // norms
  kRows,        // q, gate, up: output features; embedding: vocabulary rows
  kColumns,     // o, down: input features
  kKvHeads,     // k, v: rows by KV head
};

struct TensorSpec {
  std::string name;  // as in Gemma4ForCausalLM safetensors
  int64_t rows = 0;  // 1 for a vector
  int64_t cols = 0;
  bool vector = false;  // shape [cols], else [rows, cols]
  Split split = Split::kReplicated;
  int64_t kv_heads = 0;  // kKvHeads only
  int64_t layer = -1;    // -1: outside the layers

  int64_t numel() const { return rows * cols; }
};

struct Piece {
  int tensor = 0;  // index into Layout::tensors()
  int64_t row_first = 0, row_last = 0;  // [first, last) of the whole tensor
  int64_t col_first = 0, col_last = 0;
  int64_t offset = 0;  // of its first element in the shard's slab

  int64_t rows() const { return row_last - row_first; }
  int64_t cols() const { return col_last - col_first; }
  int64_t numel() const { return rows() * cols(); }
};

class Layout {
 public:
  // Errors: kUsage where V does not divide query heads, intermediate size or vocabulary, or KV heads
  // neither divide nor are divided by V.
  static Result<Layout> Make(const ModelRecipe& model, int64_t virtual_shards);

  int shards() const { return static_cast<int>(pieces_.size()); }
  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const std::vector<Piece>& pieces(int shard) const { return pieces_[shard]; }
  int64_t slab_numel(int shard) const { return slab_numel_[shard]; }
  int64_t parameters() const;                // all tensors; tied embedding once
  int Find(std::string_view name) const;     // -1: no such tensor
  const Piece* FindPiece(int shard, int tensor) const;  // nullptr: not owned there

 private:
  std::vector<TensorSpec> tensors_;
  std::vector<std::vector<Piece>> pieces_;
  std::vector<int64_t> slab_numel_;
};

// The parameters of a model, in canonical order.
std::vector<TensorSpec> ModelTensors(const ModelRecipe& model);

// A tensor's name without what says where it stands: "self_attn.q_proj" of
// "model.layers.3.self_attn.q_proj.weight", "embed_tokens" of "model.embed_tokens.weight".
std::string TensorKind(const TensorSpec& spec);

// The tensor's name within the model: "model.layers.3.self_attn.q_proj.weight" etc.
std::string LayerTensorName(int64_t layer, std::string_view suffix);

// Whether the recipe leaves a tensor out of the computation (model.bypass_...): its gradient is 0 and
// it is not updated. Such tensors are replicated vectors.
bool IsBypassed(const ModelRecipe& model, const TensorSpec& spec);

}  // namespace retrace

#endif  // RETRACE_CORE_LAYOUT_H_
