// The per-instruction-set entry points behind adamw.h. Used by adamw.cc only.
#ifndef RETRACE_KERNELS_ADAMW_ISA_H_
#define RETRACE_KERNELS_ADAMW_ISA_H_

#include <cstdint>

#include "core/optimizer_block.h"
#include "kernels/adamw.h"

namespace retrace {

#define RT_DECLARE_ADAMW(SUFFIX)                                                              \
  void AdamW##SUFFIX(const OptimizerRow& row, float clip, const float* g, float* p, float* m, \
                     float* v, int64_t n);                                                    \
  double SumSquares##SUFFIX(const float* x, int64_t n);                                       \
  double SumUpdateSquares##SUFFIX(const OptimizerRow& row, float clip, const float* g,        \
                                  const float* v, int64_t n);                                 \
  double SumSquaredChange##SUFFIX(const float* before, const float* after, int64_t n);        \
  OddNumbers CountOdd##SUFFIX(const float* x, int64_t n);

RT_DECLARE_ADAMW(Scalar)
RT_DECLARE_ADAMW(Avx2)
RT_DECLARE_ADAMW(Avx512)
#undef RT_DECLARE_ADAMW

#define RT_DEFINE_ADAMW(SUFFIX)                                                               \
  void AdamW##SUFFIX(const OptimizerRow& row, float clip, const float* g, float* p, float* m, \
                     float* v, int64_t n) {                                                   \
    AdamWKernel(row, clip, g, p, m, v, n);                                                    \
  }                                                                                           \
  double SumSquares##SUFFIX(const float* x, int64_t n) { return SumSquaresKernel(x, n); }     \
  double SumUpdateSquares##SUFFIX(const OptimizerRow& row, float clip, const float* g,        \
                                  const float* v, int64_t n) {                                \
    return SumUpdateSquaresKernel(row, clip, g, v, n);                                        \
  }                                                                                           \
  double SumSquaredChange##SUFFIX(const float* before, const float* after, int64_t n) {       \
    return SumSquaredChangeKernel(before, after, n);                                          \
  }                                                                                           \
  OddNumbers CountOdd##SUFFIX(const float* x, int64_t n) { return CountOddKernel(x, n); }

}  // namespace retrace

#endif  // RETRACE_KERNELS_ADAMW_ISA_H_
