// XXH3-128 of leaves: eight threads to a leaf, each with one of the algorithm's eight accumulators.
#include "kernels/cuda/device_digest.h"
#include "kernels/cuda/device_rows.h"

namespace retrace::cuda {
namespace {

constexpr int64_t kLeafBytes = int64_t{1} << 20;  // kDigestLeafBytes of core/digest.h
constexpr int kAccumulators = 8;
constexpr int64_t kStripeBytes = 64;
constexpr int kSecretBytes = sizeof(DigestSecret);
constexpr int kStripes = (kSecretBytes - kStripeBytes) / 8;  // of a block

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u, kPrime64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u, kAvalanche = 0x165667919E3779F9u;

RT_DEVICE uint64_t InitialAccumulator(int i) {
  switch (i) {
    case 0: return kPrime32_3;
    case 1: return kPrime64_1;
    case 2: return kPrime64_2;
    case 3: return kPrime64_3;
    case 4: return kPrime64_4;
    case 5: return kPrime32_2;
    case 6: return kPrime64_5;
    default: return kPrime32_1;
  }
}

// Little-endian, from memory aligned to floats.
RT_DEVICE uint64_t Word(const uint32_t* data, int64_t byte) {
  const uint32_t* at = data + byte / 4;
  return at[0] | static_cast<uint64_t>(at[1]) << 32;
}
RT_DEVICE uint64_t SecretWord(const DigestSecret& secret, int byte) {
  uint64_t word = 0;
  RT_UNROLL
  for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(secret.bytes[byte + i]) << (8 * i);
  return word;
}

RT_DEVICE uint64_t FoldedProduct(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Thread i's part of a stripe: accumulator i takes the neighbour's word and its own keyed halves.
RT_DEVICE uint64_t Accumulate(uint64_t accumulator, const uint32_t* leaf, int64_t byte,
                              uint64_t key, int i) {
  const uint64_t keyed = Word(leaf, byte + 8 * i) ^ key;
  return accumulator + Word(leaf, byte + 8 * (i ^ 1)) + (keyed & 0xffffffffu) * (keyed >> 32);
}

// All eight threads get one half of the digest.
RT_DEVICE uint64_t Merge(unsigned mask, uint64_t accumulator, uint64_t key, uint64_t start) {
  const uint64_t keyed = accumulator ^ key;
  const uint64_t other = __shfl_xor_sync(mask, keyed, 1, kAccumulators);
  uint64_t sum = FoldedProduct(keyed, other);  // the same in both threads of a pair
  sum += __shfl_xor_sync(mask, sum, 2, kAccumulators);
  sum += __shfl_xor_sync(mask, sum, 4, kAccumulators);
  uint64_t hash = start + sum;
  hash ^= hash >> 37;
  hash *= kAvalanche;
  return hash ^ (hash >> 32);
}

__global__ void DigestLeavesKernel(const __grid_constant__ DigestSecret secret,
                                   const uint32_t* data, int64_t size_bytes, LeafDigest* digests) {
  const int64_t leaves = (size_bytes + kLeafBytes - 1) / kLeafBytes;
  const int i = static_cast<int>(threadIdx.x % kAccumulators);
  const unsigned mask = 0xffu << (threadIdx.x % 32 / kAccumulators * kAccumulators);
  const uint64_t scramble = SecretWord(secret, kSecretBytes - kStripeBytes + 8 * i);
  const uint64_t final_key = SecretWord(secret, kSecretBytes - kStripeBytes - 7 + 8 * i);
  for (int64_t leaf = ThreadOfGrid() / kAccumulators; leaf < leaves;
       leaf += ThreadsOfGrid() / kAccumulators) {
    const int64_t rest = size_bytes - leaf * kLeafBytes;
    const int64_t length = rest < kLeafBytes ? rest : kLeafBytes;
    if (length <= kShortLeafBytes) continue;
    const uint32_t* from = data + leaf * (kLeafBytes / 4);
    uint64_t accumulator = InitialAccumulator(i);
    // The last byte belongs to the last stripe, which may overlap the one before.
    const int64_t stripes = (length - 1) / kStripeBytes;
    for (int64_t stripe = 0; stripe < stripes; ++stripe) {
      const int place = static_cast<int>(stripe % kStripes);
      accumulator = Accumulate(accumulator, from, stripe * kStripeBytes,
                               SecretWord(secret, 8 * place + 8 * i), i);
      if (place == kStripes - 1) {
        accumulator = ((accumulator ^ (accumulator >> 47)) ^ scramble) * kPrime32_1;
      }
    }
    accumulator = Accumulate(accumulator, from, length - kStripeBytes, final_key, i);
    const uint64_t bytes = static_cast<uint64_t>(length);
    const uint64_t low =
        Merge(mask, accumulator, SecretWord(secret, 11 + 8 * i), bytes * kPrime64_1);
    const uint64_t high =
        Merge(mask, accumulator, SecretWord(secret, kSecretBytes - kStripeBytes - 11 + 8 * i),
              ~(bytes * kPrime64_2));
    if (i != 0) continue;
    for (int byte = 0; byte < 8; ++byte) {
      digests[leaf].bytes[byte] = static_cast<uint8_t>(high >> (56 - 8 * byte));
      digests[leaf].bytes[8 + byte] = static_cast<uint8_t>(low >> (56 - 8 * byte));
    }
  }
}

}  // namespace

void DeviceDigestLeaves(const DigestSecret& secret, const void* data, int64_t size_bytes,
                        LeafDigest* digests) {
  if (size_bytes == 0) return;
  const int64_t leaves = (size_bytes + kLeafBytes - 1) / kLeafBytes;
  const unsigned threads = launch_shape().threads;
  Launch("DigestLeaves", DigestLeavesKernel, GridFor(leaves, threads / kAccumulators), threads,
         secret, static_cast<const uint32_t*>(data), size_bytes, digests);
}

}  // namespace retrace::cuda
