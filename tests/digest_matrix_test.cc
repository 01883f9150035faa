// The project's central test: one recipe, one chain of digests, however the work is carried.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/job.h"
#include "replay/local_ranks.h"
#include "tests/places.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

struct Carrier {  // how the work is carried; none of it may change a bit
  int tp = 1, dp = 1, threads = 1;
  Isa isa = Isa::kScalar;
  bool recompute = false;
};

std::string Describe(const Carrier& c) {
  return "tp " + std::to_string(c.tp) + " dp " + std::to_string(c.dp) + " threads " +
         std::to_string(c.threads) + " isa " + IsaName(c.isa) +
         (c.recompute ? " recomputed" : " kept");
}

Recipe Tiny(std::vector<std::string> overrides) {
  overrides.push_back("data.path=" + TestData("dataset/tiny"));
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides).value();
}

Recipe Tiny(const std::string& precision, AttentionKind attention) {
  Recipe recipe = Tiny({"precision.preset=" + precision});
  recipe.model.attention = attention;
  return recipe;
}

constexpr int kUpdates = 4;

// Hex digests of RUN@0 .. RUN@kUpdates, and the records without timing.
std::vector<std::string> Chain(Recipe recipe, const Carrier& carrier) {
  recipe.execution.recompute_activations = carrier.recompute;
  std::vector<std::string> chain;
  const Status status = RunLocalRanks(carrier.tp * carrier.dp, {}, [&](Comm& comm) -> Status {
    const JobOptions options = {.tp = carrier.tp, .dp = carrier.dp, .threads = carrier.threads,
                                .isa = carrier.isa};
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(recipe, comm, options));
    RT_RETURN_IF_ERROR(job->StartFresh());
    RT_ASSIGN_OR_RETURN(const Digest first, job->StateDigestNow());
    chain.push_back(first.Hex());
    for (int i = 0; i < kUpdates; ++i) {
      RT_ASSIGN_OR_RETURN(const Job::Step step, job->Advance());
      chain.push_back(step.digest.Hex() + RecordJson(step.result.record));
    }
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.message();
  return chain;
}

// A covering set: every value of every way to carry occurs with every other at least once or twice.
// RETRACE_MATRIX=all runs the product.
std::vector<Carrier> Carriers() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (IsaSupported(isa)) isas.push_back(isa);
  }
  const bool all = std::getenv("RETRACE_MATRIX") != nullptr;
  std::vector<Carrier> carriers;
  int index = 0;
  for (int tp : {1, 2, 4, 8}) {
    for (int dp : {1, 2}) {
      for (int threads : {1, 2, 3}) {
        for (size_t i = 0; i < isas.size(); ++i) {
          for (bool recompute : {false, true}) {
            const bool chosen = (index++ * 7) % 12 == 0 || (tp == 8 && dp == 2 && threads == 1);
            if (all || chosen) carriers.push_back({tp, dp, threads, isas[i], recompute});
          }
        }
      }
    }
  }
  return carriers;
}

class DigestMatrix : public testing::TestWithParam<std::tuple<std::string, AttentionKind>> {};

TEST_P(DigestMatrix, OneChainHoweverTheWorkIsCarried) {
  const Recipe recipe = Tiny(std::get<0>(GetParam()), std::get<1>(GetParam()));
  const std::vector<std::string> expected = Chain(recipe, Carrier{});
  ASSERT_EQ(size_t{kUpdates + 1}, expected.size());
  for (const Carrier& carrier : Carriers()) {
    EXPECT_EQ(expected, Chain(recipe, carrier)) << Describe(carrier);
  }
}

// Switches whose sums cross shards, lanes or tensors.
TEST(DigestMatrixOfSwitches, OneChainHoweverTheWorkIsCarried) {
  for (const std::vector<std::string>& switches : std::vector<std::vector<std::string>>{
           {"model.z_loss=0.01", "optimizer.update_clip=0.5", "model.ignore_window=true"},
           {"model.z_loss=0.01", "precision.preset=bf16", "model.qk_norm_gradient=first-shard"},
           {"optimizer.update_clip=0.5", "optimizer.clip_scope=embedding-rows"}}) {
    const Recipe recipe = Tiny(switches);
    const std::vector<std::string> expected = Chain(recipe, Carrier{});
    EXPECT_NE(Chain(Tiny({}), Carrier{}).back(), expected.back());
    for (const Carrier& carrier : Carriers()) {
      if (carrier.threads == 3) continue;
      EXPECT_EQ(expected, Chain(recipe, carrier)) << switches[0] << ", " << Describe(carrier);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Policies, DigestMatrix,
    testing::Combine(testing::Values("fp32", "bf16", "fp64"),
                     testing::Values(AttentionKind::kMaterialised, AttentionKind::kBlockwise)),
    [](const auto& info) {
      return std::get<0>(info.param) +
             (std::get<1>(info.param) == AttentionKind::kMaterialised ? "_materialised"
                                                                      : "_blockwise");
    });

}  // namespace
}  // namespace retrace
