// One configuration under tests/data/parity: the public implementation's weights, batch, logits,
// layer outputs and gradients (transformers 5.24, FP32, and FP64 as truth; gen.py there made them).
#ifndef RETRACE_TESTS_PARITY_CASE_H_
#define RETRACE_TESTS_PARITY_CASE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/layout.h"
#include "formats/safetensors.h"
#include "kernels/engine.h"
#include "replay/parameter_map.h"
#include "replay/solo_comm.h"
#include "core/scalar_math.h"
#include "replay/transformer.h"
#include "tests/test_data.h"

namespace retrace {

inline nlohmann::json ReadJson(const std::string& path) {
  std::ifstream in(path);
  return nlohmann::json::parse(in);
}

inline std::vector<std::string> ParityDirectories() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator(TestData("parity"))) {
    if (entry.is_directory()) found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

struct ParityCase {
  std::string directory;
  Recipe recipe;
  TokenBatch batch;
  nlohmann::json report;

  explicit ParityCase(const std::string& dir) : directory(dir) {
    const nlohmann::json spec = ReadJson(dir + "/spec.json");
    report = ReadJson(dir + "/report.json");
    ModelRecipe& m = recipe.model;
    m.vocab_size = spec["vocab_size"];
    m.hidden_size = spec["hidden_size"];
    m.intermediate_size = spec["intermediate_size"];
    m.layers = spec["num_hidden_layers"];
    m.query_heads = spec["num_attention_heads"];
    m.kv_heads = spec["num_key_value_heads"];
    m.global_kv_heads = spec["num_global_key_value_heads"];
    m.head_dim = spec["head_dim"];
    m.global_head_dim = spec["global_head_dim"];
    m.attention_k_eq_v = spec["attention_k_eq_v"];
    m.sliding_window = spec["sliding_window"];
    m.sliding_rope_theta = spec["sliding_rope_theta"];
    m.full_rope_theta = spec["full_rope_theta"];
    m.full_partial_rotary_factor = spec["full_partial_rotary_factor"];
    m.rms_norm_eps = spec["rms_norm_eps"];
    m.final_logit_softcapping =
        spec["final_logit_softcapping"].is_null() ? 0.0 : double(spec["final_logit_softcapping"]);
    m.attention_scale = spec["attention_scaling"];
    for (const auto& kind : spec["layer_types"]) {
      m.layer_types.push_back(kind == "full_attention" ? LayerKind::kFull : LayerKind::kSliding);
    }
    const SafetensorsFile weights = SafetensorsFile::Open(dir + "/model.safetensors").value();
    for (int64_t l = 0; l < m.layers; ++l) {
      m.layer_scalar.push_back(weights.ReadFloat(LayerTensorName(l, "layer_scalar")).value()[0]);
    }
    batch = ReadBatch(dir + "/inputs.safetensors", 0, 1);
  }

  // Batch `index` of `count` stacked ones.
  static TokenBatch ReadBatch(const std::string& path, int64_t index, int64_t count) {
    const SafetensorsFile file = SafetensorsFile::Open(path).value();
    const std::vector<int64_t>& shape = file.tensors().at("input_ids").shape;
    const std::vector<int32_t> ids = file.ReadInt32("input_ids").value();
    const std::vector<int32_t> labels = file.ReadInt32("labels").value();
    TokenBatch batch;
    batch.sequences = shape[shape.size() - 2];
    batch.length = shape.back();
    const int64_t n = batch.tokens();
    EXPECT_EQ(static_cast<int64_t>(ids.size()), n * count);
    batch.ids.assign(ids.begin() + index * n, ids.begin() + (index + 1) * n);
    batch.labels.assign(labels.begin() + index * n, labels.begin() + (index + 1) * n);
    return batch;
  }
};

// A transformer alone in its process, with slabs of its own.
template <class T>
struct LoneTransformer {
  Recipe recipe;
  Layout layout;
  ParameterMap map;
  Engine engine;
  SoloComm comm;
  ShardTree tree;
  Transformer<T> transformer;
  std::vector<std::vector<T>> weights, gradients;

  LoneTransformer(const Recipe& r, int shards, Isa isa = BestIsa(), int threads = 2,
                  const NativeKernels* native = nullptr)
      : recipe(r),
        layout(Layout::Make(recipe.model, shards).value()),
        map(layout, 0, shards),
        engine(isa, threads, nullptr, native),
        tree(engine, comm, {0, 1, 1}),
        transformer(recipe, map, engine, tree) {
    for (int i = 0; i < map.slabs(); ++i) {
      weights.emplace_back(map.slab_numel(i));
      gradients.emplace_back(map.slab_numel(i));
    }
  }

  void LoadWeights(const SafetensorsFile& file) {
    for (size_t t = 0; t < layout.tensors().size(); ++t) {
      const std::vector<float> whole = file.ReadFloat(layout.tensors()[t].name).value();
      SetTensor(static_cast<int>(t), whole);
    }
  }
  template <class U>
  void SetTensor(int tensor, const std::vector<U>& whole) {
    for (int s = 0; s < layout.shards(); ++s) {
      const Piece* piece = layout.FindPiece(s, tensor);
      if (piece == nullptr) continue;
      for (int64_t i = 0; i < piece->numel(); ++i) {
        weights[s][piece->offset + i] = whole[WholeIndex(*piece, i)];
      }
    }
  }
  std::vector<double> WholeGradient(int tensor) const {
    std::vector<double> whole(layout.tensors()[tensor].numel());
    for (int s = 0; s < layout.shards(); ++s) {
      const Piece* piece = layout.FindPiece(s, tensor);
      if (piece == nullptr) continue;
      for (int64_t i = 0; i < piece->numel(); ++i) {
        whole[WholeIndex(*piece, i)] = gradients[s][piece->offset + i];
      }
    }
    return whole;
  }
  int64_t WholeIndex(const Piece& piece, int64_t i) const {
    const int64_t cols = layout.tensors()[piece.tensor].cols;
    return (piece.row_first + i / piece.cols()) * cols + piece.col_first + i % piece.cols();
  }
  std::vector<double> WholeLogits(int64_t tokens) const {
    const int64_t vocab = recipe.model.vocab_size, part = vocab / layout.shards();
    std::vector<double> whole(tokens * vocab);
    for (int s = 0; s < layout.shards(); ++s) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t v = 0; v < part; ++v) {
          whole[t * vocab + s * part + v] = transformer.logits(s)[t * part + v];
        }
      }
    }
    return whole;
  }

  WeightSlabs<T> weight_slabs() const {
    WeightSlabs<T> slabs;
    for (const auto& slab : weights) slabs.push_back(slab.data());
    return slabs;
  }
  GradientSlabs<T> gradient_slabs() {
    GradientSlabs<T> slabs;
    for (auto& slab : gradients) slabs.push_back(slab.data());
    return slabs;
  }
};

inline double Norm(const std::vector<double>& a) {
  double sum = 0;
  for (double x : a) sum += x * x;
  return std::sqrt(sum);
}

inline double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

inline double Relative(const std::vector<double>& a, const std::vector<double>& b) {
  return Distance(a, b) / Norm(b);
}

}  // namespace retrace

#endif  // RETRACE_TESTS_PARITY_CASE_H_
