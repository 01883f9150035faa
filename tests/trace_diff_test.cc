// The diff of traces: the first op that differs in bits, and the first that rounding does not explain.
#include "replay/trace_diff.h"

#include <gtest/gtest.h>

#include <limits>

#include "replay/update_tracer.h"
#include "replay/whole_trace.h"
#include "tests/faulty_run.h"
#include "tests/places.h"
#include "tests/small_run.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

// One micro-batch; two virtual shards a KV head of the sliding layers, four of the full ones.
Recipe Tiny(std::vector<std::string> more = {}) {
  more.insert(more.begin(), {"data.path=" + TestData("dataset/tiny"), "data.micro_batches=1",
                             "topology.lanes=1", "topology.virtual_shards=4"});
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", more).value();
}

TraceFile TraceTo(const std::string& path, const Recipe& recipe, Probe* fault = nullptr,
                  bool tensors = true) {
  SoloComm comm;
  const auto job = Job::Make(recipe, comm, {.tp = 1, .dp = 1, .threads = 1}).value();
  EXPECT_TRUE(job->StartFresh().ok());
  TraceOptions options;
  options.before = fault;
  if (tensors) options.tensors = [](std::string_view) { return true; };
  UpdateTracer tracer(*job, options);
  EXPECT_TRUE(tracer.Advance(nullptr).ok());
  const TraceHeader header = {"retrace test", "r", 1, "s", PrintRecipe(recipe), "no"};
  const std::vector<TraceOp> ops(tracer.ops().begin(), tracer.ops().end());
  if (!tensors) {
    EXPECT_TRUE(WriteTraceDigests(path, header, ops).ok());
    return TraceFile::Open(path).value();
  }
  std::vector<TensorSource> sources;
  for (const UpdateTracer::TracedOp& op : tracer.ops()) {
    if (!op.kept) continue;
    sources.push_back({op.name, op.type, {op.rows, op.cols},
                       [&tracer, &op](const TensorSource::Sink& sink) -> Status {
                         const std::string bytes = tracer.Elements(op).value();
                         return sink(bytes.data(), bytes.size());
                       }});
  }
  EXPECT_TRUE(WriteTraceTensors(path, header, ops, std::move(sources)).ok());
  return TraceFile::Open(path).value();
}

// A mistake of one op, all of its shards: wrong by a hundredth.
class Scaled : public Probe {
 public:
  explicit Scaled(std::string op) : op_(std::move(op)) {}
  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override {
    std::string whole = name;
    TakeShard(&whole);
    if (whole != op_) return;
    for (int64_t i = 0; i < rows * cols; ++i) const_cast<float*>(data)[i] *= 1.01f;
  }
  void Op(const std::string&, const double*, int64_t, int64_t) override {}

 private:
  const std::string op_;
};

TEST(TraceDiff, AFlippedBitIsNamedWithItsElementAndBothValues) {
  const TempDir dir;
  const TraceFile clean = TraceTo(dir / "a", Tiny());
  BitFlip flip("mb0/layer2/down_proj.grad", 37, 3);
  const TraceFile faulty = TraceTo(dir / "b", Tiny(), &flip);
  const TraceDifference d = DiffTraces(clean, faulty, {}).value();
  const ComparedOp* first = d.FirstDiffering();
  ASSERT_NE(nullptr, first);
  EXPECT_EQ("mb0/layer2/down_proj.grad", first->name);
  EXPECT_EQ(1, first->difference->differing);
  EXPECT_EQ(37, first->difference->first->index);
  EXPECT_EQ("[1, 5]", first->IndexText(37));
  EXPECT_EQ(8u, first->difference->first->ulp);
  EXPECT_EQ(clean.Read(*clean.Find(first->name)).value()[37], first->difference->first->a);
  EXPECT_FALSE(d.same());
  EXPECT_TRUE(DiffTraces(clean, clean, {}).value().same());
  // The same without elements.
  BitFlip again("mb0/layer2/down_proj.grad", 37, 3);
  const TraceFile digests = TraceTo(dir / "c", Tiny(), &again, false);
  const TraceDifference by_digest = DiffTraces(clean, digests, {}).value();
  EXPECT_EQ("mb0/layer2/down_proj.grad", by_digest.FirstDiffering()->name);
  EXPECT_FALSE(by_digest.FirstDiffering()->difference.has_value());
  EXPECT_EQ(d.differing(), by_digest.differing());
}

TEST(TraceDiff, OtherWeightsAreTheFirstThatDiffers) {
  const TempDir dir;
  const TraceFile a = TraceTo(dir / "a", Tiny(), nullptr, false);
  const TraceFile b = TraceTo(dir / "b", Tiny({"init.seed=5"}), nullptr, false);
  EXPECT_EQ("state/model.embed_tokens.weight#p/shard0",
            DiffTraces(a, b, {}).value().FirstDiffering()->name);
}

TEST(TraceDiff, ShardsArePutTogetherWhereTwoTracesDivideTensorsInOtherWays) {
  const TempDir dir;
  const TraceFile four = TraceTo(dir / "a", Tiny());
  const TraceFile one = TraceTo(dir / "b", Tiny({"topology.virtual_shards=1"}));
  const TraceDifference d = DiffTraces(four, one, {.rounding = true}).value();
  EXPECT_TRUE(d.wholes);
  EXPECT_TRUE(d.only_a.empty() && d.only_b.empty() && d.shapes.empty());
  EXPECT_TRUE(d.same()) << d.FirstBeyond()->name;
  // What is no sum over shards has the same bits, so that the order of heads and columns is right.
  for (const ComparedOp& op : d.ops) {
    for (const char* name : {"mb0/embedding", "mb0/layer0/q_proj", "mb0/layer0/k_rope",
                             "mb0/layer0/v_norm", "mb0/layer0/attention"}) {
      EXPECT_TRUE(op.name != name || op.identical) << name;
    }
  }
  EXPECT_GT(d.differing(), 100);
  const TraceFile digests = TraceTo(dir / "c", Tiny({"topology.virtual_shards=1"}), nullptr, false);
  EXPECT_EQ(StatusCode::kUnsupported, DiffTraces(four, digests, {}).status().code());
}

TEST(TraceDiff, WhatOnlyThePrecisionChangesIsWithinRounding) {
  const TempDir dir;
  const TraceFile fp32 = TraceTo(dir / "a", Tiny());
  const TraceFile fp64 = TraceTo(dir / "b", Tiny({"precision.preset=fp64"}));
  const TraceFile bf16 = TraceTo(dir / "c", Tiny({"precision.preset=bf16"}));
  const TraceFile angles = TraceTo(dir / "d", Tiny({"model.rope_angle_fp32=true"}));
  const TraceFile blockwise = TraceTo(dir / "e", Tiny({"model.attention=blockwise"}));
  EXPECT_TRUE(AreOfDifferentPrecision(fp32, fp64));
  EXPECT_TRUE(AreOfDifferentPrecision(fp32, bf16));
  EXPECT_FALSE(AreOfDifferentPrecision(fp32, angles));
  for (const TraceFile* other : {&fp64, &bf16, &angles, &blockwise}) {
    const TraceDifference d = DiffTraces(fp32, *other, {.rounding = true}).value();
    EXPECT_TRUE(d.same()) << other->path() << ": " << d.FirstBeyond()->name << " share "
                          << d.FirstBeyond()->share();
    EXPECT_EQ(other == &bf16 ? 0x1p-9 : 0x1p-24, d.unit_roundoff);
    EXPECT_GT(d.judged(), 180);
    EXPECT_GT(d.differing(), 20);
  }
  const TraceDifference by_truth = DiffTraces(fp32, angles, {.truth = &fp64}).value();
  EXPECT_TRUE(by_truth.same()) << by_truth.FirstBeyond()->name;
}

// Every op of a micro-batch, in the first and the last layer, forward and backward, and every
// parameter's gradient there.
std::vector<std::string> OpsOfInterest(const TraceFile& trace) {
  const WholeTrace whole = WholeTrace::Make(trace).value();
  std::vector<std::string> names;
  for (const WholeTrace::Op& op : whole.ops()) {
    const bool middle = op.name.find("layer1/") != std::string::npos ||
                        op.name.find("layer2/") != std::string::npos ||
                        op.name.find("layers.1.") != std::string::npos ||
                        op.name.find("layers.2.") != std::string::npos;
    if (op.name.starts_with("mb0/") && !middle) names.push_back(op.name);
  }
  return names;
}

TEST(TraceDiff, AMistakeOfAHundredthInAnyOpIsNamedAndWhatFollowsIsNot) {
  const TempDir dir;
  const Recipe recipe = Tiny();
  const TraceFile clean = TraceTo(dir / "a", recipe);
  const std::vector<std::string> names = OpsOfInterest(clean);
  EXPECT_GT(names.size(), 100u);
  for (const std::string& name : names) {
    Scaled scaled(name);
    const TraceFile faulty = TraceTo(dir / "b", recipe, &scaled);
    const TraceDifference d = DiffTraces(clean, faulty, {.rounding = true}).value();
    const ComparedOp* first = d.FirstBeyond();
    if (first == nullptr) {
      ADD_FAILURE() << name << " is not found";
      continue;
    }
    EXPECT_EQ(name, first->name);
    // Ops that were computed before the mistake was made at the op's end, from what it was made in,
    // can be beyond too: RoPE of a projection. Nothing else.
    EXPECT_LE(d.beyond(), 4) << name;
  }
}

// One element of one op is infinite.
class Infinite : public Probe {
 public:
  explicit Infinite(std::string op) : op_(std::move(op)) {}
  void Op(const std::string& name, const float* data, int64_t, int64_t) override {
    if (name == op_) const_cast<float*>(data)[0] = std::numeric_limits<float>::infinity();
  }
  void Op(const std::string&, const double*, int64_t, int64_t) override {}

 private:
  const std::string op_;
};

TEST(TraceDiff, NoRoundingExplainsAnInfinity) {
  const TempDir dir;
  const TraceFile truth = TraceTo(dir / "truth", Tiny({"precision.preset=fp64"}));
  const TraceFile clean = TraceTo(dir / "clean", Tiny());
  for (const char* op : {"mb0/loss", "mb0/layer0/o_proj", "mb0/logits/shard0"}) {
    Infinite fault(op);
    const TraceFile faulty = TraceTo(dir / "faulty", Tiny(), &fault);
    std::string whole = op;
    TakeShard(&whole);
    for (const TraceFile* with : {static_cast<const TraceFile*>(nullptr), &truth}) {
      const TraceDifference d =
          DiffTraces(clean, faulty, {.only = {}, .rounding = true, .truth = with}).value();
      ASSERT_NE(nullptr, d.FirstBeyond()) << op;
      EXPECT_EQ(whole, d.FirstBeyond()->name);
      EXPECT_EQ(with != nullptr ? "B" : "both", d.FirstBeyond()->beyond);
      EXPECT_FALSE(d.same());
    }
  }
}

TEST(TraceDiff, WhereNothingCanBeJudgedNothingIsTheSame) {
  const TempDir dir;
  const TraceFile a = TraceTo(dir / "a", Tiny()), b = TraceTo(dir / "b", Tiny({"optimizer.clip=0"}));
  const auto optimizer = [](std::string_view name) { return name.starts_with("optimizer/"); };
  EXPECT_EQ(StatusCode::kUsage,
            DiffTraces(a, b, {.only = optimizer, .rounding = true}).status().code());
  EXPECT_GT(DiffTraces(a, b, {.rounding = true}).value().unjudged(), 0);
  EXPECT_EQ(StatusCode::kUsage, DiffTraces(a, b, {.truth = &a}).status().code());  // of FP32
}

TEST(TraceDiff, TheTruthTellsWhichSideIsWrong) {
  const TempDir dir;
  const TraceFile clean = TraceTo(dir / "a", Tiny());
  const TraceFile truth = TraceTo(dir / "t", Tiny({"precision.preset=fp64"}));
  for (const char* name : {"mb0/layer1/attention", "mb0/layer3/q_rope.grad", "mb0/final_norm"}) {
    Scaled scaled(name);
    const TraceFile faulty = TraceTo(dir / "b", Tiny(), &scaled);
    const TraceDifference d = DiffTraces(clean, faulty, {.truth = &truth}).value();
    ASSERT_NE(nullptr, d.FirstBeyond()) << name;
    EXPECT_EQ(name, d.FirstBeyond()->name);
    EXPECT_EQ("B", d.FirstBeyond()->beyond);
    EXPECT_EQ("A", DiffTraces(faulty, clean, {.truth = &truth}).value().FirstBeyond()->beyond);
  }
}

TEST(TraceDiff, NothingInCommonIsAnError) {
  const TempDir dir;
  const TraceFile a = TraceTo(dir / "a", Tiny());
  const TraceFile digests = TraceTo(dir / "b", Tiny(), nullptr, false);
  EXPECT_EQ(StatusCode::kUnsupported,
            DiffTraces(a, digests, {.rounding = true}).status().code());
  const auto none = [](std::string_view) { return false; };
  EXPECT_EQ(StatusCode::kUsage, DiffTraces(a, a, {.only = none}).status().code());
}

}  // namespace
}  // namespace retrace
