// Rounding: what an op does to each finished element before it stores it (clause 4 of NUMERICS.md).
// Used by every op. BF16 values stay in FP32 (or FP64) storage.
#ifndef RETRACE_KERNELS_ROUNDING_H_
#define RETRACE_KERNELS_ROUNDING_H_

#include <cstdint>

namespace retrace {

enum class Rounding : uint8_t { kNone, kBf16 };

}  // namespace retrace

#endif  // RETRACE_KERNELS_ROUNDING_H_
