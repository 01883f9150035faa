// The optimizer's CUDA kernels, run by the emulator: AdamW, its sums and counts, and the sums of
// squares give the bits of kernels/adamw.h, with special values, every action, clips per tensor and
// per row, on other grids and in other orders of threads.
#include <gtest/gtest.h>

#include <bit>

#include "kernels/adamw.h"
#include "kernels/cuda/device_optimizer.h"
#include "kernels/cuda/language.h"
#include "tests/longhand.h"

namespace retrace {
namespace {

using cuda::RunOrder;

struct Arrays {
  std::vector<float> g, p, m, v;

  bool operator==(const Arrays&) const = default;
};

Arrays RandomArrays(int64_t n, uint32_t seed, bool special) {
  std::mt19937 random(seed);
  Arrays a = {
      longhand::Values<float>(n, random, special), longhand::Values<float>(n, random, special),
      longhand::Values<float>(n, random, special), longhand::Values<float>(n, random, special)};
  for (float& x : a.v) x = std::fabs(x);
  return a;
}

OptimizerRow Row(TensorAction action) {
  OptimizerRow row;
  row.action = action;
  row.t = 3;
  row.lr = 3e-4f, row.eps = 1e-8f, row.weight_decay = 0.1f, row.update_clip = 0.7f;
  row.beta1 = 0.9f, row.one_minus_beta1 = 0.1f, row.beta2 = 0.95f, row.one_minus_beta2 = 0.05f;
  row.bias_correction1 = 0.271f, row.bias_correction2 = 0.142625f;
  return row;
}

// NaNs that AdamW stores are canonical; of sums a NaN is a NaN.
void ExpectSameStored(const std::vector<float>& expected, const std::vector<float>& got,
                      const char* name) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(expected[i]), std::bit_cast<uint32_t>(got[i]))
        << name << "[" << i << "]";
  }
}
void ExpectSameSum(double expected, double got, const char* name) {
  if (std::isnan(expected) && std::isnan(got)) return;
  EXPECT_EQ(std::bit_cast<uint64_t>(expected), std::bit_cast<uint64_t>(got)) << name;
}
void ExpectSameCounts(const OddNumbers& expected, const int32_t (&got)[4], const char* name) {
  EXPECT_EQ(expected, (OddNumbers{got[0], got[1], got[2], got[3]})) << name;
}

class CudaOptimizer : public testing::Test {
 protected:
  void TearDown() override {
    for (const std::string& fault : cuda::emulator::TakeFaults()) ADD_FAILURE() << fault;
    cuda::launch_shape() = {};
    cuda::emulator::SetOrder(RunOrder::kAscending);
  }
};

// The CPU's update of one block of elements, and what record.norms are made of.
void ExpectBlock(const DeviceAdamWArgs& args, const Arrays& before, const Arrays& after,
                 int64_t first, int64_t n, const DeviceBlockSums& got) {
  const auto at = [&](const std::vector<float>& x) { return x.data() + first; };
  ExpectSameSum(SumSquaresBlock(Isa::kScalar, at(before.p), n), got.p, "p");
  ExpectSameSum(SumSquaredChangeBlock(Isa::kScalar, at(before.p), at(after.p), n), got.change,
                "change");
  ExpectSameSum(SumSquaresBlock(Isa::kScalar, at(after.m), n), got.m, "m");
  ExpectSameSum(SumSquaresBlock(Isa::kScalar, at(after.v), n), got.v, "v");
  ExpectSameCounts(CountOdd(Isa::kScalar, args.g + first, n), got.odd[0], "odd g");
  ExpectSameCounts(CountOdd(Isa::kScalar, at(after.p), n), got.odd[1], "odd p");
  ExpectSameCounts(CountOdd(Isa::kScalar, at(after.m), n), got.odd[2], "odd m");
  ExpectSameCounts(CountOdd(Isa::kScalar, at(after.v), n), got.odd[3], "odd v");
}

void ExpectAdamWOfTheCpu(TensorAction action, int64_t n, bool special, bool per_row, bool summed) {
  SCOPED_TRACE(testing::Message() << n << " elements, action " << static_cast<int>(action)
                                  << (per_row ? ", clip per row" : "") << (summed ? ", sums" : ""));
  const Arrays before = RandomArrays(n, static_cast<uint32_t>(n) + 1, special);
  const int64_t cols = 7, first = 5;
  std::vector<float> rows((first + n) / cols + 1);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = 1.0f / static_cast<float>(1 + i % 5);
  Arrays expected = before, got = before;
  const OptimizerRow row = Row(action);
  for (int64_t i = 0; i < n; ++i) {
    AdamW(Isa::kScalar, row, per_row ? rows[(first + i) / cols] : 0.25f, expected.g.data() + i,
          expected.p.data() + i, expected.m.data() + i, expected.v.data() + i, 1);
  }
  std::vector<DeviceBlockSums> sums((n + kDeviceSumBlock - 1) / kDeviceSumBlock);
  DeviceAdamWArgs args = {.row = row, .clip = {.factor = 0.25f}, .g = got.g.data(),
                          .p = got.p.data(), .m = got.m.data(), .v = got.v.data(), .n = n,
                          .sums = summed ? sums.data() : nullptr};
  if (per_row) args.clip = {.rows = rows.data(), .first = first, .cols = cols};
  cuda::DeviceAdamW(args);
  ExpectSameStored(expected.p, got.p, "p");
  ExpectSameStored(expected.m, got.m, "m");
  ExpectSameStored(expected.v, got.v, "v");
  for (size_t b = 0; summed && b < sums.size(); ++b) {
    const int64_t at = static_cast<int64_t>(b) * kDeviceSumBlock;
    ExpectBlock(args, before, expected, at, std::min(kDeviceSumBlock, n - at), sums[b]);
  }
}

void ExpectAdamWEverywhere() {
  for (const TensorAction action :
       {TensorAction::kUpdate, TensorAction::kSkip, TensorAction::kFrozen}) {
    for (const int64_t n : {0, 1, 15, 33, 1000, 4096, 4097, 9001}) {
      ExpectAdamWOfTheCpu(action, n, n % 2 == 0, n % 3 == 0, true);
      ExpectAdamWOfTheCpu(action, n, n % 2 == 1, n % 3 == 1, false);
    }
  }
}

TEST_F(CudaOptimizer, AdamWAndItsSumsAreTheCpus) { ExpectAdamWEverywhere(); }

TEST_F(CudaOptimizer, AdamWIsTheSameOnOtherGridsAndInOtherOrders) {
  cuda::emulator::SetOrder(RunOrder::kDescending);
  cuda::launch_shape() = {.threads = 32, .blocks_most = 1};
  ExpectAdamWEverywhere();
  cuda::emulator::SetOrder(RunOrder::kShuffled);
  cuda::launch_shape() = {.threads = 96, .blocks_most = 3};
  ExpectAdamWEverywhere();
}

TEST_F(CudaOptimizer, SumsOfSquaresAreTheCpus) {
  for (const int64_t n : {int64_t{1}, int64_t{17}, kSquareBlock, kSquareBlock + 3}) {
    for (const bool special : {false, true}) {
      const Arrays a = RandomArrays(n, static_cast<uint32_t>(n), special);
      const int64_t blocks = (n + kSquareBlock - 1) / kSquareBlock;
      std::vector<double> sums(blocks), update_sums(blocks);
      const OptimizerRow row = Row(TensorAction::kUpdate);
      cuda::DeviceSumSquares(a.g.data(), n, sums.data());
      cuda::DeviceSumUpdateSquares({.row = row, .clip = {.factor = 0.5f}, .g = a.g.data(),
                                    .v = a.v.data(), .n = n, .sums = update_sums.data()});
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = b * kSquareBlock, count = std::min(kSquareBlock, n - at);
        ExpectSameSum(SumSquaresBlock(Isa::kScalar, a.g.data() + at, count), sums[b], "squares");
        ExpectSameSum(SumUpdateSquaresBlock(Isa::kScalar, row, 0.5f, a.g.data() + at,
                                            a.v.data() + at, count),
                      update_sums[b], "update squares");
      }
    }
  }
}

// What the comparison is for: a fused multiply-add in m's update changes bits here.
TEST_F(CudaOptimizer, AFusedMultiplyAddWouldBeSeen) {
  Arrays a = RandomArrays(1000, 3, false);
  const OptimizerRow row = Row(TensorAction::kUpdate);
  int differ = 0;
  for (size_t i = 0; i < a.m.size(); ++i) {
    const float fused = std::fma(row.beta1, a.m[i], row.one_minus_beta1 * a.g[i]);
    differ += fused != row.beta1 * a.m[i] + row.one_minus_beta1 * a.g[i];
  }
  EXPECT_GT(differ, 100);
}

}  // namespace
}  // namespace retrace
