// The CUDA kernels of the op table, run by the emulator: each op gives the bits of the scalar table,
// on odd shapes, with every rounding and special values, under other launch shapes and in any order
// of threads and blocks. And the table is complete: an op without a kernel or a test fails here.
#include <gtest/gtest.h>

#include <array>
#include <bit>

#include "kernels/cuda/device_ops.h"
#include "kernels/cuda/language.h"
#include "tests/op_cases.h"

namespace retrace {
namespace {

using namespace op_cases;
using cuda::DeviceOps;
using cuda::RunOrder;

void ExpectNoFaults() {
  for (const std::string& fault : cuda::emulator::TakeFaults()) ADD_FAILURE() << fault;
}

// One way to run the kernels.
struct Manner {
  cuda::LaunchShape shape;
  RunOrder order;
};

void Use(const Manner& manner) {
  cuda::launch_shape() = manner.shape;
  cuda::emulator::SetOrder(manner.order);
}

class CudaOps : public testing::Test {
 protected:
  void TearDown() override { Use({{}, RunOrder::kAscending}); }
};

template <class T>
void ExpectBitsOfTheScalarTable(const Manner& manner, uint32_t part, uint32_t parts) {
  Use(manner);
  for (const Shape& shape : AllShapes()) {
    if (shape.seed % parts != part) continue;
    SCOPED_TRACE(Describe(shape));
    for (const OpCase<T>& c : AllCases<T>(shape)) {
      ExpectSame(c, Outputs(c, Ops<T>(Isa::kScalar), {c.first, c.last}),
                 Outputs(c, DeviceOps<T>(), {c.first, c.last}));
      ExpectNoFaults();
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST_F(CudaOps, GiveTheBitsOfTheScalarTableInFp32) {
  ExpectBitsOfTheScalarTable<float>({{}, RunOrder::kAscending}, 0, 1);
}

TEST_F(CudaOps, GiveTheBitsOfTheScalarTableInFp64) {
  ExpectBitsOfTheScalarTable<double>({{}, RunOrder::kAscending}, 0, 1);
}

// One warp, or blocks of many, few enough that each takes several turns.
TEST_F(CudaOps, GiveTheSameBitsUnderOtherLaunchShapes) {
  ExpectBitsOfTheScalarTable<float>({{32, 1}, RunOrder::kAscending}, 0, 3);
  ExpectBitsOfTheScalarTable<float>({{256, 3}, RunOrder::kAscending}, 1, 3);
  ExpectBitsOfTheScalarTable<double>({{64, 2}, RunOrder::kAscending}, 2, 3);
}

TEST_F(CudaOps, GiveTheSameBitsInAnyOrderOfThreadsAndBlocks) {
  ExpectBitsOfTheScalarTable<float>({{64, 5}, RunOrder::kDescending}, 0, 3);
  ExpectBitsOfTheScalarTable<float>({{32, 64}, RunOrder::kShuffled}, 1, 3);
  ExpectBitsOfTheScalarTable<double>({{32, 64}, RunOrder::kShuffled}, 2, 3);
}

TEST_F(CudaOps, GiveTheSameBitsForAnyCutOfTheRange) {
  for (const Shape& shape : AllShapes()) {
    if (shape.seed % 5 != 0) continue;
    SCOPED_TRACE(Describe(shape));
    for (const OpCase<float>& c : AllCases<float>(shape)) {
      const int64_t mid = c.first + (c.last - c.first) / 3;
      ExpectSame(c, Outputs(c, Ops<float>(Isa::kScalar), {c.first, c.last}),
                 Outputs(c, DeviceOps<float>(), {c.first, mid, mid, c.last}));
    }
  }
  ExpectNoFaults();
}

// ---- The walk of the table -----------------------------------------------------------------------

template <class T>
using Entries = std::array<void*, sizeof(OpTable<T>) / sizeof(void*)>;

int g_planted_calls = 0;

// An op that does nothing but be called, whatever its arguments.
void Planted(const void*, int64_t, int64_t) { ++g_planted_calls; }

// How many cases call entry `op` of the table.
template <class T>
int CallsOf(size_t op) {
  Entries<T> entries = std::bit_cast<Entries<T>>(Ops<T>(Isa::kScalar));
  entries[op] = reinterpret_cast<void*>(Planted);
  const OpTable<T> planted = std::bit_cast<OpTable<T>>(entries);
  g_planted_calls = 0;
  for (const OpCase<T>& c : AllCases<T>(AllShapes()[100])) {
    Outputs(c, planted, {c.first, c.last});
  }
  return g_planted_calls;
}

TEST_F(CudaOps, EveryOpOfTheTableHasAKernelAndACase) {
  const Entries<float> entries = std::bit_cast<Entries<float>>(DeviceOps<float>());
  const Entries<double> entries64 = std::bit_cast<Entries<double>>(DeviceOps<double>());
  ASSERT_GE(entries.size(), 23u);
  for (size_t op = 0; op < entries.size(); ++op) {
    EXPECT_NE(nullptr, entries[op]) << "entry " << op << " of OpTable<float> has no CUDA kernel";
    EXPECT_NE(nullptr, entries64[op]) << "entry " << op << " of OpTable<double> has no CUDA kernel";
    EXPECT_GT(CallsOf<float>(op), 0) << "no case of tests/op_cases.h calls entry " << op;
    EXPECT_GT(CallsOf<double>(op), 0) << "no case of tests/op_cases.h calls entry " << op;
  }
}

// The comparison sees a kernel that is wrong: here one that leaves out the last row.
TEST_F(CudaOps, AKernelThatLeavesOutItsLastRowIsSeen) {
  const OpCase<float> c = RowMaxCase(CaseMaker<float>(AllShapes()[3]));
  const Arrays<float> expected = Outputs(c, Ops<float>(Isa::kScalar), {c.first, c.last});
  const Arrays<float> got = Outputs(c, DeviceOps<float>(), {c.first, c.last - 1});
  EXPECT_EQ(kFence + c.last - 1, longhand::FirstDifference(expected[0], got[0]));
}

}  // namespace
}  // namespace retrace
