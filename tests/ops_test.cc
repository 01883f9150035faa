// Every op of the table against its definition written out from the header's words (scalar, FP32
// and FP64), and every instruction set against the scalar table: the same bits, on odd shapes, with
// every rounding, on values that IEEE 754 treats apart, and for any cut of the range.
#include "kernels/ops.h"

#include <gtest/gtest.h>

#include "tests/op_cases.h"

namespace retrace {
namespace {

using namespace op_cases;

template <class T>
void ExpectScalarFollowsTheDefinitions() {
  for (const Shape& shape : AllShapes()) {
    SCOPED_TRACE(Describe(shape));
    for (const OpCase<T>& c : AllCases<T>(shape)) {
      ExpectSame(c, Define(c), Outputs(c, Ops<T>(Isa::kScalar), {c.first, c.last}));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Ops, ScalarOpsFollowTheirDefinitionsInFp32) { ExpectScalarFollowsTheDefinitions<float>(); }

TEST(Ops, ScalarOpsFollowTheirDefinitionsInFp64) { ExpectScalarFollowsTheDefinitions<double>(); }

class OpsOfEveryIsa : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!IsaSupported(GetParam())) GTEST_SKIP() << "this processor has no " << IsaName(GetParam());
  }
};

TEST_P(OpsOfEveryIsa, GiveTheBitsOfTheScalarTable) {
  for (const Shape& shape : AllShapes()) {
    SCOPED_TRACE(Describe(shape));
    for (const OpCase<float>& c : AllCases<float>(shape)) {
      ExpectSame(c, Outputs(c, Ops<float>(Isa::kScalar), {c.first, c.last}),
                 Outputs(c, Ops<float>(GetParam()), {c.first, c.last}));
      if (HasFatalFailure()) return;
    }
  }
}

void ExpectSameBitsForAnyCut(Isa isa) {
  std::mt19937 random(5);
  for (const Shape& shape : AllShapes()) {
    if (shape.seed % 3 != 0) continue;
    SCOPED_TRACE(Describe(shape));
    for (const OpCase<float>& c : AllCases<float>(shape)) {
      std::vector<int64_t> cuts = {c.first, c.last};
      for (int i = 0; i < 3; ++i) cuts.push_back(c.first + random() % (c.last - c.first + 1));
      std::sort(cuts.begin(), cuts.end());
      ExpectSame(c, Outputs(c, Ops<float>(isa), {c.first, c.last}),
                 Outputs(c, Ops<float>(isa), cuts));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Ops, ScalarOpsGiveTheSameBitsForAnyCutOfTheRange) { ExpectSameBitsForAnyCut(Isa::kScalar); }

TEST_P(OpsOfEveryIsa, GiveTheSameBitsForAnyCutOfTheRange) { ExpectSameBitsForAnyCut(GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, OpsOfEveryIsa, testing::Values(Isa::kAvx2, Isa::kAvx512),
                         [](const auto& info) { return IsaName(info.param); });

// Products that underflow leave -0 in every lane. A lane without an element in the last vector must
// stand still: taking part with +0 would make the sum +0.
void ExpectMinusZeroKept(Isa isa) {
  const std::vector<float> tiny(64, 1e-30f), minus(64, -1e-30f);
  for (int64_t n : {16, 17, 31, 33}) {
    float dot = 1;
    Ops<float>(isa).row_dot({tiny.data(), minus.data(), &dot, n, n, n}, 0, 1);
    EXPECT_EQ(std::bit_cast<uint32_t>(-0.0f), std::bit_cast<uint32_t>(dot)) << n << " elements";
  }
  // Row 19 of 40 sees keys 0 .. 19. With c = -0, the entry of dp that is -0 gives (-0) - (-0) = +0.
  // (Its own product is +0 before key 19, of the same lane, makes that lane -0.)
  const std::vector<float> p(40 * 40, 1e-30f);
  std::vector<float> dp(40 * 40, -1e-30f);
  dp[19 * 40 + 3] = -0.0f;
  Ops<float>(isa).softmax_backward({p.data(), dp.data(), 40, 0, 1.0f, Rounding::kNone}, 19, 20);
  EXPECT_EQ(0u, std::bit_cast<uint32_t>(dp[19 * 40 + 3]));
}

TEST(Ops, ScalarChainsKeepMinusZero) { ExpectMinusZeroKept(Isa::kScalar); }

TEST_P(OpsOfEveryIsa, ChainsKeepMinusZero) { ExpectMinusZeroKept(GetParam()); }

// The comparison above sees a NaN as a NaN; this one shows that it sees all else.
TEST(Ops, AFlippedBitIsADifference) {
  const OpCase<float> c = AllCases<float>(AllShapes()[100])[9];
  Arrays<float> expected = Outputs(c, Ops<float>(Isa::kScalar), {c.first, c.last});
  Arrays<float> got = expected;
  float& x = got[0][kFence + 3];
  ASSERT_FALSE(std::isnan(x));
  x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) ^ 1u);
  EXPECT_EQ(kFence + 3, longhand::FirstDifference(expected[0], got[0]));
}

}  // namespace
}  // namespace retrace
