// DeviceDigest: XXH3-128 of a tensor's leaves on a CUDA device. Used as DeviceOps is.
//
// Computes   digests[i] = XXH3-128 of the i-th leaf of kDigestLeafBytes, the last being shorter, in
//            the canonical byte order of core/digest.h
// Shapes     size_bytes a multiple of 4. A last leaf of 240 bytes or less, which XXH3 treats apart, is
//            left to the processor: its digest is not written
// Order      integers: none
// Guarantee  the digests of core/digest.h for any grid
// Clause     15
// Source     XXH3 by Yann Collet, as specified in xxHash's doc/xxhash_spec.md
#ifndef RETRACE_KERNELS_CUDA_DEVICE_DIGEST_H_
#define RETRACE_KERNELS_CUDA_DEVICE_DIGEST_H_

#include <cstdint>

#include "core/digest_secret.h"

namespace retrace::cuda {

struct LeafDigest {
  uint8_t bytes[16];
};

inline constexpr int64_t kShortLeafBytes = 240;

void DeviceDigestLeaves(const DigestSecret& secret, const void* data, int64_t size_bytes,
                        LeafDigest* digests);

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_DIGEST_H_
