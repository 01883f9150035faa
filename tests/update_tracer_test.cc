// The list of an update's ops: complete, the same on any ranks, and with the bits of the update.
#include "replay/update_tracer.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "replay/local_ranks.h"
#include "tests/faulty_run.h"
#include "tests/places.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

Recipe Tiny(std::vector<std::string> more = {}) {
  more.push_back("data.path=" + TestData("dataset/tiny"));
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", more).value();
}

struct Traced {
  std::vector<UpdateTracer::TracedOp> ops;
  std::map<std::string, std::string> elements;
  Digest digest;
};

// The second update of a recipe. `fault`: seen by one rank.
Traced TraceSecond(const Recipe& recipe, int tp, int dp, TraceOptions options = {},
                   int faulty_rank = -1) {
  Traced traced;
  const Status done = RunLocalRanks(tp * dp, {}, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job,
                        Job::Make(recipe, comm, {.tp = tp, .dp = dp, .threads = 1}));
    RT_RETURN_IF_ERROR(job->StartFresh());
    RT_RETURN_IF_ERROR(job->Advance().status());
    TraceOptions mine = options;
    if (faulty_rank >= 0 && comm.rank() != faulty_rank) mine.before = nullptr;
    UpdateTracer tracer(*job, mine);
    const Result<Job::Step> step = tracer.Advance(nullptr);
    if (step.ok()) traced.digest = step->digest;
    else if (faulty_rank < 0) return step.status();
    traced.ops = tracer.ops();
    for (const UpdateTracer::TracedOp& op : traced.ops) {
      if (!op.kept) continue;
      RT_ASSIGN_OR_RETURN(traced.elements[op.name], tracer.Elements(op));
    }
    return {};
  });
  EXPECT_TRUE(done.ok()) << done.message();
  return traced;
}

std::vector<std::string> Lines(const Traced& traced) {
  std::vector<std::string> lines;
  for (const UpdateTracer::TracedOp& op : traced.ops) {
    lines.push_back(op.name + " " + op.digest->Hex() + " " + std::to_string(op.rows) + " " +
                    std::to_string(op.cols) + " " + std::to_string(op.l2));
  }
  return lines;
}

TEST(UpdateTracer, TheListIsTheSameOnAnyRanks) {
  const Recipe recipe = Tiny();
  const TraceOptions options{.evaluation = true};
  const Traced one = TraceSecond(recipe, 1, 1, options);
  EXPECT_GT(one.ops.size(), 3000u);
  for (const auto& [tp, dp] : {std::pair(2, 1), {1, 2}, {2, 2}, {8, 1}}) {
    const Traced more = TraceSecond(recipe, tp, dp, options);
    EXPECT_EQ(one.digest, more.digest);
    EXPECT_EQ(Lines(one), Lines(more)) << tp << " x " << dp;
  }
}

TEST(UpdateTracer, ATracedUpdateHasTheBitsOfOneThatIsNot) {
  const Recipe recipe = Tiny();
  SoloComm comm;
  const auto job = Job::Make(recipe, comm, {.tp = 1, .dp = 1, .threads = 1}).value();
  ASSERT_TRUE(job->StartFresh().ok() && job->Advance().ok());
  EXPECT_EQ(job->Advance()->digest, TraceSecond(recipe, 1, 1).digest);
}

TEST(UpdateTracer, EveryOpStandsThereOnceInOrderOfExecution) {
  const Recipe recipe = Tiny();
  const Traced traced = TraceSecond(recipe, 1, 1, {.evaluation = true});
  std::map<std::string, size_t> place;
  for (size_t i = 0; i < traced.ops.size(); ++i) {
    EXPECT_TRUE(place.emplace(traced.ops[i].name, i).second) << traced.ops[i].name;
  }
  const std::string w = "model.layers.3.mlp.up_proj.weight";
  const std::vector<std::string> order = {
      "state/" + w + "#p/shard0", "state/" + w + "#m/shard7", "evaluation/embedding",
      "evaluation/loss", "mb0/ids", "mb0/labels", "mb0/embedding", "mb0/layer0/input_norm",
      "mb0/layer0/q_proj/shard0", "mb0/layer0/q_proj/shard7", "mb0/layer0/k_rope/shard3",
      "mb0/layer3/output", "mb0/final_norm", "mb0/logits/shard7", "mb0/loss",
      "mb0/logits.grad/shard0", "mb0/final_norm.grad", "mb0/layer3/output.grad",
      "mb0/layer0/q_proj.grad/shard0", "mb0/embedding.grad", "mb0/" + w + ".grad/shard2",
      "mb2/embedding", "mb1/embedding", "mb3/" + w + ".grad/shard2",  // lanes 0, 2 | 1, 3
      "optimizer/" + w + "#g/shard0", "optimizer/norms", "optimizer/rows",
      "optimizer/" + w + "#p/shard0", "optimizer/" + w + "#v/shard7"};
  for (size_t i = 0; i < order.size(); ++i) {
    ASSERT_TRUE(place.contains(order[i])) << order[i];
    EXPECT_TRUE(i == 0 || place[order[i - 1]] < place[order[i]]) << order[i];
  }
  // Of a KV head that four shards share, the gradient is its owner's.
  EXPECT_TRUE(place.contains("mb0/layer0/k_rope.grad/shard4"));
  EXPECT_FALSE(place.contains("mb0/layer0/k_rope.grad/shard5"));
}

TEST(UpdateTracer, SeveralPassesOverTheEvaluationBatchAreToldApart) {
  const Traced traced = TraceSecond(Tiny({"data.evaluation_samples=5"}), 1, 1, {.evaluation = true});
  std::set<std::string> names;
  for (const auto& op : traced.ops) EXPECT_TRUE(names.insert(op.name).second) << op.name;
  EXPECT_TRUE(names.contains("evaluation0/loss") && names.contains("evaluation2/loss"));
}

TEST(UpdateTracer, ElementsAreThoseOfTheDigestWhereverTheyWereComputed) {
  const Recipe recipe = Tiny();
  for (const bool spilled : {false, true}) {
    TraceOptions options;
    options.tensors = [](std::string_view name) {
      return name.starts_with("mb1/layer2/") || name.starts_with("optimizer/");
    };
    if (spilled) options.spill_dir = testing::TempDir();
    const Traced traced = TraceSecond(recipe, 2, 2, options);
    EXPECT_GT(traced.elements.size(), 400u);
    for (const auto& op : traced.ops) {
      if (!op.kept) continue;
      const std::string& bytes = traced.elements.at(op.name);
      ASSERT_EQ(op.size_bytes(), bytes.size()) << op.name;
      EXPECT_EQ(*op.digest, TensorDigest(bytes.data(), bytes.size())) << op.name;
    }
  }
}

TEST(UpdateTracer, ARankThatComputesOtherBitsThanItsPeersIsNamed) {
  BitFlip flip("mb0/layer2/o_proj", 5, 20);
  const Traced traced = TraceSecond(Tiny(), 2, 1, {.before = &flip}, 1);
  size_t at = 0;
  while (at < traced.ops.size() && traced.ops[at].name.find('@') == std::string::npos) ++at;
  ASSERT_LT(at, traced.ops.size());
  EXPECT_EQ("mb0/layer2/o_proj@rank1", traced.ops[at].name);
  EXPECT_EQ("mb0/layer2/o_proj", traced.ops[at - 1].name);
}

TEST(UpdateTracer, ADirectoryThatIsNotThereIsAnErrorOfEveryRank) {
  const Status done = RunLocalRanks(2, {}, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const auto job, Job::Make(Tiny(), comm, {.tp = 2, .dp = 1, .threads = 1}));
    RT_RETURN_IF_ERROR(job->StartFresh());
    TraceOptions options;
    options.tensors = [](std::string_view) { return true; };
    if (comm.rank() == 1) options.spill_dir = "/nowhere/at/all";
    UpdateTracer tracer(*job, options);
    return tracer.Advance(nullptr).status();
  });
  EXPECT_EQ(StatusCode::kUsage, done.code());
  EXPECT_NE(std::string::npos, done.message().find("/nowhere/at/all")) << done.message();
}

}  // namespace
}  // namespace retrace
