// The functions of adamw.h as plain loops. Each instruction set compiles its own copy
// (adamw_scalar.cc, _avx2.cc, _avx512.cc): the loops have no order to lose, so the compiler may
// vectorise them as it likes. Internal linkage only.
#ifndef RETRACE_KERNELS_ADAMW_KERNEL_H_
#define RETRACE_KERNELS_ADAMW_KERNEL_H_

#include <bit>
#include <cstdint>

#include "core/optimizer_block.h"
#include "kernels/adamw.h"
#include "kernels/element_math.h"

namespace retrace {
namespace {

template <bool kMoveP>
void AdamWLoop(const OptimizerRow& row_given, float clip, const float* __restrict g,
               float* __restrict p, float* __restrict m, float* __restrict v, int64_t n) {
  const OptimizerRow row = row_given;  // no store below can change it
  for (int64_t i = 0; i < n; ++i) {
    const element::Moments next = element::NextMoments(row, clip * g[i], m[i], v[i]);
    m[i] = element::Canonical(next.m);
    v[i] = element::Canonical(next.v);
    if (kMoveP) p[i] = element::NextParameter(row, p[i], next);
  }
}

inline void AdamWKernel(const OptimizerRow& row, float clip, const float* g, float* p, float* m,
                        float* v, int64_t n) {
  if (row.action == TensorAction::kUpdate) AdamWLoop<true>(row, clip, g, p, m, v, n);
  if (row.action == TensorAction::kFrozen) AdamWLoop<false>(row, clip, g, p, m, v, n);
}

// Clause 6, in FP64, of what `term` gives for each element.
template <class Term>
inline __attribute__((always_inline)) double SumInLanes(const Term& term, int64_t n) {
  double lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) lane[l] = lane[l] + term(i + l);
  }
  for (int l = 0; i + l < n; ++l) lane[l] = lane[l] + term(i + l);
  for (int h = 8; h > 0; h /= 2) {
    for (int l = 0; l < h; ++l) lane[l] = lane[l] + lane[l + h];
  }
  return lane[0];
}

inline double SumSquaresKernel(const float* __restrict x, int64_t n) {
  const auto term = [x](int64_t i) {
    const double xi = x[i];
    return xi * xi;  // exact
  };
  return SumInLanes(term, n);
}

inline double SumSquaredChangeKernel(const float* __restrict before,
                                     const float* __restrict after, int64_t n) {
  const auto term = [before, after](int64_t i) {
    const double change = static_cast<double>(after[i]) - before[i];
    return change * change;
  };
  return SumInLanes(term, n);
}

inline double SumUpdateSquaresKernel(const OptimizerRow& row, float clip,
                                     const float* __restrict g, const float* __restrict v,
                                     int64_t n) {
  const float beta2 = row.beta2, rest2 = row.one_minus_beta2, bc2 = row.bias_correction2;
  const double least = static_cast<double>(row.eps) * static_cast<double>(row.eps);
  const auto term = [=](int64_t i) {
    const float clipped = clip * g[i];
    const float vi = element::NextV(v[i], clipped, beta2, rest2);
    const double corrected = vi / bc2, x = clipped;
    return x * x / (corrected < least ? least : corrected);
  };
  return SumInLanes(term, n);
}

inline OddNumbers CountOddKernel(const float* __restrict x, int64_t n) {
  // Of magnitudes, which sort as integers do: most blocks have nothing odd, as one comparison tells.
  int32_t odd = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;
    odd += magnitude - 0x00800000u >= 0x7f000000u;
  }
  if (odd == 0) return {};
  // 32 bits hold the counts of a block.
  int32_t zero = 0, below_normal = 0, not_finite = 0, nan = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
    zero += magnitude == 0;
    below_normal += magnitude < 0x00800000;
    not_finite += magnitude >= 0x7f800000;
    nan += magnitude > 0x7f800000;
  }
  return {zero, below_normal - zero, not_finite - nan, nan};
}

}  // namespace
}  // namespace retrace

#endif  // RETRACE_KERNELS_ADAMW_KERNEL_H_
