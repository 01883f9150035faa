#include "core/diff.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace retrace {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kTiny = std::numeric_limits<float>::denorm_min();
const float kNan = std::bit_cast<float>(0x7fc00000u);
const float kOtherNan = std::bit_cast<float>(0xffc00001u);

TensorDifference Diff(const std::vector<float>& a, const std::vector<float>& b) {
  const int64_t n = std::ssize(a);
  return DiffTensors(TensorView(1, n, a.data()), TensorView(1, n, b.data()));
}

TEST(UlpDistance, CountsTheFloatsBetweenTwoNumbers) {
  EXPECT_EQ(0u, UlpDistance(1.0f, 1.0f));
  EXPECT_EQ(1u, UlpDistance(1.0f, std::nextafterf(1.0f, 2.0f)));
  EXPECT_EQ(1u, UlpDistance(1.0f, std::nextafterf(1.0f, 0.0f)));
  EXPECT_EQ(1u << 23, UlpDistance(1.0f, 2.0f));
  EXPECT_EQ(1u << 23, UlpDistance(-2.0f, -1.0f));
  float x = 0.3f;
  for (int i = 0; i < 1000; ++i) x = std::nextafterf(x, -1.0f);
  EXPECT_EQ(1000u, UlpDistance(0.3f, x));
}

TEST(UlpDistance, RunsThroughZeroAndSubnormals) {
  EXPECT_EQ(0u, UlpDistance(-0.0f, 0.0f));
  EXPECT_EQ(1u, UlpDistance(0.0f, kTiny));
  EXPECT_EQ(1u, UlpDistance(-0.0f, kTiny));
  EXPECT_EQ(2u, UlpDistance(-kTiny, kTiny));
  EXPECT_EQ(1u << 23, UlpDistance(0.0f, std::numeric_limits<float>::min()));
  EXPECT_EQ(2u * std::bit_cast<uint32_t>(kMax), UlpDistance(-kMax, kMax));
}

TEST(UlpDistance, EndsAtInfinityAndIsNoNumberForNan) {
  EXPECT_EQ(1u, UlpDistance(kMax, kInf));
  EXPECT_EQ(0u, UlpDistance(-kInf, -kInf));
  EXPECT_EQ(2u * 0x7f800000u, UlpDistance(-kInf, kInf));
  EXPECT_EQ(kUlpNan, UlpDistance(kNan, 1.0f));
  EXPECT_EQ(kUlpNan, UlpDistance(kInf, kNan));
  EXPECT_EQ(0u, UlpDistance(kNan, kOtherNan));
}

TEST(UlpDistance, IsSymmetricAndAddsUp) {
  const std::vector<float> ascending = {-kInf, -kMax, -1.5f, -1e-40f, 0.0f,
                                        kTiny, 0.1f,  3e38f, kInf};
  for (size_t i = 0; i < ascending.size(); ++i) {
    for (size_t j = i; j < ascending.size(); ++j) {
      EXPECT_EQ(UlpDistance(ascending[i], ascending[j]), UlpDistance(ascending[j], ascending[i]));
      for (size_t k = i; k <= j; ++k) {
        EXPECT_EQ(
            UlpDistance(ascending[i], ascending[j]),
            UlpDistance(ascending[i], ascending[k]) + UlpDistance(ascending[k], ascending[j]));
      }
    }
  }
}

TEST(Diff, EqualBitsAreIdenticalWhateverTheyMean) {
  const std::vector<float> a = {1.0f, -0.0f, kNan, kInf, kTiny};
  const TensorDifference d = Diff(a, a);
  EXPECT_TRUE(d.identical());
  EXPECT_FALSE(d.first);
  EXPECT_EQ(5, d.elements);
  EXPECT_EQ(1, d.nan_a);
  EXPECT_EQ(1, d.nan_b);
  EXPECT_EQ(0.0, d.RelativeL2());
  EXPECT_EQ(1.0, d.Cosine());
}

TEST(Diff, NamesTheFirstElementAndTheLargestDistances) {
  const std::vector<float> a = {1.0f, 2.0f, 3.0f, 100.0f};
  const std::vector<float> b = {1.0f, std::nextafterf(2.0f, 3.0f), 3.0f, 104.0f};
  const TensorDifference d = Diff(a, b);
  EXPECT_EQ(2, d.differing);
  ASSERT_TRUE(d.first);
  EXPECT_EQ(1, d.first->index);
  EXPECT_EQ(a[1], d.first->a);
  EXPECT_EQ(b[1], d.first->b);
  EXPECT_EQ(1u, d.first->ulp);
  EXPECT_EQ(UlpDistance(100.0f, 104.0f), d.max_ulp);
  EXPECT_EQ(4.0, d.max_abs);
  EXPECT_EQ(4.0 / 104.0, d.max_rel);
}

TEST(Diff, SumsGiveRelativeL2AndCosine) {
  const TensorDifference d = Diff({3.0f, 4.0f}, {4.0f, -3.0f});
  EXPECT_EQ(std::sqrt(50.0) / 5.0, d.RelativeL2());
  EXPECT_EQ(0.0, d.Cosine());
  const TensorDifference opposite = Diff({1.0f, 2.0f}, {-1.0f, -2.0f});
  EXPECT_DOUBLE_EQ(-1.0, opposite.Cosine());
  EXPECT_DOUBLE_EQ(2.0, opposite.RelativeL2());
  EXPECT_TRUE(std::isinf(Diff({0.0f}, {1.0f}).RelativeL2()));
  EXPECT_EQ(1.0, Diff({1.0f}, {0.0f}).RelativeL2());
}

TEST(Diff, TellsSignedZerosFromOtherDifferences) {
  const TensorDifference d = Diff({0.0f, -0.0f, 1.0f, 0.0f}, {-0.0f, 0.0f, 1.0f, 0.0f});
  EXPECT_FALSE(d.identical());
  EXPECT_EQ(2, d.differing);
  EXPECT_EQ(2, d.signed_zeros);
  EXPECT_EQ(0u, d.max_ulp);
  EXPECT_EQ(0.0, d.max_abs);
  EXPECT_EQ(0.0, d.max_rel);
  EXPECT_EQ(0.0, d.RelativeL2());
}

TEST(Diff, TellsNanOnOneSideFromNanOfOtherBits) {
  const TensorDifference d = Diff({kNan, 1.0f, kNan, 2.0f}, {kOtherNan, kNan, kNan, 2.0f});
  EXPECT_EQ(2, d.differing);
  EXPECT_EQ(2, d.nan_a);
  EXPECT_EQ(3, d.nan_b);
  EXPECT_EQ(1, d.nan_one_side);
  EXPECT_EQ(1, d.nan_bits);
  EXPECT_EQ(0u, d.max_ulp) << "NaNs are counted, they have no distance";
  EXPECT_EQ(0.0, d.max_abs);
  EXPECT_EQ(0.0, d.RelativeL2()) << "over finite pairs";
}

TEST(Diff, InfinityIsOneUlpFromTheLargestFloatAndInfinitelyFar) {
  const TensorDifference d = Diff({kMax, 1.0f}, {kInf, 1.0f});
  EXPECT_EQ(1u, d.max_ulp);
  EXPECT_TRUE(std::isinf(d.max_abs));
  EXPECT_TRUE(std::isinf(d.max_rel));
}

// A 4 x 6 tensor cut by rows, by columns, and whole.
TEST(TensorView, GivesTheSameElementsHoweverItIsCut) {
  std::vector<float> whole(24), left(12), right(12);
  for (int i = 0; i < 24; ++i) {
    whole[i] = static_cast<float>(i);
    (i % 6 < 3 ? left : right)[i / 6 * 3 + i % 3] = static_cast<float>(i);
  }
  const TensorView plain(4, 6, whole.data());
  const TensorView columns(4, 6, {{0, 4, 0, 3, left.data()}, {0, 4, 3, 6, right.data()}});
  const TensorView rows(4, 6, {{0, 1, 0, 6, whole.data()}, {1, 4, 0, 6, whole.data() + 6}});
  EXPECT_EQ(whole, FirstValues(columns, 24));
  EXPECT_EQ(whole, FirstValues(rows, 100));
  EXPECT_EQ(24, std::ssize(plain.From(0)));
  EXPECT_EQ(3, std::ssize(columns.From(0)));
  EXPECT_EQ(1, std::ssize(columns.From(23)));
  for (const TensorView* a : {&plain, &columns, &rows}) {
    for (const TensorView* b : {&plain, &columns, &rows}) {
      EXPECT_TRUE(DiffTensors(*a, *b).identical());
    }
  }
  right[7] = -1.0f;  // row 2, column 4
  const TensorDifference d = DiffTensors(rows, columns);
  EXPECT_EQ(1, d.differing);
  ASSERT_TRUE(d.first);
  EXPECT_EQ(2, d.first->row(6));
  EXPECT_EQ(4, d.first->col(6));
  EXPECT_EQ(16.0f, d.first->a);
  EXPECT_EQ(-1.0f, d.first->b);
}

TEST(TensorView, StatisticsCountWhatIsNotFinite) {
  const std::vector<float> values = {3.0f, -4.0f, 0.0f, -0.0f, kNan, -kInf};
  const TensorStatistics s = StatisticsOf(TensorView(2, 3, values.data()));
  EXPECT_EQ(6, s.elements);
  EXPECT_EQ(2, s.zeros);
  EXPECT_EQ(1, s.nans);
  EXPECT_EQ(1, s.infinities);
  EXPECT_EQ(5.0, s.norm);
  EXPECT_EQ(-0.25, s.mean);
  EXPECT_EQ(-kInf, s.min);
  EXPECT_EQ(3.0f, s.max);
}

}  // namespace
}  // namespace retrace
