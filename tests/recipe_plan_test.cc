// The plan against what an update really allocates (counted by this program's operator new), and
// the published size of the largest recipe.
#include "replay/recipe_plan.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/job.h"
#include "replay/random_batches.h"
#include "replay/solo_comm.h"
#include "tests/places.h"

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
  EXPECT_EQ(2, plan.window_keyframes);  // positions 10 and 26 of 10 .. 30
  EXPECT_EQ(19, plan.window_journals);
}

TEST(RecipePlan, ARankCountThatDoesNotDivideIsAUsageError) {
  const Recipe recipe = Make({});
  EXPECT_EQ(StatusCode::kUsage, PlanRecipe(recipe, 3, 1).status().code());
  EXPECT_EQ(StatusCode::kUsage, PlanRecipe(recipe, 1, 4).status().code());
}

}  // namespace
}  // namespace retrace
