#include "core/schedule.h"
#include "tests/places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace retrace {
namespace {

ScheduleRecipe Report() {  // the motivating report's; also ScheduleRecipe's defaults
  return {.initial = 0, .peak = 3e-4, .minimum = 3e-5, .warmup_steps = 40, .total_steps = 100};
}

TEST(Schedule, EqualsMegatronsSchedulerTo1e15) {
  std::ifstream file(SourceDir() + "/tests/data/lr_schedule.json");
  const nlohmann::json data = nlohmann::json::parse(file);
  ASSERT_EQ(103u, data["k"].size());
  for (size_t i = 0; i < data["k"].size(); ++i) {
    const int64_t k = data["k"][i];
    const double expected = data["lr"][i];
    const double got = LearningRate(Report(), k);
    EXPECT_LE(std::abs(got - expected), 1e-15 * std::abs(expected)) << k;
    EXPECT_TRUE(k > 40 || expected == got) << "no cosine is involved at " << k;
  }
}

TEST(Schedule, IndexingDecidesWhetherTheFirstUpdateAppliesTheInitialRate) {
  ScheduleRecipe schedule = Report();
  schedule.indexing = LrIndexing::kStepMinusOne;
  EXPECT_EQ(0.0, AppliedLearningRate(schedule, 0));
  EXPECT_EQ(1.125e-4, AppliedLearningRate(schedule, 15));  // update 16 of the report
  schedule.indexing = LrIndexing::kStep;
  EXPECT_EQ(LearningRate(schedule, 1), AppliedLearningRate(schedule, 0));
  EXPECT_EQ(LearningRate(schedule, 16), AppliedLearningRate(schedule, 15));
}

TEST(Schedule, HoldAppliesItsUpdatesRateToAllThatFollow) {
  for (const LrIndexing indexing : {LrIndexing::kStep, LrIndexing::kStepMinusOne}) {
    ScheduleRecipe free = Report(), held = Report();
    free.indexing = held.indexing = indexing;
    held.hold = 16;
    for (int64_t update = 1; update <= 120; ++update) {
      EXPECT_EQ(AppliedLearningRate(free, std::min<int64_t>(update, 16) - 1),
                AppliedLearningRate(held, update - 1))
          << update;
    }
  }
}

TEST(Schedule, WithoutWarmUpStartsAtThePeak) {
  ScheduleRecipe schedule = Report();
  schedule.warmup_steps = 0;
  EXPECT_EQ(3e-4, LearningRate(schedule, 0));
  EXPECT_LT(LearningRate(schedule, 1), 3e-4);
}

TEST(Schedule, ConstantStaysAtThePeakAfterWarmUp) {
  ScheduleRecipe schedule = Report();
  schedule.shape = LrShape::kConstant;
  EXPECT_EQ(LearningRate(Report(), 20), LearningRate(schedule, 20));
  for (int64_t k : {40, 41, 100, 101, 1 << 30}) EXPECT_EQ(3e-4, LearningRate(schedule, k)) << k;
}

TEST(Schedule, WarmUpStartsAtTheInitialRateAndCosineEndsAtTheMinimum) {
  ScheduleRecipe schedule = Report();
  schedule.initial = 1e-5;
  EXPECT_EQ(1e-5, LearningRate(schedule, 0));
  EXPECT_EQ(3e-4, LearningRate(schedule, 40));
  EXPECT_EQ(3e-5, LearningRate(schedule, 100));
  EXPECT_EQ(3e-5, LearningRate(schedule, int64_t{1} << 60));
}

}  // namespace
}  // namespace retrace
