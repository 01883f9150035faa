// The plan against what updates and recordings really allocate (counted by this program's operator
// new) and store, the published size of the largest recipe, and plans on GPUs.
#include "replay/recipe_plan.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/exchange.h"
#include "replay/gpu_plan.h"
#include "replay/job.h"
#include "replay/local_ranks.h"
#include "replay/random_batches.h"
#include "replay/recorder.h"
#include "replay/retention.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "tests/places.h"
#include "tests/small_run.h"
#include "tests/test_data.h"

namespace {
std::atomic<int64_t> g_live_bytes{0};
}

void* operator new(size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) std::abort();
  g_live_bytes += static_cast<int64_t>(malloc_usable_size(memory));
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) g_live_bytes -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace retrace {
namespace {

constexpr char kRecipe[] = R"(
name = "plan"
steps = 3
[model]
vocab_size = 768
hidden_size = 96
intermediate_size = 192
layers = 3
query_heads = 8
kv_heads = 4
global_kv_heads = 2
head_dim = 24
global_head_dim = 32
full_attention_every = 3
sliding_window = 16
[data]
path = "in memory"
sequence_length = 96
micro_batch_size = 2
micro_batches = 6
[topology]
virtual_shards = 4
lanes = 2
)";

Recipe Make(const std::vector<std::string>& overrides) {
  const Result<Recipe> recipe = ParseRecipe(kRecipe, "plan.toml", overrides);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return *recipe;
}

// What a job of one rank holds after two updates.
int64_t HeldBytes(const Recipe& recipe) {
  const auto batches =
      std::make_shared<RandomBatches>(recipe.model.vocab_size, recipe.data.sequence_length, 1);
  SoloComm comm;
  const int64_t before = g_live_bytes;
  const Result<std::unique_ptr<Job>> job =
      Job::Make(recipe, comm, {.tp = 1, .dp = 1, .threads = 1}, batches);
  EXPECT_TRUE(job.ok());
  EXPECT_TRUE((*job)->StartFresh().ok());
  for (int i = 0; i < 2; ++i) EXPECT_TRUE((*job)->Advance().ok());
  return g_live_bytes - before;
}

class PlanOfVariants : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(PlanOfVariants, IsWithinTwoPercentOfWhatAnUpdateAllocates) {
  const Recipe recipe = Make(GetParam());
  const Result<RecipePlan> plan = PlanRecipe(recipe, 1, 1);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  const RankPlan& rank = plan->ranks.at(0);
  const int64_t planned = rank.bytes() - rank.staging_bytes;
  HeldBytes(recipe);  // what a program allocates once, it has now
  const int64_t held = HeldBytes(recipe);
  EXPECT_NEAR(1.0, static_cast<double>(planned) / static_cast<double>(held), 0.02)
      << "planned " << planned << ", held " << held;
}

INSTANTIATE_TEST_SUITE_P(
    All, PlanOfVariants,
    testing::Values(std::vector<std::string>{}, std::vector<std::string>{"precision.preset=bf16"},
                    std::vector<std::string>{"precision.preset=fp64"},
                    std::vector<std::string>{"model.attention=blockwise"},
                    std::vector<std::string>{"execution.recompute_activations=true"},
                    std::vector<std::string>{"data.micro_batches=2", "model.post_norm=false",
                                             "model.final_logit_softcapping=0"}));

// Of each rank of a job of `tp`, what it holds after it recorded its first state several times in a
// row, so that one copy waits for another (the second staging buffer), and two updates.
std::vector<int64_t> HeldByRecordingRanks(const Recipe& recipe, int tp, const std::string& dir) {
  std::vector<int64_t> held(tp, 0);
  const auto batches =
      std::make_shared<RandomBatches>(recipe.model.vocab_size, recipe.data.sequence_length, 1);
  const Status status = RunLocalRanks(tp, {}, [&](Comm& comm) -> Status {
    const int64_t before = g_live_bytes;
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job,
                        Job::Make(recipe, comm, {.tp = tp, .dp = 1, .threads = 1}, batches));
    RT_RETURN_IF_ERROR(job->StartFresh());
    std::unique_ptr<RunWriter> writer;
    if (job->is_rank0()) {
      RunPlan plan;
      plan.recipe_text = PrintRecipe(recipe);
      RT_ASSIGN_OR_RETURN(writer, RunWriter::Create(dir, job->layout(), plan));
    }
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                        Recorder::Make(*job, writer.get(), dir));
    RT_ASSIGN_OR_RETURN(const Digest first, job->StateDigestNow());
    RT_RETURN_IF_ERROR(recorder->RecordFirst(first, true));
    for (int i = 0; i < 6; ++i) RT_RETURN_IF_ERROR(recorder->KeepPresent(first, "{}"));
    for (const Keep keep : {Keep::kKeyframe, Keep::kJournal}) {
      RT_ASSIGN_OR_RETURN(const Job::Step step, job->Advance());
      RT_RETURN_IF_ERROR(recorder->Record(step, 0, keep));
    }
    RT_RETURN_IF_ERROR(recorder->Finish());
    const int64_t mine = g_live_bytes - before;
    return comm.AllGather(comm.World(), &mine, held.data(), sizeof mine);
  });
  EXPECT_TRUE(status.ok()) << status.message();
  return held;
}

TEST(PlanOfARecording, IsWithinTenPercentOfWhatEachRankHolds) {
  for (const int tp : {1, 2, 4}) {
    const TempDir temp;
    const Recipe recipe = Make({});
    const RecipePlan plan = PlanRecipe(recipe, tp, 1).value();
    const std::vector<int64_t> held = HeldByRecordingRanks(recipe, tp, temp / "run");
    for (int rank = 0; rank < tp; ++rank) {
      EXPECT_NEAR(1.0,
                  static_cast<double>(plan.ranks[rank].bytes()) / static_cast<double>(held[rank]),
                  0.10)
          << "rank " << rank << " of " << tp << ": planned " << plan.ranks[rank].bytes()
          << ", held " << held[rank];
    }
  }
}

// Steps with files of a recorded run, and the bytes of their slabs.
struct Stored {
  int64_t keyframes = 0, journals = 0, bytes = 0;
};

Stored StoredBy(const std::string& dir, const Layout& layout) {
  const RunReader run = RunReader::Open(dir).value();
  Stored stored;
  for (const PositionEntry& entry : run.history().positions) {
    stored.keyframes += entry.HasKeyframe();
    stored.journals += entry.HasJournal() && !entry.HasKeyframe();
    if (!entry.master) continue;
    const StepIndex index = run.ReadIndex(entry.counters.position).value();
    for (const RankFileInfo& file : index.files) {
      for (const SlabInfo& slab : file.slabs) stored.bytes += 4 * SlabNumel(layout, slab.id);
    }
  }
  return stored;
}

TEST(PlanOfARecording, HasTheStepsAndBytesThatARunStores) {
  const std::vector<std::vector<std::string>> policies = {
      {"store.window=[0,10]"},
      {"store.window=[3,7]", "store.keyframe_every=2"},
      {"store.window=[]"},
      {"store.window=[2,40]", "store.every=3"},
      {"store.window=[]", "store.every=4", "steps=11", "schedule.total_steps=11"}};
  for (const std::vector<std::string>& policy : policies) {
    const TempDir temp;
    std::vector<std::string> overrides = {"data.path=" + TestData("dataset/tiny")};
    overrides.insert(overrides.end(), policy.begin(), policy.end());
    const Recipe recipe = LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides).value();
    SoloComm comm;
    TrainOptions options;
    options.run_dir = temp / "run";
    ASSERT_TRUE(Train(recipe, comm, {.tp = 1, .dp = 1, .threads = 1}, options).ok());
    const RecipePlan plan = PlanRecipe(recipe, 1, 1).value();
    const Stored stored = StoredBy(
        options.run_dir, Layout::Make(recipe.model, recipe.topology.virtual_shards).value());
    EXPECT_EQ(stored.keyframes, plan.keyframes) << policy[0];
    EXPECT_EQ(stored.journals, plan.journals) << policy[0];
    EXPECT_EQ(static_cast<double>(stored.bytes), plan.stored_bytes()) << policy[0];
  }
}

// By formula what the recorder decides position by position.
TEST(RecipePlan, CountsWhatIsKeptAsTheRecorderDecides) {
  for (const int64_t steps : {1, 2, 29, 30}) {
    for (const int64_t every : {0, 1, 3, 4, 10}) {
      for (const int64_t keyframe_every : {1, 2, 6, 16}) {
        for (const auto& [first, last] : std::vector<std::pair<int64_t, int64_t>>{
                 {0, -1}, {0, 0}, {1, 9}, {5, 100}, {12, 12}, {0, 30}, {200, 300}}) {
          for (const int64_t ring : {0, 5}) {
            Recipe recipe = Make({});
            recipe.steps = steps;
            recipe.store = {.window_first = first, .window_last = last, .every = every,
                            .keep_last = ring, .keyframe_every = keyframe_every, .flight = {}};
            int64_t keyframes = 0, journals = 0;
            for (int64_t k = 0; k <= steps; ++k) {
              Keep keep = KeepOf(recipe.store, k, 0);
              if (k == steps && keep == Keep::kNothing) keep = Keep::kKeyframe;
              keyframes += keep == Keep::kKeyframe;
              journals += keep == Keep::kJournal;
            }
            const RecipePlan plan = PlanRecipe(recipe, 1, 1).value();
            const std::string what = std::to_string(steps) + " steps, every " +
                                     std::to_string(every) + ", keyframes " +
                                     std::to_string(keyframe_every) + ", window " +
                                     std::to_string(first) + ".." + std::to_string(last) +
                                     ", ring " + std::to_string(ring);
            ASSERT_EQ(keyframes, plan.keyframes) << what;
            ASSERT_EQ(journals, plan.journals) << what;
          }
        }
      }
    }
  }
  Recipe endless = Make({});
  endless.steps = int64_t{1} << 40;
  endless.store = {.window_first = 5, .window_last = int64_t{1} << 40, .every = 1000003,
                   .keyframe_every = 999983, .flight = {}};
  const RecipePlan plan = PlanRecipe(endless, 1, 1).value();
  // Of 2^40 + 1 positions: 1..4 are kept nowhere.
  EXPECT_EQ((int64_t{1} << 40) + 1 - 4, plan.keyframes + plan.journals);
  EXPECT_EQ((int64_t{1} << 40) / 1000003 + 1 + ((int64_t{1} << 40) - 5) / 999983 + 1 - 1,
            plan.keyframes);  // one position is of both kinds
}

TEST(RecipePlan, TheMotivatingReportsModelHasItsParameters) {
  const Recipe recipe =
      LoadRecipe(SourceDir() + "/examples/gemma4_31b.toml").value();
  const int64_t before = g_live_bytes;
  const RecipePlan plan = PlanRecipe(recipe, 4, 1).value();
  EXPECT_LT(g_live_bytes - before, 1 << 20);  // nothing of the model's size
  EXPECT_EQ(30697345280, plan.parameters);
  EXPECT_EQ(12 * 30697345280, plan.keyframe_bytes);
  EXPECT_EQ(4194304, plan.tokens);
  ASSERT_EQ(4u, plan.ranks.size());
  int64_t owned = 0;
  for (const RankPlan& rank : plan.ranks) owned += rank.parameters;
  EXPECT_EQ(plan.parameters, owned);
  EXPECT_EQ(4 * 30697345280, plan.journal_bytes);
  EXPECT_EQ(4, plan.keyframes);  // 0; 10 and 26 of the window 10 .. 30; 100
  EXPECT_EQ(19, plan.journals);
}

TEST(RecipePlan, ARankCountThatDoesNotDivideIsAUsageError) {
  const Recipe recipe = Make({});
  EXPECT_EQ(StatusCode::kUsage, PlanRecipe(recipe, 3, 1).status().code());
  EXPECT_EQ(StatusCode::kUsage, PlanRecipe(recipe, 1, 4).status().code());
}

// ------------------------------------------------------------------------------------------- GPUs

Recipe Report(const std::vector<std::string>& overrides = {}) {
  return LoadRecipe(SourceDir() + "/examples/gemma4_31b.toml", overrides).value();
}

TEST(GpuPlan, FourShardsOfTheReportsModelFitNoNumberOfGpusAndSixteenDo) {
  const GpuPlan plan = PlanOnGpus(Report(), {.tp = 4, .dp = 4}).value();
  EXPECT_FALSE(plan.Fits());
  EXPECT_GT(plan.gpu_bytes, 92'000'000'000);  // its part of the state alone
  ASSERT_FALSE(plan.fits.empty());
  for (const GpuFit& fit : plan.fits) {
    EXPECT_FALSE(fit.same_bits);
    EXPECT_GT(fit.virtual_shards, 4);
    // What it advises is what it plans.
    const Recipe advised =
        Report({"topology.virtual_shards=" + std::to_string(fit.virtual_shards),
                "topology.lanes=" + std::to_string(fit.lanes)});
    const GpuPlan again = PlanOnGpus(advised, {.tp = fit.tp, .dp = fit.dp}).value();
    EXPECT_TRUE(again.Fits());
    EXPECT_EQ(fit.bytes, again.gpu_bytes);
  }
}

TEST(GpuPlan, AdvisesTheSameBitsWhereMoreGpusCarryThem) {
  const Recipe recipe = Make({});
  const GpuPlan roomy = PlanOnGpus(recipe, {.tp = 1, .dp = 1}).value();
  ASSERT_TRUE(roomy.Fits());
  const GpuPlan tight =
      PlanOnGpus(recipe, {.tp = 1, .dp = 1, .gpu_memory = roomy.gpu_bytes - 1, .reserve = 0}).value();
  EXPECT_FALSE(tight.Fits());
  ASSERT_EQ(1u, tight.fits.size());
  EXPECT_TRUE(tight.fits[0].same_bits);
  EXPECT_LT(tight.fits[0].bytes, roomy.gpu_bytes);
  const GpuPlan hopeless =
      PlanOnGpus(recipe, {.tp = 1, .dp = 1, .gpu_memory = 1000, .reserve = 0}).value();
  EXPECT_TRUE(hopeless.fits.empty());
}

TEST(GpuPlan, NodesThatWriteHoldTheStateOnceBetweenThem) {
  const Recipe recipe = Report({"topology.virtual_shards=16", "topology.lanes=2"});
  const GpuPlan one = PlanOnGpus(recipe, {.tp = 16, .dp = 2, .gpus_per_node = 32}).value();
  EXPECT_EQ(1, one.nodes);
  EXPECT_EQ(one.recipe.keyframe_bytes, one.keyframe_node_bytes);
  EXPECT_EQ(one.recipe.journal_bytes, one.journal_node_bytes);
  const GpuPlan four = PlanOnGpus(recipe, {.tp = 16, .dp = 2, .gpus_per_node = 8}).value();
  EXPECT_EQ(4, four.nodes);
  EXPECT_GE(2 * four.journal_node_bytes, four.recipe.journal_bytes);
  EXPECT_LT(four.journal_node_bytes, four.recipe.journal_bytes * 6 / 10);
}

TEST(GpuPlan, ThePeaksBoundWhatTheyAreThePeaksOf) {
  const Recipe recipe = Report({"topology.virtual_shards=16"});
  const auto with = [&](const std::function<void(GpuPeaks*)>& change) {
    GpuPlanOptions options = {.tp = 16, .dp = 1};
    change(&options.peaks);
    return PlanOnGpus(recipe, options).value();
  };
  const GpuPlan base = with([](GpuPeaks*) {});
  const LevelCost &portable = base.levels[0], &native = base.levels[1];
  EXPECT_EQ("portable", portable.level);
  EXPECT_DOUBLE_EQ(base.recipe.flops / 16 / 66.9e12, portable.arithmetic_s);
  EXPECT_DOUBLE_EQ(base.recipe.flops / 16 / 989.4e12, native.arithmetic_s);
  EXPECT_DOUBLE_EQ(2 * portable.arithmetic_s,
                   with([](GpuPeaks* p) { p->fp32 /= 2; }).levels[0].arithmetic_s);
  EXPECT_DOUBLE_EQ(portable.memory_s / 2,
                   with([](GpuPeaks* p) { p->memory *= 2; }).levels[0].memory_s);
  EXPECT_DOUBLE_EQ(2 * portable.exchange_s,  // tp 16 spans two nodes
                   with([](GpuPeaks* p) { p->network /= 2; }).levels[0].exchange_s);
  EXPECT_DOUBLE_EQ(portable.exchange_s,  // which is the slower part
                   with([](GpuPeaks* p) { p->link *= 2; }).levels[0].exchange_s);
  EXPECT_LT(portable.stall_s, with([](GpuPeaks* p) { p->storage = 1e6; }).levels[0].stall_s);
  EXPECT_LT(base.walk_s, with([](GpuPeaks* p) { p->encode /= 1000; }).walk_s);
}

}  // namespace
}  // namespace retrace
