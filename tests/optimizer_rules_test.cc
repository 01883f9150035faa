// Clip scopes and rules, frozen and bypassed tensors, and updates that are not applied: what they do
// to single elements and counters, against the same written out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/glob.h"
#include "replay/optimizer_rules.h"
#include "tests/numerics_case.h"

namespace retrace {
namespace {

std::vector<TensorSpec> Tensors(const Recipe& recipe) { return ModelTensors(recipe.model); }

// Squares that differ from tensor to tensor.
GradientSquares SomeSquares(const Recipe& recipe) {
  GradientSquares squares;
  const std::vector<TensorSpec> tensors = Tensors(recipe);
  for (size_t t = 0; t < tensors.size(); ++t) {
    squares.tensors.push_back(0.25 + static_cast<double>(t));
    squares.rows.emplace_back();
  }
  return squares;
}

float Factor(double threshold, double norm) {
  const double coefficient = threshold / (norm + 1e-6);
  return coefficient < 1 ? static_cast<float>(coefficient) : 1.0f;
}

TEST(ClipScope, TensorClipsEachByItsOwnNorm) {
  const Recipe recipe = TinyRecipe({"optimizer.clip_scope=tensor", "optimizer.clip=3.0"});
  const GradientSquares squares = SomeSquares(recipe);
  const Clips clips = ClipGradient(recipe, Tensors(recipe), squares, {});
  double sum = 0;
  for (size_t t = 0; t < squares.tensors.size(); ++t) {
    EXPECT_EQ(Factor(3.0, std::sqrt(squares.tensors[t])), clips.tensors[t]);
    sum = sum + squares.tensors[t];
  }
  EXPECT_EQ(1.0f, clips.tensors[0]);
  EXPECT_GT(1.0f, clips.tensors.back());
  EXPECT_EQ(clips.tensors.back(), clips.smallest);
  EXPECT_EQ(std::sqrt(sum), clips.gradient_norm);
}

TEST(ClipScope, LayerClipsEachLayerAndEachTensorOutsideOfThem) {
  const Recipe recipe = TinyRecipe({"optimizer.clip_scope=layer", "optimizer.clip=0.5"});
  const GradientSquares squares = SomeSquares(recipe);
  const std::vector<TensorSpec> tensors = Tensors(recipe);
  const Clips clips = ClipGradient(recipe, tensors, squares, {});
  for (size_t t = 0; t < tensors.size(); ++t) {
    double sum = 0;
    for (size_t u = 0; u < tensors.size(); ++u) {
      const bool together = tensors[t].layer < 0 ? t == u : tensors[t].layer == tensors[u].layer;
      if (together) sum = sum + squares.tensors[u];
    }
    EXPECT_EQ(Factor(0.5, std::sqrt(sum)), clips.tensors[t]) << tensors[t].name;
  }
}

TEST(ClipScope, EmbeddingRowsClipsItsRowsAndTheRestTogether) {
  const Recipe recipe = TinyRecipe({"optimizer.clip_scope=embedding-rows", "optimizer.clip=2.0"});
  GradientSquares squares = SomeSquares(recipe);
  const std::vector<TensorSpec> tensors = Tensors(recipe);
  size_t embedding = 0;
  double rest = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].name == "model.embed_tokens.weight") embedding = t;
    else rest = rest + squares.tensors[t];
  }
  squares.rows[embedding] = {1.0, 16.0, 0.0, 100.0};
  const Clips clips = ClipGradient(recipe, tensors, squares, {});
  EXPECT_EQ((std::vector<float>{1.0f, Factor(2.0, 4.0), 1.0f, Factor(2.0, 10.0)}),
            clips.rows[embedding]);
  EXPECT_EQ(Factor(2.0, 10.0), clips.tensors[embedding]);
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (t == embedding) continue;
    EXPECT_EQ(Factor(2.0, std::sqrt(rest)), clips.tensors[t]);
    EXPECT_TRUE(clips.rows[t].empty());
  }
}

// One group, whose norm is the root of `square`.
Clips ClipNorm(const Recipe& recipe, double norm, const RuleMemory& memory) {
  GradientSquares squares = SomeSquares(recipe);
  std::fill(squares.tensors.begin(), squares.tensors.end(), 0.0);
  squares.tensors[0] = norm * norm;
  return ClipGradient(recipe, Tensors(recipe), squares, memory);
}

TEST(ClipRule, EmaFollowsTheMeanOfClippedNormsAfterItsWarmUp) {
  const Recipe recipe =
      TinyRecipe({"optimizer.clip_rule=ema", "optimizer.clip_factor=2.0", "optimizer.clip_decay=0.75",
                  "optimizer.clip_warmup=2", "optimizer.clip_warmup_norm=8.0"});
  RuleMemory memory;
  Clips clips = ClipNorm(recipe, 16.0, memory);  // warm-up: clipped to 8
  EXPECT_EQ(Factor(8.0, 16.0), clips.smallest);
  double mean = static_cast<double>(clips.smallest) * 16.0;
  EXPECT_EQ((RuleMemory{{"clip.updates", {1}}, {"clip.mean", {mean}}}), clips.memory);
  clips = ClipNorm(recipe, 4.0, clips.memory);
  EXPECT_EQ(1.0f, clips.smallest);
  mean = 0.75 * mean + 0.25 * 4.0;
  EXPECT_EQ(mean, clips.memory.at("clip.mean")[0]);
  clips = ClipNorm(recipe, 100.0, clips.memory);
  EXPECT_EQ(Factor(2.0 * mean, 100.0), clips.smallest);
  EXPECT_EQ(0.75 * mean + 0.25 * (static_cast<double>(clips.smallest) * 100.0),
            clips.memory.at("clip.mean")[0]);
  EXPECT_EQ(3.0, clips.memory.at("clip.updates")[0]);
  const RuleMemory before = clips.memory;
  clips = ClipNorm(recipe, INFINITY, before);  // teaches nothing
  EXPECT_EQ(before.at("clip.mean"), clips.memory.at("clip.mean"));
  EXPECT_EQ(0.0f, clips.smallest);
}

TEST(ClipRule, ZScoreClipsWhatIsManyDeviationsAboveTheMean) {
  const Recipe recipe = TinyRecipe({"optimizer.clip_rule=z-score", "optimizer.clip_z=2.0",
                                    "optimizer.clip_decay=0.5"});
  Clips clips = ClipNorm(recipe, 10.0, {});  // nothing is known yet
  EXPECT_EQ(1.0f, clips.smallest);
  clips = ClipNorm(recipe, 12.0, clips.memory);  // nor a deviation
  EXPECT_EQ(1.0f, clips.smallest);
  EXPECT_EQ(11.0, clips.memory.at("clip.mean")[0]);
  EXPECT_EQ(0.5, clips.memory.at("clip.variance")[0]);
  const double deviation = std::sqrt(0.5), z = (21.0 - 11.0) / deviation;
  const Clips low = ClipNorm(recipe, 12.0, clips.memory);
  EXPECT_EQ(1.0f, low.smallest);
  clips = ClipNorm(recipe, 21.0, clips.memory);
  EXPECT_EQ(Factor(11.0 + (2.0 * 2.0 / z) * deviation, 21.0), clips.smallest);
}

TEST(ClipRule, ARuleForgetsWhatAnotherRememberedOrWhatHasOtherGroups) {
  const Recipe ema = TinyRecipe({"optimizer.clip_rule=ema", "optimizer.clip_factor=1.0"});
  const Recipe tensors = TinyRecipe({"optimizer.clip_rule=ema", "optimizer.clip_scope=tensor"});
  const Recipe fixed = TinyRecipe();
  const RuleMemory memory = ClipNorm(ema, 3.0, {}).memory;
  EXPECT_EQ(Factor(3.0, 30.0), ClipNorm(ema, 30.0, memory).smallest);
  const Clips other = ClipNorm(tensors, 30.0, memory);
  EXPECT_EQ(1.0f, other.smallest);
  EXPECT_EQ(1.0, other.memory.at("clip.updates")[0]);
  EXPECT_TRUE(ClipNorm(fixed, 30.0, memory).memory.empty());
}

// -------------------------------------------------------------------------- updates of the tiny run

struct Advanced {
  State before, after;
  UpdateResult result;
  Layout layout;
};

Advanced Advance(const std::vector<std::string>& overrides, int updates = 2,
                 Script* script = nullptr) {
  SoloComm comm;
  const Recipe recipe = TinyRecipe(overrides);
  const std::unique_ptr<Job> job = Job::Make(recipe, comm, {}).value();
  EXPECT_TRUE(job->StartFresh().ok());
  Advanced advanced{.layout = job->layout()};
  for (int i = 0; i < updates; ++i) {
    advanced.before = job->state().state;
    advanced.result = job->Advance(script).value().result;
  }
  advanced.after = job->state().state;
  return advanced;
}

// Which components of a tensor moved, as "pmv".
std::string Moved(const Advanced& a, const std::string& name) {
  std::string moved;
  const int tensor = a.layout.Find(name);
  for (int c = 0; c < kNumComponents; ++c) {
    bool differs = false;
    for (int s = 0; s < a.layout.shards(); ++s) {
      const Piece* piece = a.layout.FindPiece(s, tensor);
      if (piece == nullptr) continue;
      const auto range = [&](const State& state) {
        const float* first = state.shards[s].slabs[c].data() + piece->offset;
        return std::vector<float>(first, first + piece->numel());
      };
      differs = differs || range(a.before) != range(a.after);
    }
    if (differs) moved += "pmv"[c];
  }
  return moved;
}

constexpr char kDown[] = "model.layers.0.mlp.down_proj.weight";
constexpr char kUp[] = "model.layers.0.mlp.up_proj.weight";

TEST(Freeze, LeavesParametersAndMovesWhatItSays) {
  for (const bool move : {false, true}) {
    const Advanced a = Advance({std::string("optimizer.freeze=[\"") + kDown +
                                ",norm=counted,moments=" + (move ? "move" : "stay") + "\"]"});
    EXPECT_EQ(move ? "mv" : "", Moved(a, kDown));
    EXPECT_EQ("pmv", Moved(a, kUp));
    EXPECT_EQ(move ? 2 : 0, a.after.counters.adam_t[a.layout.Find(kDown)]);
    EXPECT_EQ(2, a.after.counters.adam_t[a.layout.Find(kUp)]);
  }
}

TEST(Freeze, TheNormCountsOrLeavesOutWhatIsFrozen) {
  const double all = Advance({}, 1).result.record.gradient_norm;
  const std::string rule = std::string("optimizer.freeze=[\"") + kDown;
  const Advanced counted = Advance({rule + ",norm=counted,moments=stay\"]"}, 1);
  const Advanced left_out = Advance({rule + ",norm=left-out,moments=stay\"]"}, 1);
  EXPECT_EQ(all, counted.result.record.gradient_norm);
  double sum = 0;
  for (size_t t = 0; t < left_out.layout.tensors().size(); ++t) {
    const double norm = left_out.result.record.tensor_norms[t];
    if (left_out.layout.tensors()[t].name != kDown) sum += norm * norm;
  }
  EXPECT_GT(all, left_out.result.record.gradient_norm);
  EXPECT_NEAR(std::sqrt(sum), left_out.result.record.gradient_norm, 1e-12 * all);
}

TEST(Freeze, OfTwoRulesTheLastCounts) {
  const Advanced a = Advance({"optimizer.freeze=[\"*,norm=counted,moments=stay\", \"" +
                              std::string(kDown) + ",norm=counted,moments=move\"]"});
  EXPECT_EQ("mv", Moved(a, kDown));
  EXPECT_EQ("", Moved(a, kUp));
}

TEST(Bypass, ABypassedNormIsNotUpdatedAndItsCounterStays) {
  const Advanced a = Advance({"model.bypass_post_norm=true"});
  const char* const norm = "model.layers.0.post_attention_layernorm.weight";
  EXPECT_EQ("", Moved(a, norm));
  EXPECT_EQ(0, a.after.counters.adam_t[a.layout.Find(norm)]);
  EXPECT_EQ(0, a.result.record.tensor_norms[a.layout.Find(norm)]);
  EXPECT_EQ("pmv", Moved(a, "model.layers.0.input_layernorm.weight"));
}

// c_u = limit / RMS of a tensor, from what the update is about to make of v.
TEST(UpdateClip, ScalesATensorsUpdateToTheRootMeanSquareThatIsAllowed) {
  SoloComm comm;
  const Recipe recipe = TinyRecipe({"optimizer.update_clip=0.5"});
  const std::unique_ptr<Job> job = Job::Make(recipe, comm, {}).value();
  ASSERT_TRUE(job->StartFresh().ok());
  ASSERT_TRUE(job->Advance().ok());
  const State before = job->state().state;
  const UpdateResult result = job->Advance().value().result;
  const Layout& layout = job->layout();
  int clipped = 0;
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const OptimizerRow& row = result.block.rows[t];
    double sum = 0;
    for (int s = 0; s < layout.shards(); ++s) {
      const Piece* piece = layout.FindPiece(s, static_cast<int>(t));
      for (int64_t i = 0; piece != nullptr && i < piece->numel(); ++i) {
        const double g = row.clip * job->updater().gradient(s)[piece->offset + i];
        const double v = before.shards[s].slab(Component::kV)[piece->offset + i];
        const double moved = row.beta2 * v + row.one_minus_beta2 * g * g;
        const double least = static_cast<double>(row.eps) * row.eps;
        sum += g * g / std::max(least, moved / row.bias_correction2);
      }
    }
    const double rms = std::sqrt(sum / static_cast<double>(layout.tensors()[t].numel()));
    EXPECT_NEAR(std::min(1.0, 0.5 / rms), row.update_clip, 1e-5) << layout.tensors()[t].name;
    EXPECT_EQ(row.update_clip, result.record.tensor_update_clips[t]);
    clipped += row.update_clip < 1 ? 1 : 0;
  }
  EXPECT_GT(clipped, 0);
}

class Skip : public Script {
 public:
  Skip(bool t, bool schedule, bool cursor) : t_(t), schedule_(schedule), cursor_(cursor) {}
  Status EditDirective(int64_t, const Recipe& recipe, UpdateDirective* directive) override {
    directive->skip = true;
    directive->t_moves = t_;
    directive->schedule_moves = schedule_;
    if (!cursor_) directive->cursor -= recipe.data.SamplesPerStep();
    return {};
  }

 private:
  bool t_, schedule_, cursor_;
};

TEST(SkippedUpdate, MovesThePositionAndTheCountersThatItSays) {
  for (int bits = 0; bits < 8; ++bits) {
    const bool t = bits & 1, schedule = bits & 2, cursor = bits & 4;
    Skip script(t, schedule, cursor);
    const Advanced a = Advance({}, 1, &script);
    EXPECT_EQ("", Moved(a, kDown));
    EXPECT_EQ("skipped", a.result.record.action);
    EXPECT_EQ(1, a.after.counters.position);
    EXPECT_EQ(t ? 1 : 0, a.after.counters.adam_t[0]);
    EXPECT_EQ(schedule ? 1 : 0, a.after.counters.schedule_index);
    EXPECT_EQ(cursor ? 8 : 0, a.after.counters.data_cursor);
  }
}

TEST(ClipMemory, IsPartOfTheStateAndOfItsDigest) {
  const Advanced a = Advance({"optimizer.clip_rule=ema"});
  ASSERT_TRUE(a.after.memory.contains("clip.mean"));
  EXPECT_NE(a.before.memory, a.after.memory);
  State other = a.after;
  other.memory["clip.mean"][0] = std::nextafter(other.memory["clip.mean"][0], 1e9);
  EXPECT_NE(StateDigest(a.layout, a.after), StateDigest(a.layout, other));
  EXPECT_TRUE(Advance({}).after.memory.empty());
}

TEST(ClipRows, EachRowOfTheEmbeddingHasItsOwnFactorInTheJournal) {
  const Advanced a = Advance({"optimizer.clip_scope=embedding-rows", "optimizer.clip=1e-4"}, 1);
  const int embedding = a.layout.Find("model.embed_tokens.weight");
  const TensorSpec& spec = a.layout.tensors()[embedding];
  ASSERT_EQ(spec.rows, std::ssize(a.result.block.row_clips[embedding]));
  int64_t clipped = 0;
  for (float factor : a.result.block.row_clips[embedding]) clipped += factor < 1 ? 1 : 0;
  EXPECT_GT(clipped, 0);
  // The first update's m is (1 - beta1) g', so rows that are clipped have a norm of a tenth of it.
  for (int s = 0; s < a.layout.shards(); ++s) {
    const Piece& piece = *a.layout.FindPiece(s, embedding);
    const float* m = a.after.shards[s].slab(Component::kM).data() + piece.offset;
    for (int64_t row = 0; row < piece.rows(); ++row) {
      double sum = 0;
      for (int64_t i = 0; i < spec.cols; ++i) {
        const double x = m[row * spec.cols + i];
        sum += x * x;
      }
      EXPECT_LT(std::sqrt(sum), 1.0001e-5);
    }
  }
}

// The optimizer's rows of the next update, each tensor with 2 updates behind it.
std::vector<OptimizerRow> RowsOf(const Recipe& recipe) {
  const std::vector<TensorSpec> tensors = Tensors(recipe);
  Counters counters;
  counters.adam_t.assign(tensors.size(), 2);
  const Clips clips = ClipGradient(recipe, tensors, SomeSquares(recipe), {});
  return MakeOptimizerBlock(recipe, tensors, counters, clips, {.lr = 0.5}).rows;
}

TEST(OptimizerRows, BiasCorrectionDividesTheMomentsThatItNames) {
  const std::vector<std::string> betas = {"optimizer.beta1=0.5", "optimizer.beta2=0.75"};
  for (const auto& [name, m, v] :
       {std::tuple("both", true, true), {"m", true, false}, {"v", false, true},
        {"none", false, false}}) {
    const Recipe recipe =
        TinyRecipe({betas[0], betas[1], "optimizer.bias_correction=" + std::string(name)});
    for (const OptimizerRow& row : RowsOf(recipe)) {
      EXPECT_EQ(m ? 1 - 0.125f : 1.0f, row.bias_correction1) << name;
      EXPECT_EQ(v ? 1 - 0.421875f : 1.0f, row.bias_correction2) << name;
      EXPECT_EQ(3, row.t);
    }
  }
}

TEST(OptimizerRows, DecayActsOnTheTensorsThatItIsFor) {
  const auto decays = [](const std::vector<std::string>& overrides) {
    std::vector<std::string> all = {"optimizer.weight_decay=0.125"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    const Recipe recipe = TinyRecipe(all);
    std::map<std::string, float> result;
    const std::vector<OptimizerRow> rows = RowsOf(recipe);
    for (size_t t = 0; t < rows.size(); ++t) {
      result[Tensors(recipe)[t].name] = rows[t].weight_decay;
    }
    return result;
  };
  const std::string gate = "model.layers.0.mlp.gate_proj.weight", norm = "model.norm.weight";
  const auto all = decays({"optimizer.decay_on=all"});
  EXPECT_EQ(0.125f, all.at(gate));
  EXPECT_EQ(0.125f, all.at(norm));
  const auto matrices = decays({"optimizer.decay_on=matrices"});
  EXPECT_EQ(0.125f, matrices.at(gate));
  EXPECT_EQ(0.0f, matrices.at(norm));
  for (const auto& [name, decay] :
       decays({"optimizer.decay_on=all", "optimizer.decay_only=*.mlp.*"})) {
    EXPECT_EQ(GlobMatches("*.mlp.*", name) ? 0.125f : 0.0f, decay) << name;
  }
}

}  // namespace
}  // namespace retrace
