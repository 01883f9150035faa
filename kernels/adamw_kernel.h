// AdamW and the sum of squares as plain loops. Each instruction set compiles its own copy
// (adamw_scalar.cc, _avx2.cc, _avx512.cc): the loops have no order to lose, so the compiler may
// vectorise them as it likes. Internal linkage only.
#ifndef RETRACE_KERNELS_ADAMW_KERNEL_H_
#define RETRACE_KERNELS_ADAMW_KERNEL_H_

#include <cstdint>

#include "core/optimizer_block.h"

namespace retrace {
namespace {

inline __attribute__((always_inline)) float Canonical(float x) {
  return x == x ? x : __builtin_nanf("");
}

template <bool kMoveP>
void AdamWLoop(const OptimizerRow& row, float clip, const float* __restrict g,
               float* __restrict p, float* __restrict m, float* __restrict v, int64_t n) {
  const float beta1 = row.beta1, rest1 = row.one_minus_beta1;
  const float beta2 = row.beta2, rest2 = row.one_minus_beta2;
  const float bc1 = row.bias_correction1, bc2 = row.bias_correction2;
  const float eps = row.eps, decay = row.weight_decay, lr = row.lr, limit = row.update_clip;
  for (int64_t i = 0; i < n; ++i) {
    const float clipped = clip * g[i];
    const float mi = beta1 * m[i] + rest1 * clipped;
    const float vi = beta2 * v[i] + (rest2 * clipped) * clipped;
    m[i] = Canonical(mi);
    v[i] = Canonical(vi);
    if (kMoveP) {
      const float adam = (mi / bc1) / (__builtin_sqrtf(vi / bc2) + eps);
      const float u = adam * limit + decay * p[i];
      p[i] = Canonical(p[i] - lr * u);
    }
  }
}

inline void AdamWKernel(const OptimizerRow& row, float clip, const float* g, float* p, float* m,
                        float* v, int64_t n) {
  if (row.action == TensorAction::kUpdate) AdamWLoop<true>(row, clip, g, p, m, v, n);
  if (row.action == TensorAction::kFrozen) AdamWLoop<false>(row, clip, g, p, m, v, n);
}

// Clause 6.
inline __attribute__((always_inline)) double SumLanes(double* lane) {
  for (int h = 8; h > 0; h /= 2) {
    for (int l = 0; l < h; ++l) lane[l] = lane[l] + lane[l + h];
  }
  return lane[0];
}

inline double SumSquaresKernel(const float* __restrict x, int64_t n) {
  double lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) {
      const double xi = x[i + l];
      lane[l] = lane[l] + xi * xi;  // the product of two FP32 numbers is exact in FP64
    }
  }
  for (int l = 0; i + l < n; ++l) {
    const double xi = x[i + l];
    lane[l] = lane[l] + xi * xi;
  }
  return SumLanes(lane);
}

inline double SumUpdateSquaresKernel(const OptimizerRow& row, float clip,
                                     const float* __restrict g, const float* __restrict v,
                                     int64_t n) {
  const float beta2 = row.beta2, rest2 = row.one_minus_beta2, bc2 = row.bias_correction2;
  const double least = static_cast<double>(row.eps) * static_cast<double>(row.eps);
  const auto term = [&](int64_t i) {
    const float clipped = clip * g[i];
    const float vi = beta2 * v[i] + (rest2 * clipped) * clipped;
    const double corrected = vi / bc2, x = clipped;
    return x * x / (corrected < least ? least : corrected);
  };
  double lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int l = 0; l < 16; ++l) lane[l] = lane[l] + term(i + l);
  }
  for (int l = 0; i + l < n; ++l) lane[l] = lane[l] + term(i + l);
  return SumLanes(lane);
}

}  // namespace
}  // namespace retrace

#endif  // RETRACE_KERNELS_ADAMW_KERNEL_H_
