// The CUDA kernel of the digest, run by the emulator: XXH3-128 of leaves as the library has it.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/digest.h"
#include "kernels/cuda/device_digest.h"
#include "kernels/cuda/language.h"

namespace retrace {
namespace {

using cuda::RunOrder;

class CudaDigest : public testing::Test {
 protected:
  void TearDown() override {
    for (const std::string& fault : cuda::emulator::TakeFaults()) ADD_FAILURE() << fault;
    cuda::launch_shape() = {};
    cuda::emulator::SetOrder(RunOrder::kAscending);
  }
};

void ExpectDigestsOfTheLibrary(int64_t size_bytes) {
  SCOPED_TRACE(testing::Message() << size_bytes << " bytes");
  cuda::GuardedMemory memory(size_bytes, cuda::GuardedMemory::Place::kAtEnd);
  auto* data = static_cast<uint8_t*>(memory.data());
  std::mt19937 random(static_cast<uint32_t>(size_bytes));
  for (int64_t i = 0; i < size_bytes; ++i) data[i] = static_cast<uint8_t>(random());
  const int64_t leaf = static_cast<int64_t>(kDigestLeafBytes);
  std::vector<cuda::LeafDigest> digests((size_bytes + leaf - 1) / leaf);
  cuda::DeviceDigestLeaves(Xxh3Secret(), data, size_bytes, digests.data());
  for (size_t i = 0; i < digests.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * leaf, length = std::min(leaf, size_bytes - at);
    Digest expected = DigestOf(data + at, static_cast<size_t>(length));
    if (length <= cuda::kShortLeafBytes) expected = Digest();  // the processor's
    EXPECT_EQ(0, std::memcmp(expected.bytes.data(), digests[i].bytes, 16)) << "leaf " << i;
  }
}

TEST_F(CudaDigest, LeavesHaveTheDigestsOfTheLibraryAtEveryLength) {
  for (int64_t size_bytes = 0; size_bytes <= 2300; size_bytes += 4) {
    ExpectDigestsOfTheLibrary(size_bytes);
  }
}

TEST_F(CudaDigest, ManyLeavesHaveThemOnOtherGridsAndInOtherOrders) {
  const int64_t leaf = static_cast<int64_t>(kDigestLeafBytes);
  for (const RunOrder order : {RunOrder::kAscending, RunOrder::kDescending, RunOrder::kShuffled}) {
    cuda::emulator::SetOrder(order);
    ExpectDigestsOfTheLibrary(2 * leaf + 1000);
    cuda::launch_shape() = {.threads = 32, .blocks_most = 1};
    ExpectDigestsOfTheLibrary(5 * leaf + 240);
  }
}

TEST_F(CudaDigest, AFlippedBitIsAnotherDigest) {
  std::vector<uint32_t> data(1000, 7);
  cuda::LeafDigest before, after;
  cuda::DeviceDigestLeaves(Xxh3Secret(), data.data(), 4000, &before);
  data[999] ^= 1;
  cuda::DeviceDigestLeaves(Xxh3Secret(), data.data(), 4000, &after);
  EXPECT_NE(0, std::memcmp(before.bytes, after.bytes, 16));
}

}  // namespace
}  // namespace retrace
