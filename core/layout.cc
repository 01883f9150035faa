#include "core/layout.h"

#include <algorithm>

namespace retrace {
namespace {

TensorSpec Vector(std::string name, int64_t size, int64_t layer) {
  return {.name = std::move(name), .rows = 1, .cols = size, .vector = true, .layer = layer};
}

TensorSpec Matrix(std::string name, int64_t rows, int64_t cols, Split split, int64_t layer,
                  int64_t kv_heads = 0) {
  return {.name = std::move(name), .rows = rows, .cols = cols, .split = split,
          .kv_heads = kv_heads, .layer = layer};
}

void AddLayer(const ModelRecipe& model, int64_t layer, std::vector<TensorSpec>* out) {
  const int64_t hidden = model.hidden_size, dim = model.HeadDim(layer);
  const int64_t kv_heads = model.KvHeads(layer);
  const auto name = [&](std::string_view suffix) { return LayerTensorName(layer, suffix); };
  if (model.pre_norm) {
    out->push_back(Vector(name("input_layernorm.weight"), hidden, layer));
    out->push_back(Vector(name("pre_feedforward_layernorm.weight"), hidden, layer));
  }
  if (model.post_norm) {
    out->push_back(Vector(name("post_attention_layernorm.weight"), hidden, layer));
    out->push_back(Vector(name("post_feedforward_layernorm.weight"), hidden, layer));
  }
  if (model.qk_norm) {
    out->push_back(Vector(name("self_attn.q_norm.weight"), dim, layer));
    out->push_back(Vector(name("self_attn.k_norm.weight"), dim, layer));
  }
  out->push_back(Matrix(name("self_attn.q_proj.weight"), model.query_heads * dim, hidden,
                        Split::kRows, layer));
  out->push_back(Matrix(name("self_attn.k_proj.weight"), kv_heads * dim, hidden, Split::kKvHeads,
                        layer, kv_heads));
  if (model.HasValueProjection(layer)) {
    out->push_back(Matrix(name("self_attn.v_proj.weight"), kv_heads * dim, hidden,
                          Split::kKvHeads, layer, kv_heads));
  }
  out->push_back(Matrix(name("self_attn.o_proj.weight"), hidden, model.query_heads * dim,
                        Split::kColumns, layer));
  const int64_t inner = model.intermediate_size;
  out->push_back(Matrix(name("mlp.gate_proj.weight"), inner, hidden, Split::kRows, layer));
  out->push_back(Matrix(name("mlp.up_proj.weight"), inner, hidden, Split::kRows, layer));
  out->push_back(Matrix(name("mlp.down_proj.weight"), hidden, inner, Split::kColumns, layer));
}

// The rectangle of `spec` that shard s of V owns; empty where it owns none.
Piece OwnedPiece(const TensorSpec& spec, int64_t s, int64_t V) {
  Piece piece{.row_last = spec.rows, .col_last = spec.cols};
  switch (spec.split) {
    case Split::kReplicated:
      if (s != 0) piece.row_last = 0;
      break;
    case Split::kRows:
      piece.row_first = s * (spec.rows / V);
      piece.row_last = (s + 1) * (spec.rows / V);
      break;
    case Split::kColumns:
      piece.col_first = s * (spec.cols / V);
      piece.col_last = (s + 1) * (spec.cols / V);
      break;
    case Split::kKvHeads: {
      const int64_t dim = spec.rows / spec.kv_heads;
      // Head h is owned by the first shard that uses it: heads [ceil(s n/V), ceil((s+1) n/V)).
      const int64_t n = spec.kv_heads;
      piece.row_first = (s * n + V - 1) / V * dim;
      piece.row_last = ((s + 1) * n + V - 1) / V * dim;
      break;
    }
  }
  return piece;
}

Status Divides(const char* what, int64_t value, int64_t V) {
  if (value % V == 0) return {};
  return UsageError(std::to_string(V) + " virtual shards must divide " + what + " = " +
                    std::to_string(value));
}

Status CheckShards(const ModelRecipe& model, int64_t V) {
  if (V < 1 || (V & (V - 1)) != 0) {
    return UsageError("virtual shards: expected a power of two, got " + std::to_string(V));
  }
  RT_RETURN_IF_ERROR(Divides("model.query_heads", model.query_heads, V));
  RT_RETURN_IF_ERROR(Divides("model.intermediate_size", model.intermediate_size, V));
  RT_RETURN_IF_ERROR(Divides("model.vocab_size", model.vocab_size, V));
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const int64_t heads = model.KvHeads(layer);
    if (heads < 1 || model.query_heads % heads != 0) {
      return UsageError("model: KV heads = " + std::to_string(heads) +
                        " must divide model.query_heads = " + std::to_string(model.query_heads));
    }
    if (heads % V != 0 && V % heads != 0) {
      return UsageError(std::to_string(V) + " virtual shards must divide, or be divided by, the " +
                        std::to_string(heads) + " KV heads of layer " + std::to_string(layer));
    }
  }
  return {};
}

}  // namespace

std::string TensorKind(const TensorSpec& spec) {
  std::string name = spec.name;
  const std::string where = spec.layer >= 0 ? LayerTensorName(spec.layer, "") : "model.";
  if (name.starts_with(where)) name = name.substr(where.size());
  if (name.ends_with(".weight")) name.resize(name.size() - 7);
  return name;
}

std::string LayerTensorName(int64_t layer, std::string_view suffix) {
  return "model.layers." + std::to_string(layer) + "." + std::string(suffix);
}

std::vector<TensorSpec> ModelTensors(const ModelRecipe& model) {
  std::vector<TensorSpec> tensors;
  tensors.push_back(Matrix("model.embed_tokens.weight", model.vocab_size, model.hidden_size,
                           Split::kRows, -1));
  if (!model.tie_word_embeddings) {
    tensors.push_back(
        Matrix("lm_head.weight", model.vocab_size, model.hidden_size, Split::kRows, -1));
  }
  tensors.push_back(Vector("model.norm.weight", model.hidden_size, -1));
  for (int64_t layer = 0; layer < model.layers; ++layer) AddLayer(model, layer, &tensors);
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorSpec& a, const TensorSpec& b) { return a.name < b.name; });
  return tensors;
}

Result<Layout> Layout::Make(const ModelRecipe& model, int64_t virtual_shards) {
  RT_RETURN_IF_ERROR(CheckShards(model, virtual_shards));
  Layout layout;
  layout.tensors_ = ModelTensors(model);
  layout.pieces_.resize(virtual_shards);
  layout.slab_numel_.assign(virtual_shards, 0);
  for (int64_t s = 0; s < virtual_shards; ++s) {
    for (size_t t = 0; t < layout.tensors_.size(); ++t) {
      Piece piece = OwnedPiece(layout.tensors_[t], s, virtual_shards);
      if (piece.numel() == 0) continue;
      piece.tensor = static_cast<int>(t);
      piece.offset = layout.slab_numel_[s];
      layout.slab_numel_[s] += piece.numel();
      layout.pieces_[s].push_back(piece);
    }
  }
  return layout;
}

int64_t Layout::parameters() const {
  int64_t total = 0;
  for (const TensorSpec& spec : tensors_) total += spec.numel();
  return total;
}

int Layout::Find(std::string_view name) const {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const TensorSpec& spec, std::string_view wanted) { return spec.name < wanted; });
  if (at == tensors_.end() || at->name != name) return -1;
  return static_cast<int>(at - tensors_.begin());
}

const Piece* Layout::FindPiece(int shard, int tensor) const {
  const auto& list = pieces_[shard];
  const auto at =
      std::lower_bound(list.begin(), list.end(), tensor,
                       [](const Piece& piece, int wanted) { return piece.tensor < wanted; });
  return at != list.end() && at->tensor == tensor ? &*at : nullptr;
}

bool IsBypassed(const ModelRecipe& model, const TensorSpec& spec) {
  const auto is = [&](const char* suffix) {
    return spec.layer >= 0 && spec.name == LayerTensorName(spec.layer, suffix);
  };
  return (model.bypass_qk_norm &&
          (is("self_attn.q_norm.weight") || is("self_attn.k_norm.weight"))) ||
         (model.bypass_pre_norm &&
          (is("input_layernorm.weight") || is("pre_feedforward_layernorm.weight"))) ||
         (model.bypass_post_norm &&
          (is("post_attention_layernorm.weight") || is("post_feedforward_layernorm.weight")));
}

}  // namespace retrace
