#include "formats/megatron_names.h"

#include <fmt/format.h>

namespace retrace {
namespace {

using Shapes = std::map<std::string, std::vector<int64_t>>;

constexpr char kEmbedding[] = "embedding.word_embeddings.weight";
constexpr char kLayers[] = "decoder.layers.";

// Names of single tensors of a layer, and ours.
const std::map<std::string, std::string>& LayerNames() {
  static const std::map<std::string, std::string> kNames = {
      {"input_layernorm.weight", "input_layernorm.weight"},
      {"self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"},  // fused with TE
      {"post_self_attn_layernorm.weight", "post_attention_layernorm.weight"},
      {"pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight"},
      {"mlp.linear_fc1.layer_norm_weight", "pre_feedforward_layernorm.weight"},
      {"post_mlp_layernorm.weight", "post_feedforward_layernorm.weight"},
      {"self_attention.linear_proj.weight", "self_attn.o_proj.weight"},
      {"self_attention.q_layernorm.weight", "self_attn.q_norm.weight"},
      {"self_attention.k_layernorm.weight", "self_attn.k_norm.weight"},
      {"mlp.linear_fc2.weight", "mlp.down_proj.weight"},
      {"layer_scalar", "layer_scalar"}};
  return kNames;
}

// What stands before "embedding." or "decoder." in this file ("module.", "language_model.").
std::string PrefixOf(const Shapes& shapes) {
  for (const auto& [name, shape] : shapes) {
    if (name.ends_with(kEmbedding)) return name.substr(0, name.size() + 1 - sizeof kEmbedding);
  }
  return "";
}

const std::vector<int64_t>* Find(const Shapes& shapes, const std::string& name) {
  const auto at = shapes.find(name);
  return at == shapes.end() ? nullptr : &at->second;
}

// q, k and v of a layer: query heads from the output projection, head size from the norm of
// queries.
Status SplitQkv(const Shapes& shapes, const std::string& layer, const std::string& ours,
                std::vector<MegatronTensor>* out) {
  const std::string stored = layer + "self_attention.linear_qkv.weight";
  const std::vector<int64_t>* norm = Find(shapes, layer + "self_attention.q_layernorm.weight");
  const std::vector<int64_t>* proj = Find(shapes, layer + "self_attention.linear_proj.weight");
  const std::vector<int64_t>& fused = shapes.at(stored);
  if (norm == nullptr || proj == nullptr || norm->size() != 1 || proj->size() != 2 ||
      fused.size() != 2 || (*norm)[0] < 1) {
    return DamagedError(stored +
                        ": expected q_layernorm and linear_proj of the same layer beside it");
  }
  const int64_t dim = (*norm)[0], query_heads = (*proj)[1] / dim;
  const int64_t kv_heads = (fused[0] / dim - query_heads) / 2;
  if (kv_heads < 1 || query_heads % kv_heads != 0 ||
      (query_heads + 2 * kv_heads) * dim != fused[0]) {
    return DamagedError(fmt::format("{}: {} rows are not {} query heads of {} with k and v", stored,
                                    fused[0], query_heads, dim));
  }
  const int64_t group = query_heads / kv_heads + 2;  // heads of a KV head's part
  MegatronTensor q{ours + "self_attn.q_proj.weight", stored, {}};
  MegatronTensor k{ours + "self_attn.k_proj.weight", stored, {}};
  MegatronTensor v{ours + "self_attn.v_proj.weight", stored, {}};
  for (int64_t head = 0; head < kv_heads; ++head) {
    const int64_t first = head * group * dim;
    q.rows.emplace_back(first, first + (group - 2) * dim);
    k.rows.emplace_back(first + (group - 2) * dim, first + (group - 1) * dim);
    v.rows.emplace_back(first + (group - 1) * dim, first + group * dim);
  }
  for (MegatronTensor* tensor : {&q, &k, &v}) out->push_back(std::move(*tensor));
  return {};
}

Status SplitLayerTensor(const Shapes& shapes, const std::string& prefix, const std::string& name,
                        std::vector<MegatronTensor>* out) {
  const size_t begin = prefix.size() + sizeof kLayers - 1, dot = name.find('.', begin);
  const std::string layer = name.substr(0, dot + 1), suffix = name.substr(dot + 1);
  const std::string ours = "model.layers." + name.substr(begin, dot + 1 - begin);
  if (const auto at = LayerNames().find(suffix); at != LayerNames().end()) {
    out->push_back({ours + at->second, name, {}});
    return {};
  }
  if (suffix == "self_attention.linear_qkv.weight") return SplitQkv(shapes, layer, ours, out);
  if (suffix == "mlp.linear_fc1.weight") {
    const int64_t rows = shapes.at(name).empty() ? 0 : shapes.at(name)[0];
    if (rows % 2 != 0) {
      return DamagedError(fmt::format("{}: expected gate and up, got {} rows", name, rows));
    }
    out->push_back({ours + "mlp.gate_proj.weight", name, {{0, rows / 2}}});
    out->push_back({ours + "mlp.up_proj.weight", name, {{rows / 2, rows}}});
    return {};
  }
  out->push_back({name, name, {}});
  return {};
}

}  // namespace

bool HasMegatronNames(const Shapes& shapes) {
  for (const auto& [name, shape] : shapes) {
    if (name.ends_with(kEmbedding)) return true;
  }
  return false;
}

Result<std::vector<MegatronTensor>> SplitMegatronTensors(const Shapes& shapes) {
  const std::string prefix = PrefixOf(shapes);
  const std::map<std::string, std::string> outside = {
      {prefix + kEmbedding, "model.embed_tokens.weight"},
      {prefix + "decoder.final_layernorm.weight", "model.norm.weight"},
      {prefix + "output_layer.weight", "lm_head.weight"}};
  std::vector<MegatronTensor> tensors;
  for (const auto& [name, shape] : shapes) {
    if (const auto at = outside.find(name); at != outside.end()) {
      tensors.push_back({at->second, name, {}});
    } else if (name.starts_with(prefix + kLayers) &&
               name.find('.', prefix.size() + sizeof kLayers - 1) != std::string::npos) {
      RT_RETURN_IF_ERROR(SplitLayerTensor(shapes, prefix, name, &tensors));
    } else {
      tensors.push_back({name, name, {}});
    }
  }
  return tensors;
}

}  // namespace retrace
