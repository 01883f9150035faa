// Clauses 1 to 10 of core/NUMERICS.md, one by one, each against its text worked out by hand; 11 to
// 16: numerics_state_test.cc; 17: golden_test.cc. What other tests show already is listed with the
// clause in the document.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "replay/local_ranks.h"
#include "tests/numerics_case.h"
#include "tests/places.h"

namespace retrace {
namespace {

using longhand::FirstDifference;
using longhand::Product;

Rounding RoundingOf(Format format) {
  return format == Format::kBf16 ? Rounding::kBf16 : Rounding::kNone;
}

// ------------------------------------------------------------------------------------ clauses 1-4

TEST(Clause01, NothingIsContractedOrReordered) {
  // a*a - b with a*a inexact: 0 in two operations, the product's error in one.
  const volatile float a = 1 + 0x1p-12f, b = 1 + 0x1p-11f, tiny = 0x1p-30f, big = 1.0f;
  EXPECT_EQ(0.0f, a * a - b);
  EXPECT_EQ(0x1p-24f, __builtin_fmaf(a, a, -b));
  EXPECT_EQ(0.0f, (big + tiny) - big);
  const volatile float subnormal = 0x1p-149f, two = 2.0f;
  EXPECT_EQ(0x1p-148f, subnormal * two);
}

// cos and sin of position * theta^(-2i/D), written out with the project's functions.
struct Angles {
  std::vector<float> cos, sin;  // [S, D/2]
};
Angles LonghandAngles(const ModelRecipe& m, bool full, int64_t length, Rounding rounding) {
  const int64_t dim = full ? m.global_head_dim : m.head_dim;
  const double theta = full ? m.full_rope_theta : m.sliding_rope_theta;
  const int64_t rotated =
      full ? static_cast<int64_t>(m.full_partial_rotary_factor * static_cast<double>(dim) / 2)
           : dim / 2;
  Angles angles;
  for (int64_t s = 0; s < length; ++s) {
    for (int64_t i = 0; i < dim / 2; ++i) {
      double frequency = 0;
      if (i < rotated) {
        frequency = math::Exp(-(2.0 * static_cast<double>(i)) / static_cast<double>(dim) *
                              math::Log(theta));
      }
      double angle = static_cast<double>(s) * frequency;
      if (m.rope_angle_fp32) angle = static_cast<float>(s) * static_cast<float>(frequency);
      angles.cos.push_back(longhand::Round(static_cast<float>(math::Cos(angle)), rounding));
      angles.sin.push_back(longhand::Round(static_cast<float>(math::Sin(angle)), rounding));
    }
  }
  return angles;
}

std::vector<float> LonghandRope(std::vector<float> x, const Angles& angles, int64_t length,
                                int64_t heads, int64_t dim, bool backward, Rounding rounding) {
  const auto round = [&](float y) { return longhand::Round(y, rounding); };
  const int64_t tokens = std::ssize(x) / (heads * dim), half = dim / 2;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        float& x1 = x[(t * heads + h) * dim + i];
        float& x2 = x[(t * heads + h) * dim + half + i];
        const float c = angles.cos[t % length * half + i];
        const float s =
            backward ? -angles.sin[t % length * half + i] : angles.sin[t % length * half + i];
        const float y1 = round(round(x1 * c) - round(x2 * s));
        const float y2 = round(round(x2 * c) + round(x1 * s));
        x1 = y1;
        x2 = y2;
      }
    }
  }
  return x;
}

TEST(Clause02, RopeAnglesAreFp64RoundedOnceOrFp32AsTheRecipeSays) {
  for (const char* policy : {"fp32", "bf16"}) {
    for (const char* fp32_angle : {"false", "true"}) {
      const Recipe recipe = TinyRecipe({"model.qk_norm=false", "topology.virtual_shards=1",
                                        "data.sequence_length=200", "data.micro_batch_size=1",
                                        std::string("precision.preset=") + policy,
                                        std::string("model.rope_angle_fp32=") + fp32_angle});
      const KeptPass<float> pass(recipe);
      const Rounding round = RoundingOf(recipe.precision.Forward(Point::kRope));
      for (int layer : {0, 1}) {  // sliding, full
        const ModelRecipe& m = recipe.model;
        const std::string name = "layer" + std::to_string(layer);
        const Angles angles = LonghandAngles(m, m.IsFull(layer), 200, round);
        EXPECT_EQ(-1, FirstDifference(LonghandRope(pass.Op(name + "/q_proj", 0), angles, 200,
                                                   m.query_heads, m.HeadDim(layer), false, round),
                                      pass.Op(name + "/q_rope", 0)))
            << policy << " " << fp32_angle << " " << name;
      }
    }
  }
}

TEST(Clause04, EveryPointOfTheBf16PolicyHoldsBf16Numbers) {
  const KeptPass<float> pass(TinyRecipe({"precision.preset=bf16"}));
  size_t seen = 0;
  for (const auto& [name, values] : pass.probe.all()) {
    if (name == "mb0/loss") continue;  // FP32 under every preset but fp64
    // Shards that share a KV head leave its gradient to the first of them.
    const bool shared =
        name.find("k_") != std::string::npos || name.find("v_") != std::string::npos;
    if (shared && name.find(".grad/shard") != std::string::npos && !name.ends_with("shard0"))
      continue;
    ++seen;
    EXPECT_EQ(-1, FirstDifference(values, longhand::RoundAll(values, Rounding::kBf16))) << name;
  }
  EXPECT_GT(seen, 200u);
}

// What a policy decides, in one line: the losses, the gradient, everything.
std::string Fingerprint(const Recipe& recipe) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(recipe, comm, {}).value();
  EXPECT_TRUE(job->StartFresh().ok());
  const Job::Step step = job->Advance().value();
  return step.digest.Hex() + RecordJson(step.result.record);
}

TEST(Clause04, EveryRoundingPointIsLive) {
  const std::vector<std::string> base = {"topology.virtual_shards=2", "model.layers=2",
                                         "model.layer_scalar=[0.875, 1.125]",
                                         "model.attention_scale=0.7"};
  const std::string fp32 = Fingerprint(TinyRecipe(base));
  std::set<std::string> all = {fp32};
  size_t points = 0;
  for (const auto& [key, format] : DescribePrecision(PrecisionPreset("fp32").value())) {
    std::vector<std::string> overrides = base;
    overrides.push_back("precision." + key + "=bf16");
    ++points;
    EXPECT_TRUE(all.insert(Fingerprint(TinyRecipe(overrides))).second)
        << key << " = bf16 gives the bits of fp32, or of another point";
  }
  EXPECT_EQ(2u * kNumPoints, points);  // cross_entropy has no gradient, partials come on top
}

// Without a norm behind it, the op before it takes the gradient: its own point has to round it.
TEST(Clause04, PointsStayLiveWhereSwitchesTakeOpsAway) {
  const std::vector<std::string> base = {"topology.virtual_shards=2",
                                         "model.layers=2",
                                         "model.layer_scalar=[0.875, 1.125]",
                                         "model.attention_scale=0.3",
                                         "model.qk_norm=false",
                                         "model.v_norm=false",
                                         "model.post_norm=false",
                                         "model.pre_norm=false",
                                         "model.attention_k_eq_v=false",
                                         "model.final_logit_softcapping=0.0"};
  const std::string fp32 = Fingerprint(TinyRecipe(base));
  std::set<std::string> all = {fp32};
  for (const char* name : {"qkv", "rope", "attention", "o_proj", "down", "logits", "residual"}) {
    for (const char* suffix : {"", ".grad"}) {
      std::vector<std::string> overrides = base;
      overrides.push_back(std::string("precision.") + name + suffix + "=bf16");
      EXPECT_TRUE(all.insert(Fingerprint(TinyRecipe(overrides))).second) << name << suffix;
    }
  }
}

TEST(Clause04, StateAndGradientAreFp32UnderEveryPolicy) {
  for (const std::string& policy : PrecisionPresets()) {
    const Recipe recipe = TinyRecipe({"precision.preset=" + policy});
    SoloComm comm;
    const std::unique_ptr<Job> job = Job::Make(recipe, comm, {}).value();
    ASSERT_TRUE(job->StartFresh().ok());
    ASSERT_TRUE(job->Advance().ok());
    const auto& p = job->state().slab(1).slab(Component::kParameter);
    EXPECT_NE(-1, FirstDifference(p, longhand::RoundAll(p, Rounding::kBf16)))
        << policy << ": the master copy is not rounded to BF16";
  }
}

// --------------------------------------------------------------------------------------- clause 6

// The clause's own words: sixteen strided lanes, then pairs 8, 4, 2 and 1 apart.
template <class T>
T SixteenLanes(const std::vector<T>& x, const std::vector<T>& y) {
  T lane[16] = {};
  for (size_t i = 0; i < x.size(); ++i) lane[i % 16] = std::fma(x[i], y[i], lane[i % 16]);
  const T eight[8] = {lane[0] + lane[8],  lane[1] + lane[9],  lane[2] + lane[10],
                      lane[3] + lane[11], lane[4] + lane[12], lane[5] + lane[13],
                      lane[6] + lane[14], lane[7] + lane[15]};
  const T four[4] = {eight[0] + eight[4], eight[1] + eight[5], eight[2] + eight[6],
                     eight[3] + eight[7]};
  return ((four[0] + four[2]) + (four[1] + four[3]));
}

TEST(Clause06, SumIsSixteenLanesAndATreeAtEveryLength) {
  std::mt19937 random(6);
  int order_matters = 0;
  for (int64_t n = 1; n <= 100; ++n) {
    const std::vector<float> x = longhand::Values<float>(n, random);
    const std::vector<float> y = longhand::Values<float>(n, random);
    const float expected = SixteenLanes(x, y);
    for (Isa isa : SupportedIsas()) {
      float got = 0;
      const RowDotArgs<float> args = {
          .x = x.data(), .y = y.data(), .c = &got, .n = n, .x_stride = n, .y_stride = n};
      Ops<float>(isa).row_dot(args, 0, 1);
      EXPECT_EQ(expected, got) << n << " " << IsaName(isa);
    }
    order_matters += longhand::Chain(x, y) != expected;
  }
  EXPECT_GT(order_matters, 30);  // else any order would pass
}

TEST(Clause06, LossOfABatchIsTheFp64SumOverItsTokens) {
  for (const char* policy : {"fp32", "bf16"}) {
    const KeptPass<float> pass(TinyRecipe({std::string("precision.preset=") + policy}));
    const std::vector<float>& nll = pass.Op("loss");
    const std::vector<double> wide(nll.begin(), nll.end());
    EXPECT_EQ(SixteenLanes(wide, std::vector<double>(wide.size(), 1.0)), pass.loss_sum);
  }
}

// --------------------------------------------------------------------------------------- clause 7

template <class T>
std::vector<std::vector<T>> ShardParts(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<T>> parts;
  for (int i = 0; i < 8; ++i) parts.push_back(longhand::Values<T>(n, random));
  return parts;
}

// Runs fn(comm, tree, this rank's parts of eight) in `ranks` processes.
template <class T, class F>
Status OverRanks(int ranks, const std::vector<std::vector<T>>& all, F fn) {
  return RunLocalRanks(ranks, {}, [&](Comm& comm) -> Status {
    Engine engine(BestIsa(), 1);
    ShardTree tree(engine, comm, {0, 1, ranks});
    const int count = 8 / ranks;
    std::vector<std::vector<T>> mine(all.begin() + comm.rank() * count,
                                     all.begin() + (comm.rank() + 1) * count);
    std::vector<T*> pointers;
    for (auto& part : mine) pointers.push_back(part.data());
    return fn(comm, tree, pointers);
  });
}

template <class T>
Status Same(const std::vector<T>& expected, const T* got, const std::string& what) {
  const int64_t at = FirstDifference(expected, std::vector<T>(got, got + expected.size()));
  return at < 0 ? Status() : FailedError(what + ": element " + std::to_string(at));
}

template <class T>
void ExpectTreeOverAnyRanks(Rounding partial, Rounding round) {
  for (int64_t n : {1, 15, 16, 17, 100, 1000}) {
    const auto parts = ShardParts<T>(n, static_cast<uint32_t>(n));
    const std::vector<T> expected = longhand::ShardSum(parts, partial, round);
    for (int ranks : {1, 2, 4, 8}) {
      const Status status =
          OverRanks(ranks, parts, [&](Comm&, ShardTree& tree, std::vector<T*>& mine) -> Status {
            RT_RETURN_IF_ERROR(tree.Sum(mine, n, partial, round));
            return Same(expected, mine[0], "sum");
          });
      EXPECT_TRUE(status.ok()) << n << " elements, " << ranks << " ranks: " << status.message();
    }
  }
}

TEST(Clause07, PartialsAddUpInABalancedTreeOnAnyRanks) {
  ExpectTreeOverAnyRanks<float>(Rounding::kNone, Rounding::kNone);
  ExpectTreeOverAnyRanks<double>(Rounding::kNone, Rounding::kNone);
}

TEST(Clause07, Bf16PartialsAreRoundedBeforeTheTreeAndTheSumAfter) {
  ExpectTreeOverAnyRanks<float>(Rounding::kBf16, Rounding::kBf16);
  ExpectTreeOverAnyRanks<float>(Rounding::kBf16, Rounding::kNone);
}

TEST(Clause07, TheTreeIsNoChain) {
  const auto parts = ShardParts<float>(1000, 3);
  std::vector<float> chain = parts[0];
  for (int i = 1; i < 8; ++i) chain = longhand::Add(chain, parts[i]);
  EXPECT_NE(-1, FirstDifference(chain, longhand::ShardSum(parts, 0, 8)));
}

TEST(Clause07, PartOfTheRanksAddUpWhatTheyShare) {
  const auto parts = ShardParts<float>(50, 4);
  // Ranks 0, 1 share one head and 2, 3 another: two trees of four parts.
  const Status status =
      OverRanks(4, parts, [&](Comm& comm, ShardTree& tree, std::vector<float*>& mine) -> Status {
        RT_RETURN_IF_ERROR(tree.Sum(mine, 50, Rounding::kNone, Rounding::kNone, 2));
        const size_t first = comm.rank() / 2 * 4;
        return Same(longhand::ShardSum(parts, first, first + 4), mine[0], "half");
      });
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(Clause07, RowsAreMergedAndMaximaTakenOnAnyRanks) {
  const int64_t n = 40;
  auto parts = ShardParts<float>(n, 5);
  parts[3][7] = -0.0f;
  std::vector<float> largest(n), rows(n, 0.0f);
  std::vector<std::vector<float>> owned(8, std::vector<float>(n, 0.0f));
  for (int64_t i = 0; i < n; ++i) {
    std::vector<float> column;
    for (const auto& part : parts) column.push_back(part[i]);
    largest[i] = longhand::Max(column);
    owned[i % 8][i] = rows[i] = i == 11 ? -0.0f : parts[i % 8][i];
  }
  for (int ranks : {1, 2, 8}) {
    Status status =
        OverRanks(ranks, parts, [&](Comm&, ShardTree& tree, std::vector<float*>& mine) -> Status {
          RT_RETURN_IF_ERROR(tree.Max(mine, n));
          return Same(largest, mine[0], "max");
        });
    EXPECT_TRUE(status.ok()) << status.message();
    status =
        OverRanks(ranks, owned, [&](Comm&, ShardTree& tree, std::vector<float*>& mine) -> Status {
          RT_RETURN_IF_ERROR(tree.Merge(mine, n));
          return Same(rows, mine[0], "merge");
        });
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

// Where shard partials stand in the step: every tree recomputed from the probes before and after
// it.
struct StepTrees {
  const KeptPass<float>& pass;
  const Recipe& recipe;
  const ModelRecipe& m = recipe.model;
  const int V = static_cast<int>(recipe.topology.virtual_shards);
  const int64_t T = pass.batch.tokens(), H = m.hidden_size;
  const Rounding partial = RoundingOf(recipe.precision.partials);

  Rounding Forward(Point p) const { return RoundingOf(recipe.precision.Forward(p)); }
  Rounding Backward(Point p) const { return RoundingOf(recipe.precision.Gradient(p)); }
  std::string Tensor(int l, const std::string& suffix) const { return LayerTensorName(l, suffix); }

  // x [T, cols] times W^T, W [H, cols] on shard s.
  std::vector<float> Output(const std::vector<float>& x, int s, const std::string& tensor) const {
    const int64_t cols = std::ssize(x) / T;
    const float* w = pass.Weight(s, tensor);
    return Product<float>(
        T, H, cols, [&](int64_t t, int64_t c) { return x[t * cols + c]; },
        [&](int64_t c, int64_t h) { return w[h * cols + c]; });
  }
  // dy [T, rows] times W [rows, H] on shard s.
  std::vector<float> Input(const std::vector<float>& dy, int s, const std::string& tensor) const {
    const int64_t rows = std::ssize(dy) / T;
    const float* w = pass.Weight(s, tensor);
    return Product<float>(
        T, H, rows, [&](int64_t t, int64_t r) { return dy[t * rows + r]; },
        [&](int64_t r, int64_t h) { return w[r * H + h]; });
  }
  bool Owns(int s, const std::string& tensor) const {
    return pass.run.map.Owner(s, pass.run.layout.Find(tensor)) == s;
  }

  void ExpectSum(const std::vector<std::vector<float>>& parts, Rounding round,
                 const std::vector<float>& got, const std::string& what) const {
    EXPECT_EQ(-1, FirstDifference(longhand::ShardSum(parts, partial, round), got)) << what;
  }

  void ExpectOutputProjections(int l) const {
    const std::string name = "layer" + std::to_string(l);
    std::vector<std::vector<float>> o, down;
    for (int s = 0; s < V; ++s) {
      o.push_back(Output(pass.Op(name + "/attention", s), s, Tensor(l, "self_attn.o_proj.weight")));
      down.push_back(Output(pass.Op(name + "/geglu", s), s, Tensor(l, "mlp.down_proj.weight")));
    }
    ExpectSum(o, Forward(Point::kOProj), pass.Op(name + "/o_proj"), name + "/o_proj");
    ExpectSum(down, Forward(Point::kDown), pass.Op(name + "/down_proj"), name + "/down_proj");
  }

  // Within a shard q + k + v and gate + up, each product finished before it is added.
  void ExpectInputGradients(int l) const {
    const std::string name = "layer" + std::to_string(l);
    std::vector<std::vector<float>> qkv, gate_up;
    for (int s = 0; s < V; ++s) {
      const std::string k = Tensor(l, "self_attn.k_proj.weight");
      qkv.push_back(
          Input(pass.Op(name + "/q_proj.grad", s), s, Tensor(l, "self_attn.q_proj.weight")));
      if (Owns(s, k)) {
        qkv.back() = longhand::Add(qkv.back(), Input(pass.Op(name + "/k_proj.grad", s), s, k));
      }
      if (m.HasValueProjection(l) && Owns(s, k)) {
        qkv.back() = longhand::Add(qkv.back(), Input(pass.Op(name + "/v_proj.grad", s), s,
                                                     Tensor(l, "self_attn.v_proj.weight")));
      }
      gate_up.push_back(longhand::Add(
          Input(pass.Op(name + "/gate_proj.grad", s), s, Tensor(l, "mlp.gate_proj.weight")),
          Input(pass.Op(name + "/up_proj.grad", s), s, Tensor(l, "mlp.up_proj.weight"))));
    }
    ExpectSum(qkv, Backward(Point::kInputNorm), pass.Op(name + "/input_norm.grad"),
              name + "/input_norm.grad");
    ExpectSum(gate_up, Backward(Point::kPreMlpNorm), pass.Op(name + "/pre_mlp_norm.grad"),
              name + "/pre_mlp_norm.grad");
  }

  // dk and dv of a KV head that shards share: per shard, then the tree, before RoPE's backward.
  void ExpectSharedKv(int l) const {
    const std::string name = "layer" + std::to_string(l);
    const int64_t heads = m.query_heads / V, dim = m.HeadDim(l), kv = m.KvHeads(l);
    ASSERT_GT(V, kv);
    const AttentionConfig<float> config = {.kind = m.attention,
                                           .sequences = pass.batch.sequences,
                                           .length = pass.batch.length,
                                           .query_heads = heads,
                                           .kv_heads = 1,
                                           .dim = dim,
                                           .window = m.IsFull(l) ? 0 : m.sliding_window,
                                           .scale = static_cast<float>(m.attention_scale),
                                           .scores = Forward(Point::kScores),
                                           .softmax = Forward(Point::kSoftmax),
                                           .output = Forward(Point::kAttention),
                                           .grad_scores = Backward(Point::kScores),
                                           .grad_softmax = Backward(Point::kSoftmax),
                                           .grad_query = Backward(Point::kRope)};
    Engine engine(Isa::kScalar, 1);
    std::vector<std::vector<float>> dk(V), dv(V);
    for (int s = 0; s < V; ++s) {
      const auto &q = pass.Op(name + "/q_rope", s), &k = pass.Op(name + "/k_rope", s),
                 &v = pass.Op(name + "/v_norm", s), &da = pass.Op(name + "/attention.grad", s);
      std::vector<float> out(q.size()), dq(q.size());
      dk[s].resize(k.size());
      dv[s].resize(k.size());
      AttentionSaved<float> saved;
      AttentionScratch<float> scratch;
      AttentionForward(engine, config, q.data(), k.data(), v.data(), out.data(), &saved, &scratch);
      AttentionBackward(engine, config, q.data(), k.data(), v.data(), out.data(), da.data(), saved,
                        dq.data(), dk[s].data(), dv[s].data(), &scratch);
      EXPECT_EQ(-1, FirstDifference(dq, pass.Op(name + "/q_rope.grad", s)));
    }
    const int sharing = V / static_cast<int>(kv);
    for (int s = 0; s < V; s += sharing) {
      ExpectSum({dk.begin() + s, dk.begin() + s + sharing}, Backward(Point::kRope),
                pass.Op(name + "/k_rope.grad", s), name + " dk");
      ExpectSum({dv.begin() + s, dv.begin() + s + sharing}, Backward(Point::kVNorm),
                pass.Op(name + "/v_norm.grad", s), name + " dv");
    }
  }

  // dw[j] = clause 5 over rows (token, head) of dy * (x * r).
  std::vector<float> NormWeight(const std::vector<float>& x, const std::vector<float>& dy,
                                int64_t dim) const {
    const int64_t rows = std::ssize(x) / dim;
    std::vector<float> scaled(x.size());
    for (int64_t i = 0; i < rows; ++i) {
      const std::vector<float> row(x.begin() + i * dim, x.begin() + (i + 1) * dim);
      const float mean = longhand::Dot(row, row) / static_cast<float>(dim);
      const float r = 1.0f / std::sqrt(mean + static_cast<float>(m.rms_norm_eps));
      for (int64_t j = 0; j < dim; ++j) scaled[i * dim + j] = row[j] * r;
    }
    return Columns(dy, scaled, rows, dim);
  }
  static std::vector<float> Columns(const std::vector<float>& a, const std::vector<float>& b,
                                    int64_t rows, int64_t cols) {
    std::vector<float> out;
    for (int64_t j = 0; j < cols; ++j) {
      std::vector<float> x, y;
      for (int64_t i = 0; i < rows; ++i) {
        x.push_back(a[i * cols + j]);
        y.push_back(b[i * cols + j]);
      }
      out.push_back(longhand::Chain(x, y));
    }
    return out;
  }

  void ExpectQkNormWeights(int l) const {
    const std::string name = "layer" + std::to_string(l);
    const int64_t dim = m.HeadDim(l), length = pass.batch.length;
    const Angles angles = LonghandAngles(m, m.IsFull(l), length, Forward(Point::kRope));
    std::vector<std::vector<float>> q, k;
    for (int s = 0; s < V; ++s) {
      const auto dy = [&](const std::string& op, int64_t heads) {
        return LonghandRope(pass.Op(name + "/" + op + "_rope.grad", s), angles, length, heads, dim,
                            true, Backward(Point::kQkNorm));
      };
      q.push_back(NormWeight(pass.Op(name + "/q_proj", s), dy("q", m.query_heads / V), dim));
      k.push_back(Owns(s, Tensor(l, "self_attn.k_proj.weight"))
                      ? NormWeight(pass.Op(name + "/k_proj", s), dy("k", 1), dim)
                      : std::vector<float>(dim, 0.0f));
    }
    const Rounding round = Backward(Point::kWeights);
    ExpectSum(q, round, pass.Gradient(0, Tensor(l, "self_attn.q_norm.weight")), name + " q_norm");
    ExpectSum(k, round, pass.Gradient(0, Tensor(l, "self_attn.k_norm.weight")), name + " k_norm");
  }

  // The sums of exponentials and the label's logit are FP32 whatever `partials` says.
  void ExpectHead() const {
    const int64_t vocab = m.vocab_size / V;
    std::vector<std::vector<float>> dy, sums;
    std::vector<float> max(T), nll(T);
    for (int64_t t = 0; t < T; ++t) {
      std::vector<float> row;
      for (int s = 0; s < V; ++s) {
        const auto& z = pass.Op("logits", s);
        row.insert(row.end(), z.begin() + t * vocab, z.begin() + (t + 1) * vocab);
      }
      max[t] = longhand::Max(row);
    }
    for (int s = 0; s < V; ++s) {
      const auto& z = pass.Op("logits", s);
      std::vector<float> both(2 * T, 0.0f);
      for (int64_t t = 0; t < T; ++t) {
        std::vector<float> terms;
        for (int64_t v = 0; v < vocab; ++v) {
          terms.push_back(math::ExpCut(z[t * vocab + v] - max[t]));
        }
        both[t] = longhand::Sum(terms);
        const int64_t label = pass.batch.labels[t] - s * vocab;
        if (label >= 0 && label < vocab) both[T + t] = z[t * vocab + label];
      }
      sums.push_back(both);
      dy.push_back(Input(pass.Op("logits.grad", s), s, "model.embed_tokens.weight"));
    }
    const std::vector<float> sum = longhand::ShardSum(sums, 0, V);
    for (int64_t t = 0; t < T; ++t) nll[t] = (math::Log(sum[t]) + max[t]) - sum[T + t];
    EXPECT_EQ(-1, FirstDifference(longhand::RoundAll(nll, Forward(Point::kCrossEntropy)),
                                  pass.Op("loss")));
    ExpectSum(dy, Backward(Point::kFinalNorm), pass.Op("final_norm.grad"), "final_norm.grad");
  }
};

void ExpectTreesOfTheStep(const std::vector<std::string>& overrides) {
  const Recipe recipe = TinyRecipe(overrides);
  const KeptPass<float> pass(recipe);
  const StepTrees trees{pass, recipe};
  for (int l : {0, 1}) {  // sliding with values of its own, full with k = v
    trees.ExpectOutputProjections(l);
    trees.ExpectInputGradients(l);
    trees.ExpectSharedKv(l);
    trees.ExpectQkNormWeights(l);
  }
  trees.ExpectHead();
}

TEST(Clause07, EveryShardPartialOfTheStepIsSummedByTheTree) {
  ExpectTreesOfTheStep({"topology.virtual_shards=8"});
}

TEST(Clause07, EveryShardPartialOfTheStepIsSummedByTheTreeBlockwise) {
  ExpectTreesOfTheStep({"topology.virtual_shards=4", "model.attention=blockwise"});
}

TEST(Clause07, Bf16PartialsOfTheStepAreRoundedFirst) {
  ExpectTreesOfTheStep(
      {"topology.virtual_shards=4", "precision.preset=bf16", "precision.partials=bf16"});
}

// --------------------------------------------------------------------------------------- clause 8

// The gradient slabs of one micro-batch, by a transformer of its own.
std::vector<std::vector<float>> MicroBatchGradient(const Recipe& recipe, const Job& job,
                                                   const RankState& state, int64_t index,
                                                   float inv_n, double* loss_sum) {
  const DataRecipe& data = recipe.data;
  const TokenBatch batch = ReadBatch(job.batches(), false, index * data.micro_batch_size,
                                     data.micro_batch_size, data.sequence_length)
                               .value();
  LoneTransformer<float> run(recipe, job.layout().shards(), BestIsa(), 1);
  for (int s = 0; s < job.layout().shards(); ++s) {
    run.weights[s] = state.slab(s).slab(Component::kParameter);
  }
  *loss_sum = run.transformer.Forward(batch, run.weight_slabs(), "x").value();
  EXPECT_TRUE(
      run.transformer.Backward(batch, run.weight_slabs(), inv_n, run.gradient_slabs()).ok());
  return run.gradients;
}

TEST(Clause08, MicroBatchesAddUpByPlacesAndLanesByATree) {
  const Recipe recipe = TinyRecipe(
      {"data.micro_batches=12", "topology.lanes=4", "topology.virtual_shards=2", "model.layers=2",
       "model.layer_scalar=[1.0, 0.875]", "optimizer.loss_division=step-tokens"});
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(recipe, comm, {}).value();
  ASSERT_TRUE(job->StartFresh().ok());
  const RankState before = job->state();
  const UpdateRecord record = job->Advance().value().result.record;
  const double tokens = 12.0 * 2 * 12;
  std::vector<std::vector<std::vector<float>>> lanes(4);
  std::vector<double> losses(4);
  for (int64_t i = 0; i < 12; ++i) {
    double loss = 0;
    const auto finished =
        MicroBatchGradient(recipe, *job, before, i, static_cast<float>(1.0 / tokens), &loss);
    auto& lane = lanes[i % 4];
    losses[i % 4] = i < 4 ? loss : losses[i % 4] + loss;
    if (i < 4) {
      lane = finished;
      continue;
    }
    for (size_t s = 0; s < lane.size(); ++s) lane[s] = longhand::Add(lane[s], finished[s]);
  }
  for (int s = 0; s < 2; ++s) {
    const std::vector<float> expected = longhand::Add(longhand::Add(lanes[0][s], lanes[1][s]),
                                                      longhand::Add(lanes[2][s], lanes[3][s]));
    const ComputeVector<float>& got = job->updater().gradient(s);
    EXPECT_EQ(-1, FirstDifference(expected, std::vector<float>(got.begin(), got.end())))
        << "shard " << s;
  }
  EXPECT_EQ(((losses[0] + losses[1]) + (losses[2] + losses[3])) / tokens, record.loss);
}

// dE: the head's product over tokens by clause 5, then looked-up rows in token order, then rounded.
void ExpectTiedEmbedding(const std::vector<std::string>& overrides) {
  const Recipe recipe = TinyRecipe(overrides);
  const KeptPass<float> pass(recipe);
  const ModelRecipe& m = recipe.model;
  const int64_t T = pass.batch.tokens(), H = m.hidden_size;
  const int V = static_cast<int>(recipe.topology.virtual_shards);
  const int64_t vocab = m.vocab_size / V;
  const std::vector<float>&y = pass.Op("final_norm"), &dx = pass.Op("embedding.grad");
  const float scale = std::sqrt(static_cast<float>(H));
  std::map<int32_t, int> times;
  for (int32_t id : pass.batch.ids) ++times[id];
  ASSERT_TRUE(std::any_of(times.begin(), times.end(), [](const auto& x) { return x.second > 2; }))
      << "no token occurs often enough for the order to matter";
  for (int s = 0; s < V; ++s) {
    const std::vector<float>& dz = pass.Op("logits.grad", s);
    std::vector<float> expected = Product<float>(
        vocab, H, T, [&](int64_t v, int64_t t) { return dz[t * vocab + v]; },
        [&](int64_t t, int64_t h) { return y[t * H + h]; });
    for (int64_t t = 0; t < T; ++t) {
      const int64_t row = pass.batch.ids[t] - s * vocab;
      if (row < 0 || row >= vocab) continue;
      if (!m.pad_lookup_gradient && pass.batch.ids[t] == m.pad_token_id) continue;
      for (int64_t h = 0; h < H; ++h) {
        const float scaled = longhand::Round(
            dx[t * H + h] * scale, RoundingOf(recipe.precision.Gradient(Point::kEmbedding)));
        expected[row * H + h] = expected[row * H + h] + scaled;
      }
    }
    expected = longhand::RoundAll(expected, RoundingOf(recipe.precision.Gradient(Point::kWeights)));
    EXPECT_EQ(-1, FirstDifference(expected, pass.Gradient(s, "model.embed_tokens.weight")))
        << "shard " << s;
  }
}

TEST(Clause08, TiedEmbeddingTakesTheHeadsProductThenRowsInTokenOrder) {
  // 300 tokens: more than one clause-5 block. A vocabulary of 16, so that every row comes often.
  ExpectTiedEmbedding({"model.vocab_size=16", "data.sequence_length=150",
                       "topology.virtual_shards=2", "model.layers=1", "model.layer_scalar=[0.75]",
                       "model.full_attention_every=0", "model.last_layer_full=false"});
}

TEST(Clause08, TiedEmbeddingUnderBf16IsRoundedOnceAtTheEnd) {
  ExpectTiedEmbedding({"precision.preset=bf16", "model.vocab_size=16", "data.sequence_length=50",
                       "topology.virtual_shards=2"});
}

TEST(Clause08, PadRowsLookupsAreDroppedOnlyWhereTheRecipeSays) {
  for (const char* gradient : {"true", "false"}) {
    ExpectTiedEmbedding({"model.vocab_size=16", "topology.virtual_shards=2",
                         std::string("model.pad_lookup_gradient=") + gradient});
  }
}

// 1/N enters the logits' gradient and nothing else does; per micro-batch it is (1/tokens)/batches.
TEST(Clause08, TheDivisionByTokensEntersTheLogitsGradient) {
  const double tokens = 2 * 12, batches = 15;
  ASSERT_NE(1.0 / (tokens * batches), (1.0 / tokens) / batches);
  for (const bool per_batch : {false, true}) {
    const Recipe recipe =
        TinyRecipe({"precision.preset=fp64", "topology.virtual_shards=1", "topology.lanes=1",
                    "data.micro_batches=15", "model.layers=1", "model.layer_scalar=[1.0]",
                    "steps=1", "model.final_logit_softcapping=0.0", "data.evaluation_samples=0",
                    std::string("optimizer.loss_division=") +
                        (per_batch ? "per-micro-batch" : "step-tokens")});
    SoloComm comm;
    const std::unique_ptr<Job> job =
        Job::Make(recipe, comm, {},
                  std::make_shared<MemoryBatches>(MemoryBatches::Random(30, 12, 512, 1)))
            .value();
    ASSERT_TRUE(job->StartFresh().ok());
    KeepingProbe<double> probe;
    job->set_probe(&probe);
    ASSERT_TRUE(job->Advance().ok());
    const auto &z = probe["mb14/logits/shard0"], &dz = probe["mb14/logits.grad/shard0"];
    const std::vector<double> row(z.begin(), z.begin() + 512);
    const double m = longhand::Max(row);
    std::vector<double> e;
    for (double x : row) e.push_back(math::ExpCut(x - m));
    const double inverse = 1.0 / longhand::Sum(e);
    const double inv_n = per_batch ? (1.0 / tokens) / batches : 1.0 / (tokens * batches);
    std::vector<int32_t> sample;
    ASSERT_TRUE(job->batches().Sample(28, &sample).ok());
    for (int v = 0; v < 512; ++v) {
      const double p = e[v] * inverse;
      EXPECT_EQ((v == sample[1] ? p - 1.0 : p) * inv_n, dz[v]) << v;
    }
  }
}

// --------------------------------------------------------------------------------------- clause 9

// A key that a query does not see: materialised, its probability is +0 and 0 * NaN is a NaN;
// blockwise, it matters only within blocks in which the row sees something.
TEST(Clause09, UnseenKeysTakePartAsZerosOnlyWhereTheClauseSaysSo) {
  constexpr int64_t kLength = 130, kDim = 6;
  std::mt19937 random(9);
  const auto values = [&] { return longhand::Values<float>(kLength * kDim, random); };
  const std::vector<float> q = values(), k = values();
  std::vector<float> v = values();
  std::fill_n(v.begin(), kDim, std::numeric_limits<float>::quiet_NaN());  // key 0
  for (Isa isa : SupportedIsas()) {
    const auto nan_at = [&](AttentionKind kind, int64_t query) {
      Engine engine(isa, 1);
      AttentionSaved<float> saved;
      AttentionScratch<float> scratch;
      std::vector<float> out(kLength * kDim);
      const AttentionConfig<float> config = {.kind = kind,
                                             .sequences = 1,
                                             .length = kLength,
                                             .query_heads = 1,
                                             .kv_heads = 1,
                                             .dim = kDim,
                                             .window = 5,
                                             .scale = 1,
                                             .scores = {},
                                             .softmax = {},
                                             .output = {},
                                             .grad_scores = {},
                                             .grad_softmax = {},
                                             .grad_query = {}};
      AttentionForward(engine, config, q.data(), k.data(), v.data(), out.data(), &saved, &scratch);
      return std::isnan(out[query * kDim]);
    };
    for (int64_t query : {0, 63, 64, 70, 129}) {
      EXPECT_TRUE(nan_at(AttentionKind::kMaterialised, query)) << query;
    }
    // Row 67 sees key 63 of block 0. Row 68 sees nothing of it, though its query block does.
    for (int64_t query : {0, 63, 64, 67}) {
      EXPECT_TRUE(nan_at(AttentionKind::kBlockwise, query)) << query;
    }
    for (int64_t query : {68, 70, 129}) {
      EXPECT_FALSE(nan_at(AttentionKind::kBlockwise, query)) << query;
    }
  }
}

// ----------------------------------------------------------------------- clause 10, the document

std::string SourceText(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The interface has no call that adds, so no implementation can; whatever is added goes through
// ShardTree (Clause07).
TEST(Clause10, CommMovesBytesAndHasNoCallThatAdds) {
  const std::string header = SourceText(SourceDir() + "/replay/comm.h");
  const std::regex method(R"(virtual [\w ]+ (\w+)\()");
  std::set<std::string> methods;
  for (std::sregex_iterator at(header.begin(), header.end(), method), end; at != end; ++at) {
    methods.insert((*at)[1]);
  }
  EXPECT_EQ((std::set<std::string>{"rank", "size", "AllToAll", "AllGather", "Broadcast", "Barrier",
                                   "Abort"}),
            methods);
}

TEST(Clause10, NoSourceCallsACollectiveThatAdds) {
  const std::regex adds(R"(\b\w*([Aa]ll_?[Rr]educe|[Rr]educe_?[Ss]catter)\w*\s*\()");
  size_t files = 0;
  for (const char* folder : {"core", "kernels", "formats", "replay", "surgery", "cmd"}) {
    const std::string root = SourceDir() + "/" + folder;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".cc" && extension != ".h" && extension != ".cu") continue;
      ++files;
      EXPECT_FALSE(std::regex_search(SourceText(entry.path()), adds)) << entry.path();
    }
  }
  EXPECT_GT(files, 100u);
  EXPECT_TRUE(std::regex_search(std::string("group.allreduce(x);"), adds));
  EXPECT_TRUE(std::regex_search(std::string("ncclReduceScatter(x);"), adds));
}

// A clause is only as good as the tests it names. Lines "- `tests/FILE`: Suite.Name, Suite.Name".
TEST(NumericsDocument, EveryTestItNamesExistsAndEveryClauseNamesOne) {
  const std::string root = SourceDir();
  const std::string document = SourceText(root + "/core/NUMERICS.md");
  const std::regex reference(R"(`(tests/\w+\.cc)`: ((?:\w+\.\w+(?:, )?)+))");
  const std::regex clause(R"(\n\*\*(\d+)\. )"), named(R"((\w+)\.(\w+))");
  std::map<int, int> tests;  // by clause
  std::vector<std::pair<size_t, int>> clauses;
  for (std::sregex_iterator at(document.begin(), document.end(), clause), end; at != end; ++at) {
    clauses.emplace_back(at->position(), std::stoi((*at)[1]));
    EXPECT_EQ(std::ssize(clauses), clauses.back().second) << "clauses are numbered in order";
  }
  for (std::sregex_iterator at(document.begin(), document.end(), reference), end; at != end; ++at) {
    const std::string source = SourceText(root + "/" + (*at)[1].str()), names = (*at)[2];
    for (std::sregex_iterator name(names.begin(), names.end(), named); name != end; ++name) {
      const std::regex definition("TEST(_F|_P)?\\(" + (*name)[1].str() + ", " + (*name)[2].str() +
                                  "\\)|TYPED_TEST\\(" + (*name)[1].str() + ", " + (*name)[2].str() +
                                  "\\)");
      EXPECT_TRUE(std::regex_search(source, definition)) << (*at)[1] << ": " << (*name)[0];
      for (size_t c = clauses.size(); c-- > 0;) {
        if (clauses[c].first > static_cast<size_t>(at->position())) continue;
        ++tests[clauses[c].second];
        break;
      }
    }
  }
  EXPECT_EQ(17u, clauses.size());
  for (const auto& [position, number] : clauses) EXPECT_GT(tests[number], 0) << "clause " << number;
}

}  // namespace
}  // namespace retrace
