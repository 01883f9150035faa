// Digest: 128 bits that stand for bytes (XXH3-128). Used by every layer; clause 15 of NUMERICS.md.
// A digest detects accidents, not an adversary. Values are independent of the machine: bytes are
// little-endian, a digest is itself 16 bytes in XXH's canonical (big-endian) order.
#ifndef RETRACE_CORE_DIGEST_H_
#define RETRACE_CORE_DIGEST_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace retrace {

struct Digest {
  std::array<uint8_t, 16> bytes{};

  bool operator==(const Digest&) const = default;
  auto operator<=>(const Digest&) const = default;
  std::string Hex() const;  // 32 lower-case digits
};

// Errors: kDamaged where `hex` is not 32 hexadecimal digits.
Result<Digest> ParseDigest(std::string_view hex);

Digest DigestOf(const void* data, size_t size_bytes);
inline Digest DigestOf(std::string_view text) { return DigestOf(text.data(), text.size()); }

// The digest of a list of digests: XXH3-128 of their bytes one after another.
Digest DigestOf(const std::vector<Digest>& parts);

// Bytes of a leaf of a tensor's digest tree.
inline constexpr size_t kDigestLeafBytes = size_t{1} << 20;

// Clause 15: the digest of a tensor (or of one shard's part of it) is the digest of the list of the
// digests of its 1 MiB leaves. One rule for every size, so leaves can be computed in parallel.
Digest TensorDigest(const void* data, size_t size_bytes);

// For bytes that arrive in pieces: whole files.
class DigestStream {
 public:
  DigestStream();
  ~DigestStream();
  DigestStream(DigestStream&&) noexcept;
  DigestStream& operator=(DigestStream&&) noexcept;

  void Update(const void* data, size_t size_bytes);
  Digest Finish() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace retrace

#endif  // RETRACE_CORE_DIGEST_H_
