// Random numbers as a function: Philox4x32-10 of (seed, purpose, stream, element).
// Used for initial values, data order where it is ours, noise of replicas, dropped rows.
//
// Invariant: nothing is remembered between two draws, so an element can be computed alone, by any
// thread or rank, in any order. Element e of a stream is one Philox block:
//
//   key     = words 0, 1 of Philox(key = seed, counter = {purpose, 0, 0, 0})
//   block_e = Philox(key, counter = {e low, e high, stream low, stream high})
//
// (low word first everywhere). The key is drawn, not packed, because seed, purpose, stream and
// element together are wider than Philox's 192 bits of input. Source: Salmon, Moraes, Dror and
// Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. Clause 13 of core/NUMERICS.md.
// Thread-safety: pure functions.
#ifndef RETRACE_CORE_PHILOX_H_
#define RETRACE_CORE_PHILOX_H_

#include "core/scalar_math.h"

namespace retrace {

struct PhiloxKey {
  uint32_t words[2];
};

struct PhiloxBlock {
  uint32_t words[4];
};

// Ten rounds; the key is bumped by the golden ratio and sqrt(3) - 1 between rounds.
RT_HD RT_INLINE PhiloxBlock Philox4x32(PhiloxKey key, PhiloxBlock counter) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.words[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.words[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.words[1] ^ key.words[0],
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.words[3] ^ key.words[1],
                static_cast<uint32_t>(product0)}};
    key.words[0] += 0x9E3779B9;
    key.words[1] += 0xBB67AE85;
  }
  return counter;
}

// One stream of one purpose; a value, cheap to copy.
struct RandomStream {
  PhiloxKey key;
  uint64_t stream;
};

RT_HD RT_INLINE RandomStream MakeRandomStream(uint64_t seed, uint32_t purpose, uint64_t stream) {
  const PhiloxKey seed_key = {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
  const PhiloxBlock block = Philox4x32(seed_key, {{purpose, 0, 0, 0}});
  return {{{block.words[0], block.words[1]}}, stream};
}

RT_HD RT_INLINE PhiloxBlock RandomBlock(const RandomStream& random, uint64_t element) {
  return Philox4x32(
      random.key,
      {{static_cast<uint32_t>(element), static_cast<uint32_t>(element >> 32),
        static_cast<uint32_t>(random.stream), static_cast<uint32_t>(random.stream >> 32)}});
}

// Uniform over 32 bits: word 0 of the element's block.
RT_HD RT_INLINE uint32_t RandomU32(const RandomStream& random, uint64_t element) {
  return RandomBlock(random, element).words[0];
}

// (j + 1/2) / 2^52 with j the high 52 bits of `high`:`low`. Exact, strictly inside (0, 1) and
// symmetric about 1/2; with 53 bits of j the largest would round to 1.
RT_HD RT_INLINE double UnitInterval(uint32_t high, uint32_t low) {
  const int64_t j = (static_cast<int64_t>(high) << 20) | (low >> 12);
  return (static_cast<double>(j) + 0.5) * 0x1p-52;
}

// Uniform in (0, 1), from words 1 (high) and 0 (low) of the element's block.
RT_HD RT_INLINE double RandomUniform(const RandomStream& random, uint64_t element) {
  const PhiloxBlock block = RandomBlock(random, element);
  return UnitInterval(block.words[1], block.words[0]);
}

// Standard normal by Box and Muller in FP64, |z| < 8.58; the caller rounds it once.
//   z = sqrt(-2 log u) * cos(2 pi v), u from words 1, 0 and v from words 3, 2; the sine's partner
//   is not used, so that an element needs no neighbour.
RT_HD RT_INLINE double RandomNormal(const RandomStream& random, uint64_t element) {
  const PhiloxBlock block = RandomBlock(random, element);
  const double u = UnitInterval(block.words[1], block.words[0]);
  const double v = UnitInterval(block.words[3], block.words[2]);
  return math::Sqrt(-2.0 * math::Log(u)) * math::Cos(math::kTwoPi64 * v);
}

}  // namespace retrace

#endif  // RETRACE_CORE_PHILOX_H_
