// The statistics of ensembles against enumeration, worked examples, and ensembles without an effect.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "surgery/statistics.h"

namespace retrace {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The midrank of values[i] by counting, without sorting.
double Midrank(const std::vector<double>& values, size_t i) {
  double rank = 0.5;
  for (double other : values) rank += other < values[i] ? 1.0 : other == values[i] ? 0.5 : 0.0;
  return rank;
}

// All subsets, one by one.
double Enumerated(const std::vector<double>& arm, const std::vector<double>& control) {
  std::vector<double> all = arm;
  all.insert(all.end(), control.begin(), control.end());
  double observed = 0;
  for (size_t i = 0; i < arm.size(); ++i) observed += Midrank(all, i);
  int64_t every = 0, below = 0;
  for (uint32_t set = 0; set < (1u << all.size()); ++set) {
    if (static_cast<size_t>(__builtin_popcount(set)) != arm.size()) continue;
    double sum = 0;
    for (size_t i = 0; i < all.size(); ++i) sum += (set >> i & 1) ? Midrank(all, i) : 0.0;
    ++every;
    below += sum <= observed ? 1 : 0;
  }
  return static_cast<double>(below) / static_cast<double>(every);
}

std::vector<double> Draws(uint64_t seed, uint64_t stream, int count, double step) {
  const RandomStream random = MakeRandomStream(seed, 99, stream);
  std::vector<double> draws;
  for (int i = 0; i < count; ++i) {
    const double value = std::exp(RandomNormal(random, i));  // heavy-tailed, as jumps are
    draws.push_back(step > 0 ? std::floor(value / step) * step : value);
  }
  return draws;
}

TEST(Statistics, PermutationProbabilityIsThatOfEnumerationWithAndWithoutTies) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    for (double step : {0.0, 0.5}) {
      const std::vector<double> arm = Draws(seed, 1, 3 + static_cast<int>(seed % 4), step);
      const std::vector<double> control = Draws(seed, 2, 5 + static_cast<int>(seed % 3), step);
      EXPECT_DOUBLE_EQ(Enumerated(arm, control), ProbabilityBelow(arm, control)) << seed;
      EXPECT_DOUBLE_EQ(Enumerated(control, arm), ProbabilityBelow(control, arm)) << seed;
    }
  }
}

TEST(Statistics, CompleteSeparationHasTheSmallestProbabilityThereIs) {
  const std::vector<double> low = {1, 2, 3, 4, 5, 6};
  const std::vector<double> high = {11, 12, 13, 14, 15, 16, 17, 18, 19, 20, kInfinity, kInfinity};
  EXPECT_DOUBLE_EQ(1.0 / 18564, ProbabilityBelow(low, high));
  EXPECT_DOUBLE_EQ(1.0, ProbabilityBelow(high, low));
  EXPECT_GT(ProbabilityBelow(low, low), 0.5);
}

TEST(Statistics, TheLargestEnsemblesAreCountedToo) {
  const std::vector<double> same(kReplicasMax, 1.0);
  EXPECT_NEAR(1.0, ProbabilityBelow(same, same), 1e-12);
  const std::vector<double> a = Draws(1, 1, kReplicasMax, 0), b = Draws(1, 2, kReplicasMax, 0);
  // Without ties the two sides overlap in the observed sum alone.
  EXPECT_NEAR(1.0, ProbabilityBelow(a, b) + ProbabilityBelow(b, a), 0.01);
}

TEST(Statistics, HolmFollowsTheWorkedExample) {
  // p = 0.01, 0.04, 0.03, 0.005 of four: 0.005*4, 0.01*3, 0.03*2, max(0.04*1, 0.06).
  const std::vector<double> adjusted = HolmAdjusted({0.01, 0.04, 0.03, 0.005}, 4);
  const std::vector<double> expected = {0.03, 0.06, 0.06, 0.02};
  for (size_t i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(expected[i], adjusted[i]) << i;
  EXPECT_DOUBLE_EQ(0.1, HolmAdjusted({0.01}, 10)[0]);
  EXPECT_DOUBLE_EQ(1.0, HolmAdjusted({0.9, 0.4}, 4)[0]);
  EXPECT_TRUE(HolmAdjusted({}, 3).empty());
}

TEST(Statistics, MedianAndQuartilesInterpolate) {
  EXPECT_DOUBLE_EQ(2.5, Median({4, 1, 3, 2}));
  EXPECT_DOUBLE_EQ(3, Median({9, 3, 1}));
  EXPECT_EQ(kInfinity, Median({1, kInfinity, kInfinity}));
  EXPECT_EQ(kInfinity, Median({kInfinity, kInfinity}));
  EXPECT_TRUE(std::isnan(Median({})));
  EXPECT_DOUBLE_EQ(1.5, QuartileRange({1, 2, 3, 4}));
  EXPECT_DOUBLE_EQ(0, QuartileRange({7}));
  EXPECT_DOUBLE_EQ(0, QuartileRange({kInfinity, kInfinity}));
}

TEST(Statistics, JumpIsTheLargestRiseOverTheRunningMinimum) {
  const Jump jump = JumpOf({10, 9, 9.4, 9.6, 8, 9.5, 8.5}, 0.5);
  EXPECT_DOUBLE_EQ(1.5, jump.nats);
  EXPECT_EQ(3, jump.first_above);
  EXPECT_DOUBLE_EQ(0, JumpOf({3, 2, 1}, 0.5).nats);
  EXPECT_EQ(-1, JumpOf({3, 2, 2.5}, 0.5).first_above) << "at the threshold is not above it";
  EXPECT_EQ(kInfinity, JumpOf({3, std::nan(""), 1}, 0.5).nats);
  EXPECT_EQ(1, JumpOf({3, std::nan(""), 1}, 0.5).first_above);
  EXPECT_EQ(kInfinity, JumpOf({std::nan(""), 1}, 0.5).nats);
}

TEST(Statistics, WithoutAnEffectTheTestRejectsAtMostAtItsLevel) {
  int rejected = 0;
  constexpr int kTrials = 400;
  for (uint64_t seed = 0; seed < kTrials; ++seed) {
    const double p = ProbabilityBelow(Draws(seed, 1, 6, 0), Draws(seed, 2, 12, 0));
    rejected += p <= 0.05 ? 1 : 0;
  }
  EXPECT_LE(rejected, 33);  // mean 20 at the most; 33 is three standard deviations above
  EXPECT_GE(rejected, 7);   // and it is not blind
}

}  // namespace
}  // namespace retrace
