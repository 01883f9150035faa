#include "core/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "tests/places.h"

namespace retrace {
namespace {

Recipe Example(const std::string& name, const std::vector<std::string>& overrides = {}) {
  const auto recipe = LoadRecipe(SourceDir() + "/examples/" + name, overrides);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.value();
}

// Counts owners of every element, and that slabs are gapless and in canonical order.
void ExpectOwnedExactlyOnce(const Layout& layout) {
  std::vector<std::vector<int>> owners;
  for (const TensorSpec& spec : layout.tensors()) owners.emplace_back(spec.numel(), 0);
  for (int shard = 0; shard < layout.shards(); ++shard) {
    int64_t offset = 0;
    int last = -1;
    for (const Piece& piece : layout.pieces(shard)) {
      EXPECT_LT(last, piece.tensor);
      EXPECT_EQ(offset, piece.offset);
      EXPECT_EQ(&piece, layout.FindPiece(shard, piece.tensor));
      last = piece.tensor;
      offset += piece.numel();
      for (int64_t row = piece.row_first; row < piece.row_last; ++row) {
        for (int64_t col = piece.col_first; col < piece.col_last; ++col) {
          ++owners[piece.tensor][row * layout.tensors()[piece.tensor].cols + col];
        }
      }
    }
    EXPECT_EQ(offset, layout.slab_numel(shard));
  }
  for (size_t t = 0; t < owners.size(); ++t) {
    EXPECT_TRUE(std::all_of(owners[t].begin(), owners[t].end(), [](int n) { return n == 1; }))
        << layout.tensors()[t].name;
  }
}

TEST(Layout, EveryElementIsOwnedExactlyOnceForAnyShardsAndKvHeads) {
  for (const char* kv_heads : {"1", "2", "4", "8"}) {
    for (int64_t shards : {1, 2, 4, 8}) {
      const Recipe recipe = Example("tiny.toml", {std::string("model.kv_heads=") + kv_heads});
      const auto layout = Layout::Make(recipe.model, shards);
      ASSERT_TRUE(layout.ok()) << layout.status().message();
      SCOPED_TRACE(std::string(kv_heads) + " KV heads, V = " + std::to_string(shards));
      ExpectOwnedExactlyOnce(layout.value());
    }
  }
}

TEST(Layout, SharedKvHeadBelongsToTheFirstShardThatUsesIt) {
  const Layout layout = Layout::Make(Example("tiny.toml").model, 8).value();
  const int k_proj = layout.Find("model.layers.0.self_attn.k_proj.weight");  // 2 heads of 8 rows
  for (int shard = 0; shard < 8; ++shard) {
    const Piece* piece = layout.FindPiece(shard, k_proj);
    ASSERT_EQ(shard == 0 || shard == 4, piece != nullptr) << shard;
    if (piece != nullptr) {
      EXPECT_EQ(shard * 2, piece->row_first);
      EXPECT_EQ(8, piece->rows());
    }
  }
}

TEST(Layout, Gemma4Of31BillionHasTheReportsParameterCount) {
  const Recipe recipe = Example("gemma4_31b.toml");
  const Layout layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
  EXPECT_EQ(30'697'345'280, layout.parameters());
  int64_t owned = 0, vectors = 0;
  for (int shard = 0; shard < layout.shards(); ++shard) owned += layout.slab_numel(shard);
  EXPECT_EQ(30'697'345'280, owned);
  for (const TensorSpec& spec : layout.tensors()) vectors += spec.vector ? spec.numel() : 0;
  EXPECT_EQ(1'331'456, vectors);
}

TEST(Layout, Gemma4LayersHaveTheNamesAndShapesOfTransformers) {
  const Layout layout = Layout::Make(Example("gemma4_31b.toml").model, 1).value();
  const auto expect = [&](const char* name, int64_t rows, int64_t cols) {
    const int at = layout.Find(name);
    ASSERT_GE(at, 0) << name;
    EXPECT_EQ(rows, layout.tensors()[at].rows) << name;
    EXPECT_EQ(cols, layout.tensors()[at].cols) << name;
  };
  expect("model.embed_tokens.weight", 262144, 5376);
  expect("model.norm.weight", 1, 5376);
  expect("model.layers.0.self_attn.q_proj.weight", 8192, 5376);
  expect("model.layers.0.self_attn.k_proj.weight", 4096, 5376);
  expect("model.layers.0.self_attn.v_proj.weight", 4096, 5376);
  expect("model.layers.0.self_attn.o_proj.weight", 5376, 8192);
  expect("model.layers.0.self_attn.q_norm.weight", 1, 256);
  expect("model.layers.0.mlp.gate_proj.weight", 21504, 5376);
  expect("model.layers.0.mlp.down_proj.weight", 5376, 21504);
  expect("model.layers.59.self_attn.q_proj.weight", 16384, 5376);
  expect("model.layers.59.self_attn.k_proj.weight", 2048, 5376);
  expect("model.layers.59.self_attn.k_norm.weight", 1, 512);
  EXPECT_EQ(-1, layout.Find("lm_head.weight")) << "tied";
  EXPECT_EQ(-1, layout.Find("model.layers.60.mlp.up_proj.weight"));
}

TEST(Layout, FullLayersHaveNoValueProjectionWhereKeyIsValue) {
  for (bool k_eq_v : {true, false}) {
    const Recipe recipe = Example(
        "tiny.toml", {std::string("model.attention_k_eq_v=") + (k_eq_v ? "true" : "false")});
    const Layout layout = Layout::Make(recipe.model, 2).value();
    for (int64_t layer = 0; layer < recipe.model.layers; ++layer) {
      const int v = layout.Find(LayerTensorName(layer, "self_attn.v_proj.weight"));
      const int k = layout.Find(LayerTensorName(layer, "self_attn.k_proj.weight"));
      EXPECT_EQ(recipe.model.IsFull(layer) && k_eq_v, v == -1) << layer;
      // As transformers: global_kv_heads counts only where the value is the key.
      const int64_t heads = recipe.model.IsFull(layer) && k_eq_v ? 1 : 2;
      EXPECT_EQ(heads * recipe.model.HeadDim(layer), layout.tensors()[k].rows) << layer;
    }
  }
}

TEST(Layout, SwitchedOffNormsHaveNoTensors) {
  const Recipe recipe = Example(
      "tiny.toml", {"model.qk_norm=false", "model.pre_norm=false", "model.post_norm=false"});
  for (const TensorSpec& spec : ModelTensors(recipe.model)) {
    EXPECT_EQ(spec.vector, spec.name == "model.norm.weight") << spec.name;
  }
}

TEST(Layout, TensorsAreInAscendingOrderOfNameBytes) {
  const std::vector<TensorSpec> tensors = ModelTensors(Example("bench_spike.toml").model);
  EXPECT_TRUE(std::is_sorted(tensors.begin(), tensors.end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));
  EXPECT_EQ("model.embed_tokens.weight", tensors.front().name);
}

TEST(Layout, ShardsThatDoNotDivideAreRefused) {
  const ModelRecipe model = Example("tiny.toml").model;
  for (int64_t shards : {int64_t{0}, int64_t{-2}, int64_t{3}, int64_t{16}}) {
    EXPECT_EQ(StatusCode::kUsage, Layout::Make(model, shards).status().code()) << shards;
  }
}

}  // namespace
}  // namespace retrace
