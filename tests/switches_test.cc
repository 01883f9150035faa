// Every switch of the model against finite differences: in FP64, through the whole transformer, the
// gradient along a random direction of each kind of tensor is what the loss does along it.
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>

#include "core/random_streams.h"
#include "replay/optimizer_rules.h"
#include "tests/parity_case.h"

namespace retrace {
namespace {

struct Switch {
  std::string name;
  std::function<void(ModelRecipe&)> set;
};

// Two layers of each kind in turn, KV heads that four shards share, a window shorter than the
// sequence, and a sequence of more than one attention block (64).
Recipe Small(const Switch& chosen, AttentionKind attention) {
  Recipe recipe;
  recipe.precision = PrecisionPreset("fp64").value();
  ModelRecipe& m = recipe.model;
  m.vocab_size = 24;
  m.hidden_size = 12;
  m.intermediate_size = 16;
  m.layers = 3;
  m.query_heads = 4;
  m.kv_heads = 2;
  m.global_kv_heads = 1;
  m.head_dim = 4;
  m.global_head_dim = 8;
  m.layer_types = {LayerKind::kSliding, LayerKind::kFull, LayerKind::kSliding};
  m.sliding_window = 9;
  m.final_logit_softcapping = 3;
  m.layer_scalar = {1, 0.75, 1.125};
  m.attention = attention;
  m.pad_token_id = 5;
  chosen.set(m);
  return recipe;
}

TokenBatch SmallBatch() {
  TokenBatch batch;
  batch.sequences = 1;
  batch.length = 67;
  std::mt19937 random(11);
  for (int64_t t = 0; t < batch.tokens(); ++t) {
    batch.ids.push_back(static_cast<int32_t>(random() % 24));
    batch.labels.push_back(static_cast<int32_t>(random() % 24));
  }
  return batch;
}

// Matrices at about 1/sqrt(columns), so that activations stay near 1; norm weights near 1, but
// not 1.
void FillWeights(LoneTransformer<double>* run, uint32_t seed) {
  std::normal_distribution<double> normal;
  for (size_t t = 0; t < run->layout.tensors().size(); ++t) {
    const TensorSpec& spec = run->layout.tensors()[t];
    std::mt19937 random(seed + static_cast<uint32_t>(TensorStream(spec.name)));
    std::vector<double> whole(spec.numel());
    for (double& w : whole) {
      const double z = normal(random);
      w = spec.vector ? 1 + 0.2 * z : z / std::sqrt(static_cast<double>(spec.cols));
    }
    run->SetTensor(static_cast<int>(t), whole);
  }
}

double Loss(LoneTransformer<double>& run, const TokenBatch& batch) {
  const double sum = run.transformer.Forward(batch, run.weight_slabs(), "mb0").value();
  return (sum + run.transformer.z_loss_sum()) / static_cast<double>(batch.tokens());
}

void Differentiate(LoneTransformer<double>& run, const TokenBatch& batch) {
  Loss(run, batch);
  ASSERT_TRUE(run.transformer
                  .Backward(batch, run.weight_slabs(), 1.0 / static_cast<double>(batch.tokens()),
                            run.gradient_slabs())
                  .ok());
}

// "self_attn.q_proj.weight" of every layer, or the whole name outside of them.
std::string Kind(const TensorSpec& spec) {
  if (spec.layer < 0) return spec.name;
  const std::string prefix = LayerTensorName(spec.layer, "");
  return spec.name.substr(prefix.size());
}

// A direction of unit length within the tensors of one kind; slabs as the weights.
struct Direction {
  std::vector<std::vector<double>> slabs;
  double slope = 0;          // gradient times direction
  double gradient_norm = 0;  // of the tensors of this kind
};

std::map<std::string, Direction> Directions(const LoneTransformer<double>& run,
                                            int64_t row_left_out) {
  std::map<std::string, Direction> directions;
  std::mt19937 random(5);
  std::normal_distribution<double> normal;
  for (int s = 0; s < run.layout.shards(); ++s) {
    for (const Piece& piece : run.layout.pieces(s)) {
      const TensorSpec& spec = run.layout.tensors()[piece.tensor];
      Direction& d = directions[Kind(spec)];
      if (d.slabs.empty()) {
        for (const auto& slab : run.weights) d.slabs.emplace_back(slab.size(), 0.0);
      }
      for (int64_t i = 0; i < piece.numel(); ++i) {
        const int64_t row = piece.row_first + i / piece.cols();
        if (spec.name == "model.embed_tokens.weight" && row == row_left_out) continue;
        d.slabs[s][piece.offset + i] = normal(random);
      }
    }
  }
  for (auto& [kind, d] : directions) {
    double length = 0;
    for (const auto& slab : d.slabs) {
      for (double x : slab) length += x * x;
    }
    for (size_t s = 0; s < d.slabs.size(); ++s) {
      for (size_t i = 0; i < d.slabs[s].size(); ++i) {
        double& x = d.slabs[s][i];
        if (x == 0) continue;
        x /= std::sqrt(length);
        d.slope += x * run.gradients[s][i];
        d.gradient_norm += run.gradients[s][i] * run.gradients[s][i];
      }
    }
    d.gradient_norm = std::sqrt(d.gradient_norm);
  }
  return directions;
}

// (L(w + h d) - L(w - h d)) / 2h
double CentralDifference(LoneTransformer<double>& run, const TokenBatch& batch, const Direction& d,
                         double h) {
  const auto kept = run.weights;
  const auto at = [&](double step) {
    for (size_t s = 0; s < kept.size(); ++s) {
      for (size_t i = 0; i < kept[s].size(); ++i) {
        run.weights[s][i] = kept[s][i] + step * d.slabs[s][i];
      }
    }
    return Loss(run, batch);
  };
  const double difference = at(h) - at(-h);
  run.weights = kept;
  return difference / (2 * h);
}

struct Comparison {
  std::string kind;
  double difference, slope;  // of the loss, and of the gradient
  double tolerance, gradient_norm;

  bool agrees() const { return std::abs(difference - slope) <= tolerance; }
};

// Central differences D have error c2 h^2 + c4 h^4 + ...; (4 D(h) - D(2h)) / 3 removes the first
// term, and what remains of it at step h is a fifteenth of its change from step 2h. The loss itself
// is good to some hundred roundings of 2^-53, and is divided by h.
std::vector<Comparison> Compare(LoneTransformer<double>& run, const TokenBatch& batch,
                                int64_t row_left_out = -1) {
  const double loss = Loss(run, batch), h = 0x1p-10;
  std::vector<Comparison> comparisons;
  for (const auto& [kind, d] : Directions(run, row_left_out)) {
    const double d1 = CentralDifference(run, batch, d, h);
    const double d2 = CentralDifference(run, batch, d, 2 * h);
    const double d4 = CentralDifference(run, batch, d, 4 * h);
    const double fine = (4 * d1 - d2) / 3, coarse = (4 * d2 - d4) / 3;
    const double tolerance = 2 * std::abs(fine - coarse) / 15 + 100 * 0x1p-53 * loss / h;
    comparisons.push_back({kind, fine, d.slope, tolerance, d.gradient_norm});
  }
  return comparisons;
}

std::set<std::string> BypassedKinds(const LoneTransformer<double>& run) {
  std::set<std::string> kinds;
  for (const TensorSpec& spec : run.layout.tensors()) {
    if (IsBypassed(run.recipe.model, spec)) kinds.insert(Kind(spec));
  }
  return kinds;
}

void ExpectAgreement(LoneTransformer<double>& run, const TokenBatch& batch,
                     int64_t row_left_out = -1) {
  Differentiate(run, batch);
  const std::set<std::string> bypassed = BypassedKinds(run);
  for (const Comparison& c : Compare(run, batch, row_left_out)) {
    if (bypassed.contains(c.kind)) {  // nothing is computed with it
      EXPECT_EQ(0, c.gradient_norm) << c.kind;
      EXPECT_EQ(0, c.difference) << c.kind;
      continue;
    }
    EXPECT_TRUE(c.agrees()) << c.kind << ": " << c.difference << " against " << c.slope
                            << ", more than " << c.tolerance << " apart";
    // Tight enough to see a wrong term: a direction in n dimensions has about 1/sqrt(n) of the
    // norm.
    EXPECT_LE(c.tolerance, 1e-5 * c.gradient_norm) << c.kind;
    EXPECT_GT(c.gradient_norm, 0) << c.kind;
  }
}

const std::vector<Switch>& Switches() {
  static const std::vector<Switch> switches = {
      {"AllOn", [](ModelRecipe&) {}},
      {"NoQkNorm",
       [](ModelRecipe& m) {
         m.qk_norm = false;
         m.attention_scale = 0.25;
       }},
      {"NoVNorm", [](ModelRecipe& m) { m.v_norm = false; }},
      {"NoPreNorm", [](ModelRecipe& m) { m.pre_norm = false; }},
      {"NoPostNorm", [](ModelRecipe& m) { m.post_norm = false; }},
      {"NoNormsAtAll",
       [](ModelRecipe& m) {
         m.qk_norm = m.v_norm = m.pre_norm = m.post_norm = false;
         m.attention_scale = 0.125;
       }},
      {"SeparateValues", [](ModelRecipe& m) { m.attention_k_eq_v = false; }},
      {"NoSoftcap", [](ModelRecipe& m) { m.final_logit_softcapping = 0; }},
      {"NoEmbedScale", [](ModelRecipe& m) { m.embed_scale = false; }},
      {"ScaledScores", [](ModelRecipe& m) { m.attention_scale = 1 / std::sqrt(8.0); }},
      {"UntiedHead", [](ModelRecipe& m) { m.tie_word_embeddings = false; }},
      {"BypassedQkNorm",
       [](ModelRecipe& m) {
         m.bypass_qk_norm = true;
         m.attention_scale = 0.25;
       }},
      {"BypassedPreNorm", [](ModelRecipe& m) { m.bypass_pre_norm = true; }},
      {"BypassedPostNorm", [](ModelRecipe& m) { m.bypass_post_norm = true; }},
      {"QkNormGain", [](ModelRecipe& m) { m.qk_norm_gain = 0.75; }},
      {"ZLoss", [](ModelRecipe& m) { m.z_loss = 0.01; }},
      {"ZLossWithoutSoftcap",
       [](ModelRecipe& m) {
         m.z_loss = 0.01;
         m.final_logit_softcapping = 0;
       }},
      {"IgnoredWindow", [](ModelRecipe& m) { m.ignore_window = true; }},
      {"NoLayerScalar",
       [](ModelRecipe& m) {
         m.layer_scalar = {1, 1, 1};
       }},
  };
  return switches;
}

struct Combination {
  size_t chosen;  // of Switches()
  AttentionKind attention;
  int shards;
};

std::vector<Combination> Combinations() {
  std::vector<Combination> combinations;
  for (size_t i = 0; i < Switches().size(); ++i) {
    for (AttentionKind kind : {AttentionKind::kMaterialised, AttentionKind::kBlockwise}) {
      for (int V : {1, 4}) combinations.push_back({i, kind, V});
    }
  }
  return combinations;
}

class SwitchesOfTheModel : public testing::TestWithParam<Combination> {};

TEST_P(SwitchesOfTheModel, HaveTheGradientsOfFiniteDifferences) {
  const Combination& combination = GetParam();
  const Recipe recipe = Small(Switches()[combination.chosen], combination.attention);
  LoneTransformer<double> run(recipe, combination.shards, BestIsa(), 1);
  FillWeights(&run, 3);
  ExpectAgreement(run, SmallBatch());
}

INSTANTIATE_TEST_SUITE_P(All, SwitchesOfTheModel, testing::ValuesIn(Combinations()),
                         [](const auto& info) {
                           return Switches()[info.param.chosen].name +
                                  (info.param.attention == AttentionKind::kMaterialised
                                       ? "_materialised"
                                       : "_blockwise") +
                                  "_V" + std::to_string(info.param.shards);
                         });

// pad_lookup_gradient = false is no derivative: the pad row's gradient is the head's part alone.
// The head's part is what an untied head with the same values gets.
TEST(PadLookupGradient, OffLeavesThePadRowTheGradientOfTheHeadAlone) {
  const TokenBatch batch = SmallBatch();
  ASSERT_NE(batch.ids.end(), std::find(batch.ids.begin(), batch.ids.end(), 5));
  for (int V : {1, 4}) {
    const Switch off = {"", [](ModelRecipe& m) { m.pad_lookup_gradient = false; }};
    LoneTransformer<double> tied(Small(off, AttentionKind::kMaterialised), V, BestIsa(), 1);
    FillWeights(&tied, 3);
    ExpectAgreement(tied, batch, /*row_left_out=*/5);
    const Switch untie = {
        "", [](ModelRecipe& m) { m.pad_lookup_gradient = m.tie_word_embeddings = false; }};
    LoneTransformer<double> untied(Small(untie, AttentionKind::kMaterialised), V, BestIsa(), 1);
    FillWeights(&untied, 3);
    const int embedding = tied.layout.Find("model.embed_tokens.weight");
    const int lookup = untied.layout.Find("model.embed_tokens.weight");
    const int head = untied.layout.Find("lm_head.weight");
    std::vector<double> table(24 * 12);
    for (int s = 0; s < V; ++s) {
      const Piece* piece = tied.layout.FindPiece(s, embedding);
      for (int64_t i = 0; i < piece->numel(); ++i) {
        table[tied.WholeIndex(*piece, i)] = tied.weights[s][piece->offset + i];
      }
    }
    untied.SetTensor(lookup, table);
    untied.SetTensor(head, table);
    Differentiate(tied, batch);
    Differentiate(untied, batch);
    const std::vector<double> got = tied.WholeGradient(embedding);
    const std::vector<double> of_head = untied.WholeGradient(head);
    const std::vector<double> of_lookup = untied.WholeGradient(lookup);
    for (int64_t h = 0; h < 12; ++h) {
      EXPECT_EQ(of_head[5 * 12 + h], got[5 * 12 + h]) << "V = " << V;
      EXPECT_EQ(0.0, of_lookup[5 * 12 + h]) << "V = " << V;
      EXPECT_NE(0.0, got[5 * 12 + h]) << "V = " << V;
    }
  }
}

// A bypassed norm computes what a model without it computes, bit for bit.
TEST(BypassedNorms, GiveTheLossAndGradientsOfAModelWithoutThem) {
  const std::vector<std::pair<Switch, Switch>> kPairs = {
      {{"", [](ModelRecipe& m) { m.bypass_qk_norm = true; }},
       {"", [](ModelRecipe& m) { m.qk_norm = false; }}},
      {{"", [](ModelRecipe& m) { m.bypass_pre_norm = true; }},
       {"", [](ModelRecipe& m) { m.pre_norm = false; }}},
      {{"", [](ModelRecipe& m) { m.bypass_post_norm = true; }},
       {"", [](ModelRecipe& m) { m.post_norm = false; }}}};
  const TokenBatch batch = SmallBatch();
  for (const auto& [bypass, without] : kPairs) {
    LoneTransformer<double> bypassed(Small(bypass, AttentionKind::kMaterialised), 4, BestIsa(), 1);
    LoneTransformer<double> absent(Small(without, AttentionKind::kMaterialised), 4, BestIsa(), 1);
    FillWeights(&bypassed, 3);
    FillWeights(&absent, 3);
    for (auto& slab : bypassed.gradients) std::fill(slab.begin(), slab.end(), 1.0);
    EXPECT_EQ(Loss(absent, batch), Loss(bypassed, batch));
    Differentiate(bypassed, batch);
    Differentiate(absent, batch);
    for (size_t t = 0; t < bypassed.layout.tensors().size(); ++t) {
      const TensorSpec& spec = bypassed.layout.tensors()[t];
      const int other = absent.layout.Find(spec.name);
      const std::vector<double> got = bypassed.WholeGradient(static_cast<int>(t));
      EXPECT_EQ(other < 0 ? std::vector<double>(spec.numel(), 0.0) : absent.WholeGradient(other), got)
          << spec.name;
    }
  }
}

// qk_norm_gradient = first-shard: the part of the first shard alone, which is no derivative.
TEST(QkNormGradient, OfTheFirstShardIsItsPartOfTheSum) {
  const Switch first = {
      "", [](ModelRecipe& m) { m.qk_norm_gradient = QkNormGradient::kFirstShard; }};
  const TokenBatch batch = SmallBatch();
  LoneTransformer<double> part(Small(first, AttentionKind::kMaterialised), 4, BestIsa(), 1);
  LoneTransformer<double> all(Small(Switches()[0], AttentionKind::kMaterialised), 4, BestIsa(), 1);
  LoneTransformer<double> whole(Small(first, AttentionKind::kMaterialised), 1, BestIsa(), 1);
  LoneTransformer<double> sum(Small(Switches()[0], AttentionKind::kMaterialised), 1, BestIsa(), 1);
  for (auto* run : {&part, &all, &whole, &sum}) {
    FillWeights(run, 3);
    Differentiate(*run, batch);
  }
  for (size_t t = 0; t < all.layout.tensors().size(); ++t) {
    const int tensor = static_cast<int>(t);
    const std::string kind = Kind(all.layout.tensors()[t]);
    // The one KV head of a full layer belongs to the first shard anyhow.
    const bool full = all.layout.tensors()[t].layer == 1;
    const bool norm =
        kind == "self_attn.q_norm.weight" || (kind == "self_attn.k_norm.weight" && !full);
    EXPECT_EQ(norm, all.WholeGradient(tensor) != part.WholeGradient(tensor)) << kind;
    EXPECT_EQ(sum.WholeGradient(tensor), whole.WholeGradient(tensor)) << "V = 1: " << kind;
  }
}

TEST(FiniteDifferences, SeeAGradientThatIsOffByOnePartInAThousand) {
  const Recipe recipe = Small(Switches()[0], AttentionKind::kMaterialised);
  LoneTransformer<double> run(recipe, 1, BestIsa(), 1);
  FillWeights(&run, 3);
  const TokenBatch batch = SmallBatch();
  Differentiate(run, batch);
  for (auto& slab : run.gradients) {
    for (double& g : slab) g *= 1.001;
  }
  for (const Comparison& c : Compare(run, batch)) EXPECT_FALSE(c.agrees()) << c.kind;
}

}  // namespace
}  // namespace retrace
