// The clauses of NUMERICS.md that ops are made of, written out the long way: what the tests of ops,
// attention and AdamW hold the kernels to. Nothing here is shared with the kernels but exp, log and
// tanh (core/scalar_math.h, tested on their own). Slow, pure functions.
#ifndef RETRACE_TESTS_LONGHAND_H_
#define RETRACE_TESTS_LONGHAND_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/scalar_math.h"
#include "kernels/rounding.h"

namespace retrace::longhand {

// Clause 3: the nearest number with 8 significant bits, ties to even.
inline float Bf16(float x) {
  if (std::isnan(x)) return std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), -126);
  const double quantum = std::ldexp(1.0, exponent - 7);
  const double rounded = std::nearbyint(x / quantum) * quantum;
  if (std::fabs(rounded) >= 0x1p128)
    return std::copysign(std::numeric_limits<float>::infinity(), x);
  return static_cast<float>(std::copysign(rounded, x));
}

// FP64 values pass through FP32 on their way to BF16.
template <class T>
T Round(T x, Rounding rounding) {
  return rounding == Rounding::kBf16 ? static_cast<T>(Bf16(static_cast<float>(x))) : x;
}

// Clause 1.
template <class T>
T Max(const std::vector<T>& values) {
  T largest = values.at(0);
  for (T x : values) {
    if (std::isnan(x) || std::isnan(largest)) return std::numeric_limits<T>::quiet_NaN();
    if (x > largest || (x == largest && std::signbit(largest))) largest = x;
  }
  return largest;
}

// Clause 6's balanced tree over lanes [first, first + 1 * stride * ...): pairs half a tree apart.
template <class T>
T Tree(const std::vector<T>& lanes) {
  if (lanes.size() == 1) return lanes[0];
  const size_t half = lanes.size() / 2;
  std::vector<T> folded;
  for (size_t l = 0; l < half; ++l) folded.push_back(lanes[l] + lanes[l + half]);
  return Tree(folded);
}

// Clause 6: sum of terms, and of products x*y chained by fma. Element i has lane (i + offset) mod
// 16.
template <class T>
T Sum(const std::vector<T>& terms, int64_t offset = 0) {
  std::vector<T> lanes(16, T(0));
  for (size_t i = 0; i < terms.size(); ++i) {
    T& lane = lanes[(i + offset) % 16];
    lane = lane + terms[i];
  }
  return Tree(lanes);
}
template <class T>
T Dot(const std::vector<T>& x, const std::vector<T>& y, int64_t offset = 0) {
  std::vector<T> lanes(16, T(0));
  for (size_t i = 0; i < x.size(); ++i) {
    T& lane = lanes[(i + offset) % 16];
    lane = std::fma(x[i], y[i], lane);
  }
  return Tree(lanes);
}

// Clause 5: chains of fma over 256 products each, added left to right.
template <class T>
T Chain(const std::vector<T>& x, const std::vector<T>& y) {
  T sum = 0, chain = 0;
  bool first_block = true;
  for (size_t i = 0; i < x.size(); ++i) {
    chain = std::fma(x[i], y[i], chain);
    if (i % 256 != 255 && i + 1 != x.size()) continue;
    sum = first_block ? chain : sum + chain;
    first_block = false;
    chain = 0;
  }
  return sum;
}

// Does the query see the key? (Positions within the sequence; window 0: all before it.)
inline bool Sees(int64_t query, int64_t key, int64_t window) {
  return key >= 0 && key <= query && (window == 0 || query - key < window);
}

// The bits, with one NaN for all: gemm.h says why a NaN's sign and payload are not promised.
inline uint64_t Canonical(float x) {
  return std::isnan(x) ? 0x7fc00000u : std::bit_cast<uint32_t>(x);
}
inline uint64_t Canonical(double x) {
  return std::isnan(x) ? 0x7ff8000000000000u : std::bit_cast<uint64_t>(x);
}

// Index of the first element whose bits differ, or -1.
template <class T>
int64_t FirstDifference(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return static_cast<int64_t>(std::min(a.size(), b.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    if (Canonical(a[i]) != Canonical(b[i])) return static_cast<int64_t>(i);
  }
  return -1;
}

// Normal numbers of sizes 2^-4 .. 2^4; with `special`, one in eight of those that IEEE 754 treats
// apart, and some so large or small that arithmetic leaves the range.
template <class T>
std::vector<T> Values(int64_t n, std::mt19937& random, bool special = false) {
  using Limits = std::numeric_limits<T>;
  const T specials[] = {T(0),
                        -T(0),
                        Limits::infinity(),
                        -Limits::infinity(),
                        Limits::max(),
                        -Limits::max(),
                        Limits::min(),
                        Limits::denorm_min(),
                        T(-1e-40),
                        Limits::quiet_NaN(),
                        T(88.5),
                        T(-63.9),
                        T(-64.1),
                        T(1e-20),
                        T(-1e19),
                        T(1)};
  std::normal_distribution<double> normal;
  std::vector<T> values(n);
  for (T& x : values) {
    x = static_cast<T>(std::ldexp(normal(random), static_cast<int>(random() % 9) - 4));
    const uint32_t roll = random();
    if (special && roll % 8 == 0) x = specials[roll / 8 % 16];
  }
  return values;
}

}  // namespace retrace::longhand

#endif  // RETRACE_TESTS_LONGHAND_H_
