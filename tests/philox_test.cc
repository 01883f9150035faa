#include "core/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace retrace {
namespace {

void ExpectBlock(const PhiloxBlock& expected, const PhiloxBlock& got) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(expected.words[i], got.words[i]) << i;
}

// Known answers: the philox4x32 lines with 10 rounds of Random123's kat_vectors.
TEST(Philox, HasThePublishedValues) {
  ExpectBlock({{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
              Philox4x32({{0, 0}}, {{0, 0, 0, 0}}));
  ExpectBlock(
      {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      Philox4x32({{0xffffffff, 0xffffffff}}, {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}));
  ExpectBlock(
      {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
      Philox4x32({{0xa4093822, 0x299f31d0}}, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}));
}

TEST(Philox, AnElementIsTheBlockTheHeaderSays) {
  const uint64_t seed = 0x0123456789abcdef, stream = 0xfedcba9876543210,
                 element = 0x1122334455667788;
  const PhiloxBlock drawn = Philox4x32({{0x89abcdef, 0x01234567}}, {{42, 0, 0, 0}});
  const PhiloxBlock expected = Philox4x32({{drawn.words[0], drawn.words[1]}},
                                          {{0x55667788, 0x11223344, 0x76543210, 0xfedcba98}});
  const RandomStream random = MakeRandomStream(seed, 42, stream);
  ExpectBlock(expected, RandomBlock(random, element));
  EXPECT_EQ(expected.words[0], RandomU32(random, element));
}

TEST(Philox, EveryPartOfTheNameChangesTheNumber) {
  std::set<uint64_t> seen;
  const auto draw = [&](uint64_t seed, uint32_t purpose, uint64_t stream, uint64_t element) {
    const PhiloxBlock block = RandomBlock(MakeRandomStream(seed, purpose, stream), element);
    seen.insert((uint64_t{block.words[0]} << 32) | block.words[1]);
  };
  draw(1, 1, 1, 1);
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t other = 1 ^ (uint64_t{1} << bit);
    draw(other, 1, 1, 1);
    draw(1, 1, other, 1);
    draw(1, 1, 1, other);
    if (bit < 32) draw(1, static_cast<uint32_t>(other), 1, 1);
  }
  EXPECT_EQ(1u + 3 * 64 + 32, seen.size());
}

TEST(Philox, UniformsStayStrictlyInsideTheirInterval) {
  EXPECT_EQ(0x1p-53, UnitInterval(0, 0));
  EXPECT_EQ(1.0 - 0x1p-53, UnitInterval(0xffffffff, 0xffffffff));
  EXPECT_EQ(0.5 + 0x1p-53, UnitInterval(0x80000000, 0));
  EXPECT_EQ(0.5 - 0x1p-53, UnitInterval(0x7fffffff, 0xffffffff));
}

// The tolerances are five standard deviations of each mean for 2^18 independent draws.
TEST(Philox, DrawsHaveTheMomentsOfTheirDistributions) {
  const RandomStream random = MakeRandomStream(2024, 3, 17);
  const int n = 1 << 18;
  double uniform = 0, normal = 0, square = 0, fourth = 0, neighbours = 0, previous = 0;
  for (int i = 0; i < n; ++i) {
    const double z = RandomNormal(random, i);
    uniform += RandomUniform(random, i);
    normal += z;
    square += z * z;
    fourth += z * z * z * z;
    neighbours += z * previous;
    previous = z;
  }
  const double deviation = 5.0 / std::sqrt(n);
  EXPECT_NEAR(0.5, uniform / n, deviation * std::sqrt(1.0 / 12.0));
  EXPECT_NEAR(0.0, normal / n, deviation);
  EXPECT_NEAR(1.0, square / n, deviation * std::sqrt(2.0));
  EXPECT_NEAR(3.0, fourth / n, deviation * std::sqrt(96.0));
  EXPECT_NEAR(0.0, neighbours / n, deviation);
}

// Box and Muller written again with libm in the wider format; the bound is the sum of the stated
// errors of log (halved by the root), root, product and cosine near its zeros.
TEST(Philox, NormalsAreBoxAndMullerOfTheBlock) {
  const RandomStream random = MakeRandomStream(99, 1, 5);
  for (uint64_t element = 0; element < 20000; ++element) {
    const PhiloxBlock block = RandomBlock(random, element);
    const long double u = UnitInterval(block.words[1], block.words[0]);
    const long double v = UnitInterval(block.words[3], block.words[2]);
    const long double exact =
        std::sqrt(-2.0L * std::log(u)) * std::cos(6.283185307179586476925286766559L * v);
    const double got = RandomNormal(random, element);
    ASSERT_NEAR(static_cast<double>(exact), got, 8.6 * 8.0 * 0x1p-53) << element;
  }
}

TEST(Philox, TheOrderOfDrawingChangesNothing) {
  const RandomStream random = MakeRandomStream(7, 2, 1);
  std::vector<double> forward, backward(1000);
  for (int i = 0; i < 1000; ++i) forward.push_back(RandomNormal(random, i));
  for (int i = 999; i >= 0; --i) backward[i] = RandomNormal(MakeRandomStream(7, 2, 1), i);
  EXPECT_EQ(forward, backward);
}

}  // namespace
}  // namespace retrace
