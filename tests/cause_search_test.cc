// Planted causes: the search names what was planted, and no more.
#include "surgery/cause_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "surgery/delta_debug.h"
#include "tests/spiking_run.h"

namespace retrace {
namespace {

// ---- Delta debugging ----

struct Asked {
  SmallestPart found;
  int questions = 0;
};

Asked Find(int size, const std::set<int>& guilty, int most = 1 << 20) {
  Asked asked;
  asked.found = FindSmallestPart(
                    size,
                    [&](const std::vector<int>& part) -> Result<std::optional<bool>> {
                      if (asked.questions == most) return std::optional<bool>();
                      ++asked.questions;
                      EXPECT_TRUE(std::is_sorted(part.begin(), part.end()));
                      return std::optional<bool>(std::includes(part.begin(), part.end(),
                                                               guilty.begin(), guilty.end()));
                    },
                    nullptr)
                    .value();
  return asked;
}

TEST(DeltaDebug, ItLeavesExactlyWhatIsNeeded) {
  std::mt19937 random(7);
  for (int repetition = 0; repetition < 300; ++repetition) {
    const int size = 1 + static_cast<int>(random() % 60);
    std::set<int> guilty;
    for (int i = 1 + static_cast<int>(random() % 4); i > 0; --i) {
      guilty.insert(static_cast<int>(random() % size));
    }
    const Asked asked = Find(size, guilty);
    EXPECT_TRUE(asked.found.complete);
    EXPECT_EQ(guilty, std::set<int>(asked.found.members.begin(), asked.found.members.end()));
  }
}

TEST(DeltaDebug, OneOfManyTakesLogarithmicallyManyQuestions) {
  for (int one = 0; one < 512; one += 37) EXPECT_LE(Find(512, {one}).questions, 2 * 9 + 1);
}

TEST(DeltaDebug, WhereItEndsEarlyTheBestSoFarIsTold) {
  const Asked asked = Find(64, {40}, 3);
  EXPECT_FALSE(asked.found.complete);
  EXPECT_LT(asked.found.members.size(), 64u);
  EXPECT_TRUE(std::count(asked.found.members.begin(), asked.found.members.end(), 40));
}

// ---- Searches ----

constexpr char kNorm[] = "model.norm.weight";

class CauseSearches : public SpikingRuns {
 protected:
  // Changes everything a little, and something that makes it spike much.
  static std::vector<std::string> Decoys(const std::vector<std::string>& planted) {
    std::vector<std::string> all = {"perturb:sigma=0.0001,seed=77@4",
                                    "scale-moments:m=1.01,v=1.02@4"};
    all.insert(all.end(), planted.begin(), planted.end());
    return all;
  }
  PreventionOptions Options(const std::string& predicate) const {
    return OptionsFrom(4, predicate);
  }
  struct Searched {
    Cause cause;
    int64_t lived = 0;
  };
  Searched Search(const std::string& run_name, const PreventionOptions& options,
                  CauseOptions more = {}) {
    const RunReader run = RunReader::Open(*runs_ / run_name).value();
    const auto trials = PreventionTrials::Make(run, options).value();
    more.at = 4;
    more.spike = trials->RecordedSpike().value_or(0);
    const auto search = CauseSearch::Make(run, *trials, more);
    EXPECT_TRUE(search.ok()) << search.status().message();
    const Result<Cause> cause = (*search)->Run(nullptr);
    EXPECT_TRUE(cause.ok()) << cause.status().message();
    return {*cause, trials->updates_lived()};
  }
  CauseOptions Healthy() const {
    CauseOptions options;
    options.healthy = *runs_ / "calm";
    return options;
  }
  static std::vector<std::string> Names(const Cause& cause) {
    std::vector<std::string> names;
    for (const CauseMember& member : cause.members) names.push_back(member.Name());
    return names;
  }
};

using Strings = std::vector<std::string>;

TEST_F(CauseSearches, AMomentOfOneTensorIsNamedAmongThingsThatAllDiffer) {
  MakeRun("moment", 4, Decoys({"scale-moments:m=1000,only=" + std::string(kNorm) + "@4"}));
  const Searched found = Search("moment", Options("jump > 1"), Healthy());
  EXPECT_GT(found.cause.candidates, 50) << "the decoys are candidates";
  EXPECT_EQ(Strings{"m of " + std::string(kNorm)}, Names(found.cause));
  EXPECT_TRUE(found.cause.complete);
  EXPECT_TRUE(found.cause.confirmed);
  ASSERT_EQ(1u, found.cause.spared.size());
  EXPECT_EQ(Prevents::kNo, found.cause.spared[0].answer);
  EXPECT_EQ(0, found.cause.dropped);
}

TEST_F(CauseSearches, TheParametersOfOneBlockAreNamed) {
  MakeRun("parameters", 4, Decoys({"scale:300,only=" + std::string(kNorm) + "@4"}));
  const Searched found = Search("parameters", Options("peak > 8"), Healthy());
  EXPECT_EQ(Strings{"w of " + std::string(kNorm)}, Names(found.cause));
  EXPECT_TRUE(found.cause.confirmed);
}

TEST_F(CauseSearches, TwoCausesAreBothNeeded) {
  MakeRun("both", 4, Decoys({"scale-moments:m=1000,only=" + std::string(kNorm) + "@4",
                             "scale:300,only=" + std::string(kNorm) + "@4"}));
  const Searched found = Search("both", Options("peak > 8"), Healthy());
  EXPECT_EQ((Strings{"w of " + std::string(kNorm), "m of " + std::string(kNorm)}),
            Names(found.cause));
  EXPECT_TRUE(found.cause.confirmed);
  EXPECT_EQ(2u, found.cause.spared.size());
}

TEST_F(CauseSearches, WithoutAHealthyRunTheResetOfThePlantedMomentIsFound) {
  MakeRun("alone", 4, Decoys({"scale-moments:m=1000,only=" + std::string(kNorm) + "@4"}));
  CauseOptions options;
  options.parts = {false, true, false, false};
  const Searched found = Search("alone", Options("jump > 1"), options);
  EXPECT_EQ(Strings{"m of " + std::string(kNorm)}, Names(found.cause));
  EXPECT_TRUE(found.cause.confirmed);
}

TEST_F(CauseSearches, WhatLiesInTheRecipeIsNotAmongThem) {
  MakeRun("recipe", 4, Decoys({"lr:scale=300@4"}));
  const Searched found = Search("recipe", Options("jump > 1"), Healthy());
  EXPECT_TRUE(found.cause.complete);
  EXPECT_FALSE(found.cause.prevented);
  EXPECT_TRUE(found.cause.members.empty());
}

TEST_F(CauseSearches, AnEndedSearchGoesOnWhereItWas) {
  MakeRun("ended", 4, Decoys({"scale-moments:m=1000,only=" + std::string(kNorm) + "@4"}));
  PreventionOptions options = Options("jump > 1");
  const Searched whole = Search("ended", options, Healthy());
  options.out = out_ / "again";
  options.budget = whole.lived / 2;
  const Searched half = Search("ended", options, Healthy());
  EXPECT_FALSE(half.cause.complete);
  EXPECT_TRUE(half.cause.prevented);
  EXPECT_FALSE(half.cause.members.empty()) << "the best so far";
  options.budget = 0;
  const Searched rest = Search("ended", options, Healthy());
  EXPECT_EQ(whole.lived, half.lived + rest.lived) << "nothing is lived twice";
  EXPECT_EQ(Names(whole.cause), Names(rest.cause));
}

TEST_F(CauseSearches, DataBehindTheSamplesPlannedIsLeftOut) {
  MakeRun("data", 4, Decoys({"scale-moments:m=1000,only=" + std::string(kNorm) + "@4"}));
  CauseOptions options;
  options.parts = {false, true, true, true};
  const Searched found = Search("data", Options("jump > 1"), options);
  EXPECT_NE("", found.cause.left_out) << "replicas go to the recipe's last update";
  EXPECT_EQ(Strings{"m of " + std::string(kNorm)}, Names(found.cause));
  PreventionOptions shorter = Options("jump > 1");
  shorter.range.last = kUpdates - 1;
  shorter.out = out_ / "shorter";
  const Searched all = Search("data", shorter, options);
  EXPECT_EQ("", all.cause.left_out);
  EXPECT_EQ(found.cause.candidates + 1, all.cause.candidates);
  EXPECT_EQ(Strings{"m of " + std::string(kNorm)}, Names(all.cause));
}

TEST_F(CauseSearches, EqualRunsHaveNoCandidates) {
  const RunReader run = RunReader::Open(*runs_ / "calm").value();
  const auto trials = PreventionTrials::Make(run, Options("jump > 0.01")).value();
  CauseOptions options = Healthy();
  options.at = 4;
  const auto search = CauseSearch::Make(run, *trials, options);
  ASSERT_FALSE(search.ok());
  EXPECT_NE(std::string::npos, search.status().message().find("are equal"));
}

}  // namespace
}  // namespace retrace
