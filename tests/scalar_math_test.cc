// The functions of core/scalar_math.h against an outside oracle (libm in the next wider format, the
// only tolerance here: the errors stated in NUMERICS.md), and scalar against lanes, where there is
// none.
#include "core/scalar_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/vector_math.h"
#include "tests/places.h"

namespace retrace {
namespace {

using math::Bits;
using math::FromBits;

// The errors NUMERICS.md states, in ULP. FP32: the largest over every float, at the argument beside
// it. FP64: a round number above the largest of 12 million arguments of each kind.
constexpr double kExp32Ulps = 1.00858, kLog32Ulps = 0.83163, kTanh32Ulps = 1.22535;
constexpr float kExp32Worst = -0x1.b610fp+4f, kLog32Worst = 0x1.697dc8p+0f;
constexpr float kTanh32Worst = 0x1.609b2cp-1f;
constexpr double kExp64Ulps = 0.66, kExp64SubnormalUlps = 0.78, kLog64Ulps = 0.66;
constexpr double kTanh64Ulps = 0.63, kSinCos64Ulps = 0.80;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kInf64 = std::numeric_limits<double>::infinity();
constexpr float kOddNan = -std::numeric_limits<float>::quiet_NaN();
constexpr double kOddNan64 = -std::numeric_limits<double>::quiet_NaN();

// The distance of `got` from `exact` in units of the last place of FP32 (FP64) at `exact`.
double UlpsOff(float got, double exact) {
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::fabs(got - exact) * std::ldexp(1.0, 23 - exponent);
}
double UlpsOff(double got, long double exact) {
  const int exponent = std::max(std::ilogb(exact), -1022);
  return static_cast<double>(std::fabs(got - exact) * std::ldexp(1.0L, 52 - exponent));
}

// Every stride-th bit pattern: all signs, exponents, subnormals, infinities and NaNs take part.
template <class Visit>
void ForStridedFloats(uint32_t stride, Visit visit) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += stride) {
    visit(FromBits(static_cast<int32_t>(static_cast<uint32_t>(bits))));
  }
}

template <class Got, class Exact>
double LargestError32(Got got, Exact exact) {
  double largest = 0.0;
  ForStridedFloats(1021, [&](float x) {
    const double reference = exact(static_cast<double>(x));
    const float rounded = static_cast<float>(reference);
    const float value = got(x);
    if (std::isnan(reference)) {
      EXPECT_EQ(math::kCanonicalNanBits32, Bits(value)) << x;
    } else if (reference == 0.0 || std::isinf(rounded) || std::isinf(value)) {
      EXPECT_EQ(Bits(rounded), Bits(value)) << x;
    } else {
      largest = std::max(largest, UlpsOff(value, reference));
    }
  });
  return largest;
}

// `draw` makes arguments; 400 000 of them.
template <class Got, class Exact, class Draw>
double LargestError64(Got got, Exact exact, Draw draw) {
  std::mt19937_64 random(20240607);
  double largest = 0.0;
  for (int i = 0; i < 400000; ++i) {
    const double x = draw(random);
    const long double reference = exact(static_cast<long double>(x));
    const double value = got(x);
    if (std::isinf(static_cast<double>(reference)) || reference == 0.0L) {
      EXPECT_EQ(static_cast<double>(reference), value) << x;
    } else {
      largest = std::max(largest, UlpsOff(value, reference));
    }
  }
  return largest;
}

auto Uniform(double low, double high) {
  return [=](std::mt19937_64& random) {
    return low + (high - low) * (static_cast<double>(random() >> 11) * 0x1p-53);
  };
}
double AnyPositive(std::mt19937_64& random) {
  return FromBits(static_cast<int64_t>(random() % 0x7ff0000000000000u));
}

TEST(ScalarMath, ExpInFp32IsAsAccurateAsStated) {
  const double largest =
      LargestError32([](float x) { return math::Exp(x); }, [](double x) { return std::exp(x); });
  EXPECT_LE(largest, kExp32Ulps);
  EXPECT_GE(largest, 0.5);  // a reference that followed us would say 0
}

TEST(ScalarMath, LogInFp32IsAsAccurateAsStated) {
  const double largest =
      LargestError32([](float x) { return math::Log(x); }, [](double x) { return std::log(x); });
  EXPECT_LE(largest, kLog32Ulps);
  EXPECT_GE(largest, 0.5);
}

TEST(ScalarMath, TanhInFp32IsAsAccurateAsStated) {
  const double largest =
      LargestError32([](float x) { return math::Tanh(x); }, [](double x) { return std::tanh(x); });
  EXPECT_LE(largest, kTanh32Ulps);
  EXPECT_GE(largest, 0.5);
}

TEST(ScalarMath, TheWorstFp32ArgumentsHaveTheStatedErrors) {
  EXPECT_NEAR(kExp32Ulps, UlpsOff(math::Exp(kExp32Worst), std::exp(double{kExp32Worst})), 1e-3);
  EXPECT_NEAR(kLog32Ulps, UlpsOff(math::Log(kLog32Worst), std::log(double{kLog32Worst})), 1e-3);
  EXPECT_NEAR(kTanh32Ulps, UlpsOff(math::Tanh(kTanh32Worst), std::tanh(double{kTanh32Worst})),
              1e-3);
}

TEST(ScalarMath, ExpInFp64IsWithinOneUlp) {
  const auto got = [](double x) { return math::Exp(x); };
  const auto exact = [](long double x) { return std::exp(x); };
  EXPECT_LE(LargestError64(got, exact, Uniform(-707.0, 711.0)), kExp64Ulps);
  EXPECT_LE(LargestError64(got, exact, Uniform(-1.0, 1.0)), kExp64Ulps);
  EXPECT_LE(LargestError64(got, exact, Uniform(-745.2, -708.3)), kExp64SubnormalUlps);
}

TEST(ScalarMath, LogInFp64IsWithinOneUlp) {
  const auto got = [](double x) { return math::Log(x); };
  const auto exact = [](long double x) { return std::log(x); };
  EXPECT_LE(LargestError64(got, exact, AnyPositive), kLog64Ulps);
  EXPECT_LE(LargestError64(got, exact, Uniform(0.5, 2.0)), kLog64Ulps);
  EXPECT_LE(LargestError64(got, exact, Uniform(1.0 - 0x1p-20, 1.0 + 0x1p-20)), kLog64Ulps);
  EXPECT_LE(LargestError64(got, exact, Uniform(0.0, 0x1p-1022)), kLog64Ulps);  // subnormals
}

TEST(ScalarMath, TanhInFp64IsWithinOneUlp) {
  const auto got = [](double x) { return math::Tanh(x); };
  const auto exact = [](long double x) { return std::tanh(x); };
  EXPECT_LE(LargestError64(got, exact, Uniform(-20.0, 20.0)), kTanh64Ulps);
  EXPECT_LE(LargestError64(got, exact, Uniform(-1.0, 1.0)), kTanh64Ulps);
  EXPECT_LE(LargestError64(got, exact, AnyPositive), kTanh64Ulps);
}

TEST(ScalarMath, SinAndCosInFp64AreWithinOneUlpForEverySizeOfArgument) {
  const auto sine = [](double x) { return math::Sin(x); };
  const auto exact_sine = [](long double x) { return std::sin(x); };
  const auto cosine = [](double x) { return math::Cos(x); };
  const auto exact_cosine = [](long double x) { return std::cos(x); };
  const auto multiples_of_half_pi = [](std::mt19937_64& random) {
    return static_cast<double>(random() >> (14 + random() % 50)) * 1.5707963267948966;
  };
  for (double size : {1.0, 10.0, 0x1p20, 0x1p31, 0x1p60}) {
    EXPECT_LE(LargestError64(sine, exact_sine, Uniform(-size, size)), kSinCos64Ulps) << size;
    EXPECT_LE(LargestError64(cosine, exact_cosine, Uniform(-size, size)), kSinCos64Ulps) << size;
  }
  EXPECT_LE(LargestError64(sine, exact_sine, AnyPositive), kSinCos64Ulps);
  EXPECT_LE(LargestError64(cosine, exact_cosine, AnyPositive), kSinCos64Ulps);
  EXPECT_LE(LargestError64(sine, exact_sine, multiples_of_half_pi), kSinCos64Ulps);
  EXPECT_LE(LargestError64(cosine, exact_cosine, multiples_of_half_pi), kSinCos64Ulps);
}

TEST(ScalarMath, TheDoubleNearestToAMultipleOfHalfPiIsReducedRight) {
  // 6381956970095103 * 2^797: no double is nearer to a multiple of pi/2 (Muller, Elementary
  // Functions, table of worst cases for range reduction).
  const double x = 6381956970095103.0 * 0x1p797;
  EXPECT_LE(UlpsOff(math::Cos(x), std::cos(static_cast<long double>(x))), kSinCos64Ulps);
  EXPECT_EQ(1.0, std::fabs(math::Sin(x)));
}

TEST(ScalarMath, BothReductionsOfAnAngleAgree) {
  std::mt19937_64 random(5);
  const auto draw = Uniform(-0x1p30, 0x1p30);
  for (int i = 0; i < 100000; ++i) {
    const double x = draw(random);
    if (std::fabs(x) < 0x1p10) continue;
    const math::QuarterTurns near = math::ReduceNear(x), far = math::ReduceFar(x);
    ASSERT_EQ(near.quadrant, far.quadrant) << x;
    ASSERT_EQ(near.angle.high, far.angle.high) << x;
    ASSERT_NEAR(near.angle.low, far.angle.low, std::fabs(near.angle.high) * 0x1p-95) << x;
  }
}

TEST(ScalarMath, Fp32SpecialValues) {
  const int32_t nan = math::kCanonicalNanBits32;
  EXPECT_EQ(Bits(1.0f), Bits(math::Exp(0.0f)));
  EXPECT_EQ(Bits(1.0f), Bits(math::Exp(-0.0f)));
  EXPECT_EQ(Bits(kInf), Bits(math::Exp(kInf)));
  EXPECT_EQ(Bits(0.0f), Bits(math::Exp(-kInf)));
  EXPECT_EQ(Bits(0x1.ffff08p127f), Bits(math::Exp(0x1.62e42ep6f)));  // last finite
  EXPECT_EQ(Bits(kInf), Bits(math::Exp(0x1.62e43p6f)));
  EXPECT_EQ(1, Bits(math::Exp(-0x1.9fe368p6f)));  // last above zero: the smallest subnormal
  EXPECT_EQ(Bits(0.0f), Bits(math::Exp(-0x1.9fe36ap6f)));
  EXPECT_EQ(Bits(-kInf), Bits(math::Log(0.0f)));
  EXPECT_EQ(Bits(-kInf), Bits(math::Log(-0.0f)));
  EXPECT_EQ(Bits(kInf), Bits(math::Log(kInf)));
  EXPECT_EQ(Bits(0.0f), Bits(math::Log(1.0f)));
  EXPECT_EQ(Bits(static_cast<float>(std::log(0x1p-149))), Bits(math::Log(0x1p-149f)));
  EXPECT_EQ(nan, Bits(math::Log(-0x1p-149f)));
  EXPECT_EQ(nan, Bits(math::Log(-kInf)));
  EXPECT_EQ(Bits(0.0f), Bits(math::Tanh(0.0f)));
  EXPECT_EQ(Bits(-0.0f), Bits(math::Tanh(-0.0f)));
  EXPECT_EQ(Bits(0x1p-149f), Bits(math::Tanh(0x1p-149f)));
  EXPECT_EQ(Bits(1.0f), Bits(math::Tanh(kInf)));
  EXPECT_EQ(Bits(-1.0f), Bits(math::Tanh(-kInf)));
  for (float x : {kOddNan, FromBits(int32_t{0x7f800001})}) {
    EXPECT_EQ(nan, Bits(math::Exp(x)));
    EXPECT_EQ(nan, Bits(math::ExpCut(x)));
    EXPECT_EQ(nan, Bits(math::Log(x)));
    EXPECT_EQ(nan, Bits(math::Tanh(x)));
    EXPECT_EQ(nan, Bits(math::CanonicalNan(x)));
  }
}

TEST(ScalarMath, Fp64SpecialValues) {
  const int64_t nan = math::kCanonicalNanBits64;
  EXPECT_EQ(Bits(1.0), Bits(math::Exp(0.0)));
  EXPECT_EQ(Bits(1.0), Bits(math::Exp(-0.0)));
  EXPECT_EQ(Bits(kInf64), Bits(math::Exp(kInf64)));
  EXPECT_EQ(Bits(0.0), Bits(math::Exp(-kInf64)));
  EXPECT_GT(kInf64, math::Exp(0x1.62e42fefa39efp9));  // last finite
  EXPECT_EQ(Bits(kInf64), Bits(math::Exp(0x1.62e42fefa39fp9)));
  EXPECT_EQ(1, Bits(math::Exp(-0x1.74910d52d3051p9)));  // last above zero
  EXPECT_EQ(Bits(0.0), Bits(math::Exp(-0x1.74910d52d3052p9)));
  EXPECT_EQ(Bits(-kInf64), Bits(math::Log(0.0)));
  EXPECT_EQ(Bits(-kInf64), Bits(math::Log(-0.0)));
  EXPECT_EQ(Bits(kInf64), Bits(math::Log(kInf64)));
  EXPECT_EQ(Bits(0.0), Bits(math::Log(1.0)));
  EXPECT_EQ(nan, Bits(math::Log(-0x1p-1074)));
  EXPECT_EQ(Bits(-0.0), Bits(math::Tanh(-0.0)));
  EXPECT_EQ(Bits(0x1p-1074), Bits(math::Tanh(0x1p-1074)));
  EXPECT_EQ(Bits(1.0), Bits(math::Tanh(kInf64)));
  EXPECT_EQ(Bits(-math::Tanh(0.7)), Bits(math::Tanh(-0.7)));
  EXPECT_EQ(Bits(-1.0), Bits(math::Tanh(-kInf64)));
  EXPECT_EQ(Bits(0.0), Bits(math::Sin(0.0)));
  EXPECT_EQ(Bits(-0.0), Bits(math::Sin(-0.0)));
  EXPECT_EQ(Bits(1.0), Bits(math::Cos(-0.0)));
  for (double x : {kInf64, -kInf64, kOddNan64}) {
    EXPECT_EQ(nan, Bits(math::Sin(x)));
    EXPECT_EQ(nan, Bits(math::Cos(x)));
  }
  EXPECT_EQ(nan, Bits(math::Exp(kOddNan64)));
  EXPECT_EQ(nan, Bits(math::ExpCut(kOddNan64)));
  EXPECT_EQ(nan, Bits(math::Log(kOddNan64)));
  EXPECT_EQ(nan, Bits(math::Tanh(kOddNan64)));
  EXPECT_EQ(nan, Bits(math::CanonicalNan(kOddNan64)));
}

TEST(ScalarMath, TheCutExponentialIsTheExponentialAboveItsCutAndZeroBelow) {
  ForStridedFloats(1021, [](float x) {
    const float expected = x < -64.0f ? 0.0f : math::Exp(x);
    ASSERT_EQ(Bits(expected), Bits(math::ExpCut(x))) << x;
  });
  EXPECT_EQ(Bits(math::Exp(-64.0f)), Bits(math::ExpCut(-64.0f)));
  EXPECT_EQ(Bits(0.0f), Bits(math::ExpCut(std::nextafter(-64.0f, -kInf))));
  EXPECT_EQ(Bits(0x1.ffff08p127f), Bits(math::ExpCut(0x1.62e42ep6f)));
  EXPECT_EQ(Bits(math::Exp(-512.0)), Bits(math::ExpCut(-512.0)));
  EXPECT_EQ(Bits(0.0), Bits(math::ExpCut(std::nextafter(-512.0, -kInf64))));
}

TEST(ScalarMath, PowIsTheExponentialOfTheProductWithItsStatedError) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200000; ++i) {
    const double base = std::exp2(Uniform(-30.0, 30.0)(random));
    const double exponent = Uniform(-20.0, 20.0)(random);
    const double y = exponent * math::Log(base);
    ASSERT_EQ(Bits(math::Exp(y)), Bits(math::Pow(base, exponent)));
    const long double exact = std::pow(static_cast<long double>(base), exponent);
    ASSERT_LE(UlpsOff(math::Pow(base, exponent), exact), 0.7 + 2.3 * std::fabs(y));
  }
  EXPECT_EQ(Bits(0.0), Bits(math::Pow(0.0, 2.0)));
  EXPECT_EQ(Bits(kInf64), Bits(math::Pow(0.0, -2.0)));
  EXPECT_EQ(Bits(1.0), Bits(math::Pow(3.0, 0.0)));
  EXPECT_EQ(math::kCanonicalNanBits64, Bits(math::Pow(0.0, 0.0)));
  EXPECT_EQ(math::kCanonicalNanBits64, Bits(math::Pow(-2.0, 2.0)));
}

TEST(ScalarMath, IntegerPowersFollowTheWrittenLadder) {
  EXPECT_EQ(243.0, math::PowInt(3.0, 5));
  EXPECT_EQ(0x1p-1022, math::PowInt(0.5, 1022));
  EXPECT_EQ(0.125, math::PowInt(2.0, -3));
  EXPECT_EQ(1.0, math::PowInt(0.0, 0));
  EXPECT_EQ(1.0, math::PowInt(kOddNan64, 0));
  EXPECT_EQ(math::kCanonicalNanBits64, Bits(math::PowInt(kOddNan64, 3)));
  EXPECT_EQ(0.0, math::PowInt(2.0, std::numeric_limits<int64_t>::min()));
  const double b = 0.95, b2 = b * b, b4 = b2 * b2, b8 = b4 * b4;
  EXPECT_EQ(Bits(((1.0 * b) * b2) * b8), Bits(math::PowInt(b, 11)));
  for (int64_t n : {2, 37, 1000, 54321}) {
    const long double exact = std::pow(static_cast<long double>(0.999), n);
    EXPECT_LE(std::fabs(math::PowInt(0.999, n) / exact - 1.0L), (n - 1) * 0x1p-53L) << n;
  }
}

TEST(ScalarMath, MaxAndMinKnowNanAndTheSignOfZero) {
  for (float x : {-kInf, -1.0f, -0.0f, 0.0f, 2.0f, kInf}) {
    EXPECT_EQ(math::kCanonicalNanBits32, Bits(math::Max(x, kOddNan)));
    EXPECT_EQ(math::kCanonicalNanBits32, Bits(math::Max(kOddNan, x)));
    EXPECT_EQ(math::kCanonicalNanBits32, Bits(math::Min(x, kOddNan)));
    EXPECT_EQ(math::kCanonicalNanBits32, Bits(math::Min(kOddNan, x)));
  }
  EXPECT_EQ(Bits(0.0f), Bits(math::Max(0.0f, -0.0f)));
  EXPECT_EQ(Bits(0.0f), Bits(math::Max(-0.0f, 0.0f)));
  EXPECT_EQ(Bits(-0.0f), Bits(math::Min(0.0f, -0.0f)));
  EXPECT_EQ(Bits(-0.0f), Bits(math::Min(-0.0f, 0.0f)));
  EXPECT_EQ(2.0f, math::Max(2.0f, -3.0f));
  EXPECT_EQ(-3.0, math::Min(2.0, -3.0));
  EXPECT_EQ(math::kCanonicalNanBits64, Bits(math::Max(1.0, kOddNan64)));
}

TEST(ScalarMath, RoundingToBf16TakesTheNearestAndTheEvenOfTwo) {
  ForStridedFloats(509, [](float x) {
    const float got = math::RoundToBf16(x);
    if (std::isnan(x)) {
      ASSERT_EQ(math::kCanonicalNanBits32, Bits(got));
      return;
    }
    ASSERT_EQ(0, Bits(got) & 0xffff);
    if (std::isinf(x)) {
      ASSERT_EQ(x, got);
      return;
    }
    // The neighbours of x in BF16; the one above the largest finite counts as 2^128.
    const double below = FromBits(static_cast<int32_t>(Bits(x) & 0xffff0000));
    const float step = FromBits(static_cast<int32_t>((Bits(x) & 0xffff0000) + 0x10000));
    const double above = std::isinf(step) ? std::copysign(0x1p128, x) : step;
    const double to_below = std::fabs(x - below), to_above = std::fabs(above - x);
    const bool even_below = (Bits(x) & 0x10000) == 0;
    const bool take_below = to_below < to_above || (to_below == to_above && even_below);
    ASSERT_EQ(Bits(static_cast<float>(take_below ? below : above)), Bits(got)) << x;
  });
  EXPECT_EQ(Bits(1.0f), Bits(math::RoundToBf16(1.00390625f)));       // tie, to even
  EXPECT_EQ(Bits(1.015625f), Bits(math::RoundToBf16(1.01171875f)));  // tie, to even
}

TEST(ScalarMath, RoundToIntTakesTheNearestAndTheEvenOfTwo) {
  for (float x : {0.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 3.49f, -3.51f, 4194304.0f,
                  -4194304.0f, 1e-40f}) {
    EXPECT_EQ(std::nearbyint(x), static_cast<float>(math::RoundToInt(x))) << x;
  }
}

TEST(ScalarMath, TheTableIsWhatItsScriptDerives) {
  if (std::system("python3 -c 'import mpmath' 2>/dev/null") != 0) {
    GTEST_SKIP() << "needs python3 with mpmath";
  }
  const std::string script = SourceDir() + "/scripts/fit_math.py";
  EXPECT_EQ(0, std::system(("python3 '" + script + "' --check").c_str()));
}

// ---- Lanes -------------------------------------------------------------------------------------

std::vector<float> SampleFloats() {
  std::vector<float> sample = {0.0f,
                               -0.0f,
                               kInf,
                               -kInf,
                               kOddNan,
                               -kOddNan,
                               0x1p-149f,
                               -0x1p-149f,
                               0x1p-126f,
                               1.0f,
                               -1.0f,
                               88.7f,
                               -103.9f,
                               -64.0f,
                               -64.00001f,
                               0.6875f,
                               FromBits(int32_t{0x7f800001})};
  ForStridedFloats(4099, [&](float x) { sample.push_back(x); });
  ForStridedFloats(65536 + 1, [&](float x) { sample.push_back(std::fabs(x)); });
  return sample;
}

class Lanes : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaSupported(GetParam())) {
      GTEST_SKIP() << "this processor has no " << IsaName(GetParam());
    }
  }
};

void ExpectSameBits(const std::vector<float>& x, const std::vector<float>& expected,
                    const std::vector<float>& got, const char* name) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(Bits(expected[i]), Bits(got[i])) << name << " of " << x[i] << ", element " << i;
  }
}

TEST_P(Lanes, HaveTheBitsOfTheScalarFunctions) {
  const std::vector<float> x = SampleFloats();
  const struct {
    const char* name;
    void (*rows)(Isa, const float*, float*, int64_t);
  } functions[] = {{"exp", ExpRows},         {"exp_cut", ExpCutRows}, {"log", LogRows},
                   {"tanh", TanhRows},       {"sqrt", SqrtRows},      {"bf16", RoundToBf16Rows},
                   {"nan", CanonicalNanRows}};
  std::vector<float> scalar(x.size()), lanes(x.size());
  for (const auto& function : functions) {
    function.rows(Isa::kScalar, x.data(), scalar.data(), x.size());
    function.rows(GetParam(), x.data(), lanes.data(), x.size());
    ExpectSameBits(x, scalar, lanes, function.name);
  }
}

TEST_P(Lanes, HaveTheScalarMaxAndMin) {
  const std::vector<float> all = SampleFloats();
  std::vector<float> a, b;
  for (size_t i = 0; i < 17; ++i) {  // every pair of the special ones
    for (size_t j = 0; j < 17; ++j) a.push_back(all[i]), b.push_back(all[j]);
  }
  for (size_t i = 0; i < all.size(); ++i)
    a.push_back(all[i]), b.push_back(all[(7 * i) % all.size()]);
  std::vector<float> scalar(a.size()), lanes(a.size());
  MaxRows(Isa::kScalar, a.data(), b.data(), scalar.data(), a.size());
  MaxRows(GetParam(), a.data(), b.data(), lanes.data(), a.size());
  ExpectSameBits(a, scalar, lanes, "max");
  MinRows(Isa::kScalar, a.data(), b.data(), scalar.data(), a.size());
  MinRows(GetParam(), a.data(), b.data(), lanes.data(), a.size());
  ExpectSameBits(a, scalar, lanes, "min");
}

TEST_P(Lanes, AnyLengthWritesItsElementsAndNoOthers) {
  const std::vector<float> x(40, -2.5f);
  for (int64_t n = 0; n <= 33; ++n) {
    std::vector<float> y(40, 7.0f);
    ExpRows(GetParam(), x.data(), y.data(), n);
    for (int64_t i = 0; i < 40; ++i) {
      ASSERT_EQ(Bits(i < n ? math::Exp(-2.5f) : 7.0f), Bits(y[i])) << n << " " << i;
    }
  }
}

TEST_P(Lanes, AreSummedInTheOrderOfClauseSix) {
  std::mt19937 random(3);
  std::vector<float> x(16 * 4096);
  for (float& v : x) v = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-20f;
  for (size_t i = 0; i < 16; ++i) x[i] = i == 3 ? kInf : (i == 9 ? -kInf : 1.0f);
  std::vector<float> scalar(4096), lanes(4096);
  LaneSums(Isa::kScalar, x.data(), scalar.data(), 4096);
  LaneSums(GetParam(), x.data(), lanes.data(), 4096);
  ExpectSameBits(x, scalar, lanes, "sum");
  int differ = 0;
  for (size_t group = 1; group < 4096; ++group) {
    const float* v = &x[16 * group];
    const auto pair = [v](int l) { return (v[l] + v[l + 8]) + (v[l + 4] + v[l + 12]); };
    ASSERT_EQ(Bits((pair(0) + pair(2)) + (pair(1) + pair(3))), Bits(lanes[group]));
    float chain = 0.0f;
    for (int l = 0; l < 16; ++l) chain += v[l];
    differ += chain != lanes[group];
  }
  EXPECT_GT(differ, 1000);  // the data can tell orders apart
}

TEST_P(Lanes, HaveTheScalarMaximum) {
  std::vector<float> x = SampleFloats();
  x.resize(x.size() / 16 * 16);
  x.insert(x.end(), 16, -0.0f);
  x[x.size() - 5] = 0.0f;
  const int64_t n = static_cast<int64_t>(x.size() / 16);
  std::vector<float> scalar(n), lanes(n);
  LaneMaxima(Isa::kScalar, x.data(), scalar.data(), n);
  LaneMaxima(GetParam(), x.data(), lanes.data(), n);
  ExpectSameBits(x, scalar, lanes, "maximum");
  EXPECT_EQ(Bits(0.0f), Bits(lanes.back()));
}

INSTANTIATE_TEST_SUITE_P(OnEveryInstructionSet, Lanes, testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return IsaName(info.param); });

}  // namespace
}  // namespace retrace
