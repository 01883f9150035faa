// Quantiles from counts, against sorted numbers.
#include "replay/log_histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace retrace {
namespace {

TEST(LogHistogram, QuantilesAreRightToTwoPercent) {
  std::mt19937 random(3);
  std::lognormal_distribution<float> sizes(-20, 9);
  std::vector<float> all;
  LogHistogram whole, half[2];
  for (int i = 0; i < 20000; ++i) {
    all.push_back(sizes(random));
    whole.Add(all.back());
    half[i % 2].Add(all.back());
  }
  whole.Add(std::nanf(""));
  half[0] += half[1];
  EXPECT_EQ(20000, whole.count());
  std::sort(all.begin(), all.end());
  for (const double q : {0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0}) {
    const double exact = all[std::max(0, static_cast<int>(std::ceil(q * 20000)) - 1)];
    EXPECT_NEAR(exact, whole.Quantile(q), 0.02 * exact) << q;
    EXPECT_EQ(whole.Quantile(q), half[0].Quantile(q)) << q;
  }
}

TEST(LogHistogram, ZerosAndInfinitiesAreCountedAndNothingHasNoQuantile) {
  LogHistogram histogram;
  EXPECT_TRUE(std::isnan(histogram.Quantile(0.5)));
  for (const float x : {0.0f, -0.0f, 1.0f, INFINITY}) histogram.Add(x);
  EXPECT_EQ(0, histogram.Quantile(0.5));
  EXPECT_NEAR(1, histogram.Quantile(0.75), 0.02);
  EXPECT_EQ(INFINITY, histogram.Quantile(1));
}

}  // namespace
}  // namespace retrace
