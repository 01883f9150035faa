// DigestSecret: the 192 bytes that XXH3 mixes its input with, for an implementation of the digest on
// a device (kernels/cuda/device_digest.h). They are the library's own; nothing here copies them.
#ifndef RETRACE_CORE_DIGEST_SECRET_H_
#define RETRACE_CORE_DIGEST_SECRET_H_

#include <cstdint>

namespace retrace {

struct DigestSecret {
  uint8_t bytes[192];
};

DigestSecret Xxh3Secret();

}  // namespace retrace

#endif  // RETRACE_CORE_DIGEST_SECRET_H_
