// Clauses 11 to 16 of core/NUMERICS.md, one by one: norm and clip, AdamW, initial values, samples,
// the state's digest, values that are not finite.
#include <gtest/gtest.h>

#include <bit>
#include <set>

#include "core/optimizer_block.h"
#include "core/philox.h"
#include "core/random_streams.h"
#include "core/schedule.h"
#include "tests/numerics_case.h"

namespace retrace {
namespace {

using longhand::FirstDifference;

std::unique_ptr<Job> MakeJob(const Recipe& recipe, Comm& comm,
                             std::shared_ptr<const BatchSource> batches = nullptr) {
  std::unique_ptr<Job> job = Job::Make(recipe, comm, {}, std::move(batches)).value();
  EXPECT_TRUE(job->StartFresh().ok());
  return job;
}

// A whole tensor out of the slabs of a rank that holds all shards.
std::vector<float> Whole(const Layout& layout, const RankState& state, Component component,
                         int tensor) {
  const int64_t cols = layout.tensors()[tensor].cols;
  std::vector<float> whole(layout.tensors()[tensor].numel());
  for (int s = 0; s < layout.shards(); ++s) {
    const Piece* piece = layout.FindPiece(s, tensor);
    if (piece == nullptr) continue;
    const float* from = state.slab(s).slab(component).data() + piece->offset;
    for (int64_t row = piece->row_first; row < piece->row_last; ++row) {
      for (int64_t col = piece->col_first; col < piece->col_last; ++col) {
        whole[row * cols + col] = *from++;
      }
    }
  }
  return whole;
}

// -------------------------------------------------------------------------------------- clause 11

double SumOfSquares(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t first = 0; first < n; first += 65536) {
    std::vector<double> squares;
    for (int64_t i = first; i < std::min(n, first + 65536); ++i) {
      squares.push_back(static_cast<double>(x[i]) * static_cast<double>(x[i]));
    }
    const double block = longhand::Sum(squares);
    sum = first == 0 ? block : sum + block;
  }
  return sum;
}

double Tree(const std::vector<double>& values, size_t lo, size_t hi) {
  if (hi - lo == 1) return values[lo];
  const size_t mid = lo + (hi - lo) / 2;
  return Tree(values, lo, mid) + Tree(values, mid, hi);
}

// Squares per tensor and shard in blocks of 65536, shards by the tree, tensors by ascending name
// bytes, a tensor that all shards use counted once.
void ExpectNormOfClause11(const Recipe& recipe, std::shared_ptr<const BatchSource> batches) {
  SoloComm comm;
  const std::unique_ptr<Job> job = MakeJob(recipe, comm, std::move(batches));
  const UpdateRecord record = job->Advance().value().result.record;
  const Layout& layout = job->layout();
  double sum = 0;
  std::string last_name;
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const std::string& name = layout.tensors()[t].name;
    EXPECT_LT(last_name, name);
    last_name = name;
    std::vector<double> shards(layout.shards(), 0.0);
    for (int s = 0; s < layout.shards(); ++s) {
      const Piece* piece = layout.FindPiece(s, static_cast<int>(t));
      if (piece == nullptr) continue;
      shards[s] = SumOfSquares(job->updater().gradient(s).data() + piece->offset, piece->numel());
    }
    const double square = Tree(shards, 0, shards.size());
    EXPECT_EQ(std::sqrt(square), record.tensor_norms[t]) << name;
    sum = sum + square;
  }
  EXPECT_EQ(std::sqrt(sum), record.gradient_norm);
  const double coefficient = recipe.optimizer.clip / (record.gradient_norm + 1e-6);
  EXPECT_EQ(coefficient < 1 ? static_cast<float>(coefficient) : 1.0f, record.clip);
}

TEST(Clause11, NormIsSummedInFp64ByTensorsAndShards) {
  for (const char* shards : {"1", "4", "8"}) {
    ExpectNormOfClause11(TinyRecipe({std::string("topology.virtual_shards=") + shards}), nullptr);
  }
}

TEST(Clause11, PiecesOfMoreThan65536ElementsAreSummedInBlocks) {
  const Recipe recipe =
      TinyRecipe({"model.vocab_size=8192", "topology.virtual_shards=2", "model.layers=1",
                  "model.layer_scalar=[1.0]", "data.evaluation_samples=0"});
  ExpectNormOfClause11(recipe,
                       std::make_shared<MemoryBatches>(MemoryBatches::Random(8, 12, 8192, 2)));
}

TEST(Clause11, ClipAppliesBelowOneAndNotWhereTheRecipeHasNone) {
  for (const auto& [clip, applied] : {std::pair{"1e-3", true}, {"1e6", false}, {"0.0", false}}) {
    const Recipe recipe = TinyRecipe({std::string("optimizer.clip=") + clip});
    SoloComm comm;
    const UpdateResult result = MakeJob(recipe, comm)->Advance().value().result;
    EXPECT_EQ(applied, result.record.clip < 1) << clip;
    if (!applied) {
      EXPECT_EQ(1.0, result.record.clip) << clip;
    }
    for (const OptimizerRow& row : result.block.rows) EXPECT_EQ(result.record.clip, row.clip);
  }
}

// -------------------------------------------------------------------------------------- clause 12

struct Element {
  float p, m, v;
};

// Every operation rounded to FP32 on its own (volatile: no compiler may join two).
Element LonghandAdamW(const OptimizerRow& row, float clip, float g, Element e) {
  if (row.action == TensorAction::kSkip) return e;
  volatile float clipped = clip * g;
  volatile float m1 = row.beta1 * e.m, m2 = row.one_minus_beta1 * clipped, m = m1 + m2;
  volatile float v1 = row.beta2 * e.v, v2 = row.one_minus_beta2 * clipped, v3 = v2 * clipped;
  volatile float v = v1 + v3;
  if (row.action == TensorAction::kFrozen) return {e.p, m, v};
  volatile float m_hat = m / row.bias_correction1, v_hat = v / row.bias_correction2;
  volatile float root = std::sqrt(v_hat), below = root + row.eps, adam = m_hat / below;
  volatile float limited = adam * row.update_clip, decay = row.weight_decay * e.p;
  volatile float u = limited + decay, step = row.lr * u, p = e.p - step;
  return {p, m, v};
}

TEST(Clause12, ScalarsAreComputedInFp64AndRoundedOnce) {
  const Recipe recipe = TinyRecipe({"optimizer.beta1=0.87", "optimizer.beta2=0.9301"});
  SoloComm comm;
  const std::unique_ptr<Job> job = MakeJob(recipe, comm);
  for (int k = 1; k <= 3; ++k) {
    const UpdateResult result = job->Advance().value().result;
    double power1 = 0.87, power2 = 0.9301;
    if (k == 2) power1 = 0.87 * 0.87, power2 = 0.9301 * 0.9301;
    // The ladder of clause 2 for 3 = 11b: result = 1*b, square = b*b, result = b * (b*b).
    if (k == 3) power1 = 0.87 * (0.87 * 0.87), power2 = 0.9301 * (0.9301 * 0.9301);
    for (size_t t = 0; t < result.block.rows.size(); ++t) {
      const OptimizerRow& row = result.block.rows[t];
      EXPECT_EQ(k, row.t);
      EXPECT_EQ(static_cast<float>(LearningRate(recipe.schedule, k)), row.lr);
      EXPECT_EQ(static_cast<float>(1.0 - 0.87), row.one_minus_beta1);
      EXPECT_EQ(static_cast<float>(1.0 - 0.9301), row.one_minus_beta2);
      EXPECT_EQ(static_cast<float>(1.0 - power1), row.bias_correction1);
      EXPECT_EQ(static_cast<float>(1.0 - power2), row.bias_correction2);
      EXPECT_EQ(job->layout().tensors()[t].vector ? 0.0f : 0.1f, row.weight_decay);
      EXPECT_EQ(1.0f, row.update_clip);
    }
  }
}

TEST(Clause12, StateFollowsFromGradientAndScalarsAlone) {
  for (const char* policy : {"fp32", "bf16", "fp64"}) {
    const Recipe recipe = TinyRecipe({std::string("precision.preset=") + policy});
    SoloComm comm;
    const std::unique_ptr<Job> job = MakeJob(recipe, comm);
    for (int k = 1; k <= 2; ++k) {
      const RankState before = job->state();
      const UpdateResult result = job->Advance().value().result;
      for (int s = 0; s < job->layout().shards(); ++s) {
        for (const Piece& piece : job->layout().pieces(s)) {
          const OptimizerRow& row = result.block.rows[piece.tensor];
          int64_t wrong = 0;
          for (int64_t i = piece.offset; i < piece.offset + piece.numel(); ++i) {
            const auto& b = before.slab(s).slabs;
            const auto& a = job->state().slab(s).slabs;
            const Element e = LonghandAdamW(row, row.clip, job->updater().gradient(s)[i],
                                            {b[0][i], b[1][i], b[2][i]});
            wrong += e.p != a[0][i] || e.m != a[1][i] || e.v != a[2][i];
          }
          EXPECT_EQ(0, wrong) << policy << " " << job->layout().tensors()[piece.tensor].name;
        }
      }
    }
  }
}

TEST(Clause12, ClipPerRowFollowsRowsOfTheWholeTensor) {
  const Recipe recipe = TinyRecipe({"topology.virtual_shards=4"});
  SoloComm comm;
  const std::unique_ptr<Job> job = MakeJob(recipe, comm);
  OptimizerBlock block = job->Advance().value().result.block;
  for (const char* name : {"model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"}) {
    const int tensor = job->layout().Find(name);
    block.row_clips.assign(block.rows.size(), {});
    for (int64_t r = 0; r < job->layout().tensors()[tensor].rows; ++r) {
      block.row_clips[tensor].push_back(0.001f * static_cast<float>(r + 1));
    }
    const int shard = 2;
    const Piece& piece = *job->layout().FindPiece(shard, tensor);
    ASSERT_GT(piece.row_first, 0);
    const ShardState before = job->state().slab(shard);
    ShardState after = before;
    const ComputeVector<float>& g = job->updater().gradient(shard);
    ApplyBlock(job->engine(), job->layout(), block, job->layout().pieces(shard), g.data(), &after);
    for (int64_t e = 0; e < piece.numel(); ++e) {
      const int64_t i = piece.offset + e;
      const float clip = 0.001f * static_cast<float>(piece.row_first + e / piece.cols() + 1);
      const Element expected =
          LonghandAdamW(block.rows[tensor], clip, g[i],
                        {before.slabs[0][i], before.slabs[1][i], before.slabs[2][i]});
      ASSERT_EQ(expected.p, after.slabs[0][i]) << name << " element " << e;
      ASSERT_EQ(expected.v, after.slabs[2][i]) << name << " element " << e;
    }
  }
}

// -------------------------------------------------------------------------------------- clause 13

TEST(Clause13, InitialValuesDependOnNameAndElementAlone) {
  const Recipe eight = TinyRecipe({"topology.virtual_shards=8"});
  const Recipe one = TinyRecipe({"topology.virtual_shards=1"});
  // Other tensors come and go: fewer layers, no norms, a head of its own.
  const Recipe other =
      TinyRecipe({"topology.virtual_shards=2", "model.layers=2", "model.layer_scalar=[1.0, 1.0]",
                  "model.pre_norm=false", "model.tie_word_embeddings=false"});
  const Layout layout8 = Layout::Make(eight.model, 8).value();
  const Layout layout1 = Layout::Make(one.model, 1).value();
  const Layout layout2 = Layout::Make(other.model, 2).value();
  Engine engine(BestIsa(), 2);
  const RankState state8 = InitialState(eight, ParameterMap(layout8, 0, 8), engine);
  const RankState state1 = InitialState(one, ParameterMap(layout1, 0, 1), engine);
  const RankState state2 = InitialState(other, ParameterMap(layout2, 0, 2), engine);
  int in_other = 0;
  for (size_t t = 0; t < layout1.tensors().size(); ++t) {
    const TensorSpec& spec = layout1.tensors()[t];
    const int tensor = static_cast<int>(t);
    const std::vector<float> whole = Whole(layout1, state1, Component::kParameter, tensor);
    EXPECT_EQ(whole, Whole(layout8, state8, Component::kParameter, tensor)) << spec.name;
    const int there = layout2.Find(spec.name);
    if (there >= 0) {
      ++in_other;
      EXPECT_EQ(whole, Whole(layout2, state2, Component::kParameter, there)) << spec.name;
    }
    const RandomStream random = MakeRandomStream(1234, 1, TensorStream(spec.name));
    for (int64_t e = 0; e < spec.numel(); ++e) {
      const double std = spec.layer < 0 ? 0.5 : 0.1;
      const bool pad = spec.layer < 0 && e / spec.cols == 5;
      const float expected = spec.vector ? 1.0f
                             : pad       ? 0.0f
                                         : static_cast<float>(std * RandomNormal(random, e));
      ASSERT_EQ(expected, whole[e]) << spec.name << " element " << e;
    }
    EXPECT_EQ(std::vector<float>(spec.numel(), 0.0f),
              Whole(layout1, state1, Component::kM, tensor));
    EXPECT_EQ(std::vector<float>(spec.numel(), 0.0f),
              Whole(layout1, state1, Component::kV, tensor));
  }
  EXPECT_GT(in_other, 10);
}

TEST(Clause13, TensorStreamsAreTheFirstBytesOfTheDigestOfTheName) {
  const Digest digest = DigestOf(std::string_view("model.norm.weight"));
  uint64_t expected = 0;
  for (int i = 7; i >= 0; --i) expected = expected << 8 | digest.bytes[i];
  EXPECT_EQ(expected, TensorStream("model.norm.weight"));
}

TEST(Clause13, ResidualScaledDividesTheOutputProjectionsByTheRootOfTwiceTheLayers) {
  const Recipe hf = TinyRecipe({"init.scheme=hf"});
  const Recipe scaled = TinyRecipe({"init.scheme=residual-scaled"});
  const Layout layout = Layout::Make(hf.model, 8).value();
  const ParameterMap map(layout, 0, 8);
  Engine engine(BestIsa(), 1);
  const RankState a = InitialState(hf, map, engine), b = InitialState(scaled, map, engine);
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const TensorSpec& spec = layout.tensors()[t];
    const bool output =
        spec.name.ends_with("o_proj.weight") || spec.name.ends_with("down_proj.weight");
    const auto x = Whole(layout, a, Component::kParameter, static_cast<int>(t));
    const auto y = Whole(layout, b, Component::kParameter, static_cast<int>(t));
    if (!output) {
      EXPECT_EQ(x, y) << spec.name;
      continue;
    }
    const RandomStream random = MakeRandomStream(1234, 1, TensorStream(spec.name));
    EXPECT_EQ(static_cast<float>(0.1 / std::sqrt(2.0 * 4) * RandomNormal(random, 3)), y[3]);
    EXPECT_NE(x, y) << spec.name;
  }
}

// -------------------------------------------------------------------------------------- clause 14

// A source that notes which samples are asked for.
class NotingBatches : public BatchSource {
 public:
  explicit NotingBatches(MemoryBatches batches) : batches_(std::move(batches)) {}
  Status Sample(int64_t index, std::vector<int32_t>* tokens) const override {
    asked.insert(index);
    return batches_.Sample(index, tokens);
  }
  Status EvaluationSample(int64_t index, std::vector<int32_t>* tokens) const override {
    return batches_.Sample(index, tokens);
  }
  Digest identity() const override { return batches_.identity(); }
  mutable std::set<int64_t> asked;

 private:
  MemoryBatches batches_;
};

TEST(Clause14, AnUpdateConsumesTheNextSamplesAndRecordsTheirDigest) {
  const Recipe recipe = TinyRecipe();  // eight samples an update
  const auto batches = std::make_shared<NotingBatches>(MemoryBatches::Random(24, 12, 512, 14));
  SoloComm comm;
  const std::unique_ptr<Job> job = MakeJob(recipe, comm, batches);
  for (int64_t k = 1; k <= 2; ++k) {
    batches->asked.clear();
    const UpdateRecord record = job->Advance().value().result.record;
    std::set<int64_t> expected;
    std::vector<int32_t> tokens;  // of all samples of the update, in order
    for (int64_t i = 8 * (k - 1); i < 8 * k; ++i) {
      expected.insert(i);
      std::vector<int32_t> sample;
      ASSERT_TRUE(batches->Sample(i, &sample).ok());
      tokens.insert(tokens.end(), sample.begin(), sample.end());
    }
    EXPECT_EQ(expected, batches->asked);
    EXPECT_EQ(8 * (k - 1), record.first_sample);
    EXPECT_EQ(8, record.samples);
    EXPECT_EQ(DigestOf(tokens.data(), tokens.size() * sizeof(int32_t)), record.tokens);
    EXPECT_EQ(8 * k, job->state().state.counters.data_cursor);
  }
}

TEST(Clause14, PastTheSamplesPlannedIsAnErrorAndLeavesTheStateAlone) {
  SoloComm comm;
  const std::unique_ptr<Job> job = MakeJob(
      TinyRecipe(), comm, std::make_shared<MemoryBatches>(MemoryBatches::Random(12, 12, 512, 14)));
  const Digest after_one = job->Advance().value().digest;
  const Result<Job::Step> second = job->Advance();
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(after_one, job->StateDigestNow().value());
}

// -------------------------------------------------------------------------------------- clause 15

State SomeState(const Layout& layout) {
  State state = MakeState(layout, 0, layout.shards());
  state.counters = {.position = 3,
                    .schedule_index = 4,
                    .data_cursor = 24,
                    .adam_t = std::vector<int64_t>(layout.tensors().size(), 3)};
  state.memory["norm_ema"] = {0.5, 0.0};
  for (auto& shard : state.shards) {
    float x = 0;
    for (auto& slab : shard.slabs) {
      for (float& value : slab) value = x += 0.25f;
    }
  }
  return state;
}

TEST(Clause15, StateDigestIsTheListOfScalarsAndShards) {
  const Layout layout = Layout::Make(TinyRecipe().model, 2).value();
  const State state = SomeState(layout);
  std::string scalars =
      "retrace state 1\nshards 2\nposition 3\nschedule_index 4\ndata_cursor 24\n"
      "adam_t";
  for (size_t t = 0; t < layout.tensors().size(); ++t) scalars += " 3";
  scalars += "\nmemory norm_ema 3fe0000000000000 0000000000000000\n";
  std::vector<Digest> parts = {DigestOf(scalars)};
  for (int s = 0; s < 2; ++s) {
    std::vector<Digest> pieces;  // p, m, v of each piece in canonical order
    for (const Piece& piece : layout.pieces(s)) {
      for (const auto& slab : state.shards[s].slabs) {
        // Pieces of the tiny model are smaller than a leaf: a list of one digest.
        const size_t bytes = piece.numel() * sizeof(float);
        ASSERT_LE(bytes, kDigestLeafBytes);
        pieces.push_back(DigestOf({DigestOf(slab.data() + piece.offset, bytes)}));
      }
    }
    parts.push_back(DigestOf(pieces));
  }
  EXPECT_EQ(DigestOf(parts), StateDigest(layout, state));
}

TEST(Clause15, EveryScalarAndEveryBitOfASlabIsCovered) {
  const Layout layout = Layout::Make(TinyRecipe().model, 2).value();
  const State state = SomeState(layout);
  std::set<Digest> digests = {StateDigest(layout, state)};
  const auto expect_other = [&](const char* what, auto edit) {
    State other = state;
    edit(other);
    EXPECT_TRUE(digests.insert(StateDigest(layout, other)).second) << what;
  };
  expect_other("position", [](State& s) { ++s.counters.position; });
  expect_other("schedule index", [](State& s) { ++s.counters.schedule_index; });
  expect_other("data cursor", [](State& s) { ++s.counters.data_cursor; });
  expect_other("one tensor's t", [](State& s) { ++s.counters.adam_t[5]; });
  expect_other("rule memory", [](State& s) { s.memory["norm_ema"][0] = 0.75; });
  expect_other("sign of a zero in rule memory", [](State& s) { s.memory["norm_ema"][1] = -0.0; });
  expect_other("another rule", [](State& s) { s.memory["z"] = {}; });
  expect_other("one bit", [](State& s) {
    float& x = s.shards[1].slabs[2].back();
    x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) ^ 1);
  });
  expect_other("+0", [](State& s) { s.shards[0].slabs[1][7] = 0.0f; });
  expect_other("-0", [](State& s) { s.shards[0].slabs[1][7] = -0.0f; });
}

TEST(Clause15, VirtualShardsBelongToTheDigest) {
  std::set<Digest> digests;
  for (const char* shards : {"1", "2", "4", "8"}) {
    const Recipe recipe = TinyRecipe({std::string("topology.virtual_shards=") + shards});
    SoloComm comm;
    digests.insert(MakeJob(recipe, comm)->StateDigestNow().value());
  }
  EXPECT_EQ(4u, digests.size());
}

TEST(Clause15, LeavesOfATensorAreOneMebibyte) {
  const std::vector<float> values((size_t{1} << 18) + 3, 0.5f);
  const Digest first = DigestOf(values.data(), size_t{1} << 20);
  const Digest rest = DigestOf(values.data() + (1 << 18), 12);
  EXPECT_EQ(DigestOf({first, rest}), TensorDigest(values.data(), values.size() * sizeof(float)));
}

// -------------------------------------------------------------------------------------- clause 16

// A job whose first update has a gradient that is not finite: one parameter is infinite.
std::unique_ptr<Job> BrokenJob(const char* policy, Comm& comm, float value) {
  std::unique_ptr<Job> job =
      MakeJob(TinyRecipe({std::string("optimizer.non_finite=") + policy}), comm);
  const int tensor = job->layout().Find("model.layers.1.self_attn.q_proj.weight");
  const Piece& piece = *job->layout().FindPiece(1, tensor);
  job->state().slab(1).slab(Component::kParameter)[piece.offset] = value;
  return job;
}

TEST(Clause16, HaltingComesBeforeTheUpdateAndLeavesTheStateUnchanged) {
  for (float value :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    SoloComm comm;
    const std::unique_ptr<Job> job = BrokenJob("halt", comm, value);
    const Digest before = job->StateDigestNow().value();
    const Job::Step step = job->Advance().value();
    EXPECT_EQ(UpdateAction::kHalted, step.result.action);
    EXPECT_EQ("halted", step.result.record.action);
    EXPECT_NE(std::string::npos, step.result.reason.find("the gradient of ")) << step.result.reason;
    EXPECT_EQ(before, step.digest);
    EXPECT_EQ(0, job->position());
  }
}

TEST(Clause16, SkippingMovesTheCountersButNotTheTensors) {
  SoloComm comm;
  const std::unique_ptr<Job> job = BrokenJob("skip", comm, std::numeric_limits<float>::infinity());
  const RankState before = job->state();
  const UpdateResult result = job->Advance().value().result;
  EXPECT_EQ(UpdateAction::kSkipped, result.action);
  for (const OptimizerRow& row : result.block.rows) EXPECT_EQ(TensorAction::kSkip, row.action);
  for (int s = 0; s < 8; ++s) {
    for (int c = 0; c < kNumComponents; ++c) {
      EXPECT_EQ(-1, FirstDifference(before.slab(s).slabs[c], job->state().slab(s).slabs[c]));
    }
  }
  const Counters& counters = job->state().state.counters;
  EXPECT_EQ(before.state.counters.adam_t, counters.adam_t);
  EXPECT_EQ(1, counters.position);
  EXPECT_EQ(1, counters.schedule_index);
  EXPECT_EQ(8, counters.data_cursor);
}

TEST(Clause16, RecordingGoesOnAndStoresOneNan) {
  SoloComm comm;
  const std::unique_ptr<Job> job =
      BrokenJob("record", comm, std::numeric_limits<float>::infinity());
  const UpdateResult result = job->Advance().value().result;
  EXPECT_EQ(UpdateAction::kApplied, result.action);
  EXPECT_EQ(1, job->position());
  int64_t nans = 0;
  const auto count = [&](const auto& slab) {
    for (float x : slab) {
      if (!std::isnan(x)) continue;
      ++nans;
      ASSERT_EQ(0x7fc00000u, std::bit_cast<uint32_t>(x));  // clause 1
    }
  };
  for (int s = 0; s < 8; ++s) {
    for (const auto& slab : job->state().slab(s).slabs) count(slab);
    count(job->updater().gradient(s));
  }
  EXPECT_GT(nans, 1000);
}

}  // namespace
}  // namespace retrace
