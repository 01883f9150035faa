// The emulator reports what it says it does: each fault is planted in a small kernel. And it lets
// sound kernels pass in every order of threads.
#include "kernels/cuda/emulator.h"

#include <gtest/gtest.h>

#include <numeric>

namespace retrace::cuda {
namespace {

using testing::Test;

class Emulator : public Test {
 protected:
  void TearDown() override {
    emulator::SetOrder(RunOrder::kAscending);
    emulator::TakeFaults();
  }

  // Exactly one kind of fault, and it says `what`.
  void ExpectFault(const std::string& what) {
    const std::vector<std::string> faults = emulator::TakeFaults();
    ASSERT_FALSE(faults.empty()) << "expected a fault about: " << what;
    for (const std::string& fault : faults) {
      EXPECT_NE(std::string::npos, fault.find(what)) << "got: " << fault;
    }
  }
  void ExpectNoFault() {
    for (const std::string& fault : emulator::TakeFaults()) ADD_FAILURE() << fault;
  }
};

constexpr RunOrder kOrders[] = {RunOrder::kAscending, RunOrder::kDescending, RunOrder::kShuffled};

// out[block, i] = in[block, threads - 1 - i], by way of shared memory.
__global__ void Reverse(const int* in, int* out) {
  __shared__ Shared<int, 64> tile;
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  const int at = static_cast<int>(blockIdx.x) * n;
  tile[t] = in[at + t];
  __syncthreads();
  out[at + t] = tile[n - 1 - t];
}

TEST_F(Emulator, SharedMemoryAndBarriersWorkInEveryOrder) {
  for (RunOrder order : kOrders) {
    emulator::SetOrder(order);
    std::vector<int> in(192), out(192, -1);
    std::iota(in.begin(), in.end(), 0);
    Launch("Reverse", Reverse, 3, 64, in.data(), out.data());
    for (int i = 0; i < 192; ++i) ASSERT_EQ(i / 64 * 64 + 63 - i % 64, out[i]);
    ExpectNoFault();
  }
}

__global__ void ButterflySum(const double* in, double* out) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0xffffu : 0xffff0000u;
  double sum = in[threadIdx.x];
  // The two halves of a warp go different ways, as rows of different length do.
  if (threadIdx.x % 32 >= 16) sum = sum + 1;
  for (int h = 8; h > 0; h /= 2) sum = sum + __shfl_xor_sync(mask, sum, h, 16);
  out[threadIdx.x] = sum;
}

TEST_F(Emulator, ShufflesExchangeWithinTheirGroup) {
  for (RunOrder order : kOrders) {
    emulator::SetOrder(order);
    std::vector<double> in(64), out(64);
    std::iota(in.begin(), in.end(), 0.0);
    Launch("ButterflySum", ButterflySum, 1, 64, in.data(), out.data());
    for (int i = 0; i < 64; ++i) {
      const int group = i / 16;
      ASSERT_EQ(group * 256 + 120 + (group % 2) * 16, out[i]) << "thread " << i;
    }
    ExpectNoFault();
  }
}

// ---- Planted faults ------------------------------------------------------------------------------

__global__ void ReverseWithoutBarrier(const int* in, int* out) {
  __shared__ Shared<int, 64> tile;
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  tile[t] = in[t];
  if (t >= n / 2) out[t] = tile[n - 1 - t];
}

// In ascending order the values come out right by luck; the fault is reported all the same.
TEST_F(Emulator, AMissingBarrierIsSeenEvenWhereTheResultIsRight) {
  std::vector<int> in(64), out(64);
  std::iota(in.begin(), in.end(), 0);
  Launch("ReverseWithoutBarrier", ReverseWithoutBarrier, 1, 64, in.data(), out.data());
  EXPECT_EQ(0, out[63]);
  ExpectFault("no __syncthreads between");
}

__global__ void OverwriteWhatOthersRead(int* out) {
  __shared__ Shared<int, 2> tile;
  if (threadIdx.x == 0) tile[0] = 7;
  __syncthreads();
  out[threadIdx.x] = tile[0];
  if (threadIdx.x == 31) tile[0] = 8;
}

TEST_F(Emulator, AWriteOverWhatAnotherThreadStillReadsIsSeen) {
  std::vector<int> out(32);
  Launch("OverwriteWhatOthersRead", OverwriteWhatOthersRead, 1, 32, out.data());
  ExpectFault("which another thread reads, with no __syncthreads between");
}

__global__ void AllWriteOne() {
  __shared__ Shared<int, 1> one;
  one[0] = 5;
}

TEST_F(Emulator, TwoWritersOfOneElementAreSeen) {
  Launch("AllWriteOne", AllWriteOne, 1, 2);
  ExpectFault("wrote too");
}

__global__ void ReadUnwritten(int* out) {
  __shared__ Shared<int, 4> tile;
  if (blockIdx.x == 0) tile[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * 4 + threadIdx.x] = tile[threadIdx.x];
}

// What the block before left there does not count.
TEST_F(Emulator, ASharedElementThatThisBlockDidNotWriteIsSeen) {
  std::vector<int> out(8);
  Launch("ReadUnwritten", ReadUnwritten, 2, 4, out.data());
  ExpectFault("ReadUnwritten, block (1, 0)");
}

__global__ void SharedOutOfBounds(int offset) {
  __shared__ Shared<int, 8> tile;
  tile[static_cast<int>(threadIdx.x) + offset] = 1;
}

TEST_F(Emulator, ASharedIndexOutsideOfTheArrayIsSeen) {
  Launch("SharedOutOfBounds", SharedOutOfBounds, 1, 8, 0);
  ExpectNoFault();
  Launch("SharedOutOfBounds", SharedOutOfBounds, 1, 8, 1);
  ExpectFault("thread 7: touches element 8 of a shared array of 8");
  Launch("SharedOutOfBounds", SharedOutOfBounds, 1, 8, -1);
  ExpectFault("thread 0: touches element -1 of a shared array of 8");
}

__global__ void SomeLeaveBeforeTheBarrier() {
  if (threadIdx.x >= 3) return;
  __syncthreads();
}

TEST_F(Emulator, ABarrierThatSomeThreadsDoNotReachIsSeen) {
  Launch("SomeLeaveBeforeTheBarrier", SomeLeaveBeforeTheBarrier, 1, 8);
  ExpectFault("that 5 threads left the kernel without reaching");
}

__global__ void TwoBarriers() {
  if (threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

TEST_F(Emulator, ABarrierInADivergentBranchIsSeen) {
  Launch("TwoBarriers", TwoBarriers, 1, 4);
  ExpectFault("where another thread waits in line");
}

__global__ void LonelyShuffle(int* out) {
  int x = 1;
  if (threadIdx.x != 5) x = __shfl_xor_sync(0xffffffffu, x, 1);
  out[threadIdx.x] = x;
}

TEST_F(Emulator, AShuffleThatALaneDoesNotReachIsSeen) {
  std::vector<int> out(32);
  Launch("LonelyShuffle", LonelyShuffle, 1, 32, out.data());
  ExpectFault("for lanes of its mask that do not come");
}

__global__ void Store(float* out, int64_t offset) { out[threadIdx.x + offset] = 1; }
__global__ void Load(const float* in, float* out, int64_t offset) {
  out[threadIdx.x] = in[threadIdx.x + offset];
}

TEST_F(Emulator, AccessesBeyondGuardedMemoryAreSeenOnBothSides) {
  for (const auto place : {GuardedMemory::Place::kAtEnd, GuardedMemory::Place::kAtStart}) {
    const bool at_end = place == GuardedMemory::Place::kAtEnd;
    const int64_t wrong = at_end ? 1 : -1;
    GuardedMemory memory(33 * sizeof(float), place);
    float* data = static_cast<float*>(memory.data());
    std::vector<float> out(33);
    Launch("Store", Store, 1, 33, data, int64_t{0});
    Launch("Load", Load, 1, 33, data, out.data(), int64_t{0});
    ExpectNoFault();
    EXPECT_EQ(1.0f, data[32]);
    const std::string what = std::string(at_end ? "thread 32" : "thread 0") + ": touches byte " +
                             (at_end ? "132" : "-4") + " of an array of 132 bytes";
    Launch("Store", Store, 1, 33, data, wrong);
    ExpectFault("Store, block (0, 0), " + what);
    Launch("Load", Load, 1, 33, data, out.data(), wrong);
    ExpectFault("Load, block (0, 0), " + what);
    Launch("Store", Store, 1, 33, data, int64_t{0});  // the next launch is as any other
    ExpectNoFault();
  }
}

TEST_F(Emulator, AWriteIntoTheSlackOfGuardedMemoryIsSeenInTheEnd) {
  {
    GuardedMemory memory(8, GuardedMemory::Place::kAtEnd);
    Launch("Store", Store, 1, 1, static_cast<float*>(memory.data()), int64_t{-1});
    ExpectNoFault();
  }
  ExpectFault("byte -4 of an array of 8 bytes was written");
}

__global__ void NullStore(float* out) { out[0] = 1; }

TEST_F(Emulator, ANullPointerIsSeenAndEndsTheLaunchAlone) {
  Launch("NullStore", NullStore, 1, 4, static_cast<float*>(nullptr));
  ExpectFault("touches memory that is not there");
}

}  // namespace
}  // namespace retrace::cuda
