// AdamW and the sum of squares against clause 12 and 11 written out, on every instruction set.
#include "kernels/adamw.h"

#include <gtest/gtest.h>

#include "tests/longhand.h"

namespace retrace {
namespace {

struct Arrays {
  std::vector<float> g, p, m, v;
};

Arrays RandomArrays(int64_t n, uint32_t seed, bool special) {
  std::mt19937 random(seed);
  Arrays a = {
      longhand::Values<float>(n, random, special), longhand::Values<float>(n, random, special),
      longhand::Values<float>(n, random, special), longhand::Values<float>(n, random, special)};
  for (float& x : a.v) x = std::fabs(x);
  return a;
}

OptimizerRow RowAt(int64_t t) {
  OptimizerRow row;
  row.t = t;
  row.lr = 3e-4f, row.eps = 1e-8f, row.weight_decay = 0.1f, row.update_clip = 0.7f;
  row.beta1 = 0.9f, row.one_minus_beta1 = static_cast<float>(1 - 0.9);
  row.beta2 = 0.95f, row.one_minus_beta2 = static_cast<float>(1 - 0.95);
  row.bias_correction1 = static_cast<float>(1 - math::PowInt(0.9, t));
  row.bias_correction2 = static_cast<float>(1 - math::PowInt(0.95, t));
  return row;
}

// Every assignment rounds to FP32 once; a NaN is stored as 0x7fc00000.
void Define(const OptimizerRow& row, float clip, Arrays* a) {
  const auto store = [](float x) { return std::isnan(x) ? std::bit_cast<float>(0x7fc00000u) : x; };
  for (size_t i = 0; i < a->p.size(); ++i) {
    if (row.action == TensorAction::kSkip) continue;
    const float g = clip * a->g[i];
    const float m_old = row.beta1 * a->m[i], m_new = row.one_minus_beta1 * g;
    const float m = m_old + m_new;
    const float v_old = row.beta2 * a->v[i], half = row.one_minus_beta2 * g;
    const float v_new = half * g;
    const float v = v_old + v_new;
    a->m[i] = store(m);
    a->v[i] = store(v);
    if (row.action == TensorAction::kFrozen) continue;
    const float m_hat = m / row.bias_correction1, v_hat = v / row.bias_correction2;
    const float root = std::sqrt(v_hat);
    const float denominator = root + row.eps;
    const float adam = m_hat / denominator;
    const float limited = adam * row.update_clip;
    const float decay = row.weight_decay * a->p[i];
    const float u = limited + decay;
    const float step = row.lr * u;
    a->p[i] = store(a->p[i] - step);
  }
}

// Bits, NaNs included: what AdamW stores is canonical.
void ExpectSameBits(const std::vector<float>& expected, const std::vector<float>& got,
                    const char* name) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(expected[i]), std::bit_cast<uint32_t>(got[i]))
        << name << "[" << i << "]: expected " << expected[i] << ", got " << got[i];
  }
}

class AdamWOfEveryIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaSupported(GetParam())) GTEST_SKIP() << "this processor has no " << IsaName(GetParam());
  }
};

TEST_P(AdamWOfEveryIsa, FollowsClause12) {
  uint32_t seed = 0;
  for (TensorAction action : {TensorAction::kUpdate, TensorAction::kSkip, TensorAction::kFrozen}) {
    for (int64_t n : {0, 1, 7, 8, 15, 16, 17, 33, 1000}) {
      for (bool special : {false, true}) {
        SCOPED_TRACE("action " + std::to_string(static_cast<int>(action)) + ", n " +
                     std::to_string(n));
        OptimizerRow row = RowAt(1 + 50 * (seed % 3));
        row.action = action;
        const float clip = seed % 2 ? 0.125f : 1.0f;
        Arrays expected = RandomArrays(n, ++seed, special), got = expected;
        if (n > 0) got.g[0] = expected.g[0] = special ? std::nanf("7") : 0.0f;
        Define(row, clip, &expected);
        AdamW(GetParam(), row, clip, got.g.data(), got.p.data(), got.m.data(), got.v.data(), n);
        ExpectSameBits(expected.p, got.p, "p");
        ExpectSameBits(expected.m, got.m, "m");
        ExpectSameBits(expected.v, got.v, "v");
      }
    }
  }
}

TEST_P(AdamWOfEveryIsa, GivesTheSameBitsForAnyCutOfTheTensor) {
  const OptimizerRow row = RowAt(3);
  Arrays whole = RandomArrays(501, 9, true), cut = whole;
  AdamW(GetParam(), row, 0.5f, whole.g.data(), whole.p.data(), whole.m.data(), whole.v.data(), 501);
  for (int64_t first = 0; first < 501; first += 37) {
    const int64_t n = std::min<int64_t>(37, 501 - first);
    AdamW(GetParam(), row, 0.5f, cut.g.data() + first, cut.p.data() + first, cut.m.data() + first,
          cut.v.data() + first, n);
  }
  ExpectSameBits(whole.p, cut.p, "p");
  ExpectSameBits(whole.m, cut.m, "m");
  ExpectSameBits(whole.v, cut.v, "v");
}

TEST_P(AdamWOfEveryIsa, SumsSquaresInSixteenLanesOfFp64) {
  std::mt19937 random(10);
  for (int64_t n : {0, 1, 15, 16, 17, 100, 4099, 65536}) {
    for (bool special : {false, true}) {
      const std::vector<float> x = longhand::Values<float>(n, random, special && n < 50);
      std::vector<double> squares;
      for (float value : x) squares.push_back(static_cast<double>(value) * value);
      EXPECT_EQ(longhand::Canonical(longhand::Sum(squares)),
                longhand::Canonical(SumSquaresBlock(GetParam(), x.data(), n)))
          << n << " elements";
    }
  }
}

// Every FP32 operation rounded on its own, as in AdamW; then FP64.
TEST_P(AdamWOfEveryIsa, SumsSquaresOfUpdatesInSixteenLanesOfFp64) {
  std::mt19937 random(12);
  const OptimizerRow row = {
      .beta2 = 0.95f, .one_minus_beta2 = 0.05f, .bias_correction2 = 0.0975f, .eps = 0.25f};
  const float clip = 0.75f;
  for (int64_t n : {0, 1, 15, 16, 17, 100, 4099}) {
    for (bool special : {false, true}) {
      const std::vector<float> g = longhand::Values<float>(n, random, special && n < 50);
      std::vector<float> v = longhand::Values<float>(n, random, special && n < 50);
      std::vector<double> terms;
      for (int64_t i = 0; i < n; ++i) {
        v[i] = v[i] < 0 ? -v[i] : v[i];
        volatile float clipped = clip * g[i];
        volatile float kept = row.beta2 * v[i], rest = row.one_minus_beta2 * clipped;
        volatile float taken = rest * clipped, moved = kept + taken;
        volatile float corrected = moved / row.bias_correction2;
        const double x = clipped, least = 0.0625;
        terms.push_back(x * x / (corrected < least ? least : static_cast<double>(corrected)));
      }
      EXPECT_EQ(
          longhand::Canonical(longhand::Sum(terms)),
          longhand::Canonical(SumUpdateSquaresBlock(GetParam(), row, clip, g.data(), v.data(), n)))
          << n << " elements";
    }
  }
}

TEST_P(AdamWOfEveryIsa, SumsSquaredChangesAsItSumsSquares) {
  std::mt19937 random(12);
  for (int64_t n : {0, 1, 15, 16, 17, 100, 4096, 65536}) {
    const std::vector<float> before = longhand::Values<float>(n, random),
                             after = longhand::Values<float>(n, random);
    std::vector<double> squares;
    for (int64_t i = 0; i < n; ++i) {
      const double change = static_cast<double>(after[i]) - before[i];
      squares.push_back(change * change);
    }
    EXPECT_EQ(longhand::Sum(squares),
              SumSquaredChangeBlock(GetParam(), before.data(), after.data(), n))
        << n << " elements";
  }
}

TEST_P(AdamWOfEveryIsa, CountsOddNumbers) {
  std::mt19937 random(11);
  for (int64_t n : {0, 1, 15, 16, 17, 4099, 65536}) {
    const std::vector<float> x = longhand::Values<float>(n, random, true);
    OddNumbers expected;
    for (float value : x) {
      const int kind = std::fpclassify(value);
      expected.zero += kind == FP_ZERO;
      expected.subnormal += kind == FP_SUBNORMAL;
      expected.infinite += kind == FP_INFINITE;
      expected.nan += kind == FP_NAN;
    }
    EXPECT_TRUE(expected == CountOdd(GetParam(), x.data(), n)) << n << " elements";
    if (n > 4000) {
      EXPECT_TRUE(expected.zero && expected.subnormal && expected.infinite && expected.nan);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AdamWOfEveryIsa,
                         testing::Values(Isa::kScalar, Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return IsaName(info.param); });

}  // namespace
}  // namespace retrace
