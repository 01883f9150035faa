// Which Philox streams the project draws from (clause 13). A purpose keeps draws of different kinds
// apart under one seed; numbers are never reused.
#ifndef RETRACE_CORE_RANDOM_STREAMS_H_
#define RETRACE_CORE_RANDOM_STREAMS_H_

#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/digest.h"

namespace retrace {

enum class RandomPurpose : uint32_t {
  kInitialValue = 1,
  kParameterNoise = 2,
  kSelftest = 3,  // operands of the self-test and of benchmarks: no run draws from it
  kSampleOrder = 4,
};

// The stream of a tensor: the first eight bytes, little-endian, of the digest of its name. So a
// tensor's draws do not depend on which other tensors a model has.
inline uint64_t TensorStream(std::string_view name) {
  const Digest digest = DigestOf(name);
  uint64_t stream;
  std::memcpy(&stream, digest.bytes.data(), sizeof stream);
  return stream;
}

}  // namespace retrace

#endif  // RETRACE_CORE_RANDOM_STREAMS_H_
