#include "core/digest_secret.h"

#include <cstring>

#define XXH_INLINE_ALL  // the secret is part of the implementation
#include <xxhash.h>

namespace retrace {

DigestSecret Xxh3Secret() {
  static_assert(sizeof(XXH3_kSecret) == sizeof(DigestSecret::bytes));
  DigestSecret secret;
  std::memcpy(secret.bytes, XXH3_kSecret, sizeof secret.bytes);
  return secret;
}

}  // namespace retrace
