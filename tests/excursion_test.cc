// Which quantity moved first: planted moves are found where they were planted.
#include "surgery/excursion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace retrace {
namespace {

// 20 updates from 1 on: level 5 with a little ripple, then a ramp of 4 updates up to `to` from
// update `from` on.
std::vector<double> Ramp(int from, double to) {
  std::vector<double> values;
  for (int k = 1; k <= 20; ++k) {
    const double way = std::clamp((k - from + 1) / 4.0, 0.0, 1.0);
    values.push_back(5 + (k % 2 ? 0.01 : -0.01) + way * (to - 5));
  }
  return values;
}

ExcursionWindow Window(int64_t end_first = 8, int64_t end_last = 20) {
  return {.first = 1, .end_first = end_first, .end_last = end_last};
}

TEST(Excursion, BeginsWhereTheMoveWasPlanted) {
  for (const double to : {9.0, 1.0}) {
    for (int from = 6; from <= 15; ++from) {
      const std::optional<Excursion> found = FindExcursion(Ramp(from, to), Window());
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(from, found->onset) << "to " << to;
      EXPECT_LT(found->turn, from);
      EXPECT_FALSE(found->trend);
      EXPECT_EQ(to > 5, found->rises());
      EXPECT_NEAR(4, found->size, 0.05);
    }
  }
}

TEST(Excursion, TheLeadOfTwoIsTheDifferenceOfTheirOnsets) {
  const auto early = FindExcursion(Ramp(9, 50), Window()),
             late = FindExcursion(Ramp(12, 6), Window());
  EXPECT_EQ(3, late->onset - early->onset);
}

TEST(Excursion, WhatWasOnItsWayFromTheBeginningIsATrend) {
  std::vector<double> values;
  for (int k = 1; k <= 20; ++k) values.push_back(k);
  const std::optional<Excursion> found = FindExcursion(values, Window());
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(found->trend);
}

TEST(Excursion, EndsWithinItsRangeAndHasTheLeastSize) {
  const std::vector<double> values = Ramp(6, 9);  // done by update 9
  EXPECT_EQ(9, FindExcursion(values, Window(8, 9))->end);
  ExcursionWindow window = Window(8, 9);
  window.least = 4.5;
  EXPECT_FALSE(FindExcursion(values, window).has_value());
  // Only the ripple ends there, or the rise from before.
  EXPECT_LE(FindExcursion(Ramp(16, 9), Window(8, 12))->size, 0.021);
}

TEST(Excursion, OfLogarithmsIsAFactor) {
  std::vector<double> values;
  for (const double v : Ramp(10, 8)) values.push_back(std::exp(v));
  ExcursionWindow window = Window();
  window.log = true;
  const std::optional<Excursion> found = FindExcursion(values, window);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(10, found->onset);
  EXPECT_NEAR(3, found->size, 0.05);
  EXPECT_GT(found->value_end, 2000);
}

TEST(Excursion, ValuesThatAreNotNumbersAreLeftOut) {
  std::vector<double> values = Ramp(10, 9);
  values[3] = std::nan("");
  values[17] = INFINITY;
  EXPECT_EQ(10, FindExcursion(values, Window())->onset);
  EXPECT_FALSE(FindExcursion({}, Window()).has_value());
  EXPECT_FALSE(FindExcursion(std::vector<double>(20, std::nan("")), Window()).has_value());
  EXPECT_FALSE(FindExcursion(std::vector<double>(20, 3.0), Window()).has_value());
  ExcursionWindow window = Window();
  window.log = true;
  EXPECT_FALSE(FindExcursion(std::vector<double>(20, 0.0), window).has_value());
}

}  // namespace
}  // namespace retrace
