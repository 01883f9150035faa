// AdamW, the sum of squares and the count of odd numbers: the optimizer's arithmetic, the same at
// every level (portable and native) and in the walk of a journal. Used by replay/update.cc and
// replay/timeline.cc.
// Thread-safe on disjoint ranges.
#ifndef RETRACE_KERNELS_ADAMW_H_
#define RETRACE_KERNELS_ADAMW_H_

#include <cstdint>

#include "core/optimizer_block.h"
#include "kernels/isa.h"

namespace retrace {

// Computes   g' = clip*g; m = beta1*m + (1-beta1)*g'; v = beta2*v + ((1-beta2)*g')*g';
//            a = (m/bc1) / (sqrt(v/bc2) + eps); a = a*update_clip; u = a + decay*p; p = p - lr*u
//            kFrozen: p stays. kSkip: nothing moves. NaNs are stored as 0x7fc00000.
// Shapes     n elements of one tensor, all with the same row of the optimizer block; row_clip
//            replaces row.clip where a clip is per row.
// Order      element-wise, FP32, every operation rounded, no fma.
// Guarantee  same bits by numpy: (p, m, v, g, row) -> (p, m, v).
// Clause     12
void AdamW(Isa isa, const OptimizerRow& row, float clip, const float* g, float* p, float* m,
           float* v, int64_t n);

// Elements of one block of a sum of squares.
inline constexpr int64_t kSquareBlock = 65536;

// Computes   sum of x^2 in FP64 (products exact)
// Shapes     x [n], n <= kSquareBlock: one block; longer sums add their blocks left to right.
// Order      clause 6 (lane chains), in FP64.
// Guarantee  -
// Clause     11
double SumSquaresBlock(Isa isa, const float* x, int64_t n);

// Computes   sum of g'^2 / max(v'/bc2, eps^2), g' = clip*g and v' = v as AdamW is about to make it
// Shapes     as SumSquaresBlock
// Order      g', v' and v'/bc2 in FP32 as in AdamW; g'^2 (exact), eps^2 (exact), max, quotient and
//            the sum in FP64, clause 6 (lane chains)
// Guarantee  max: v'/bc2 where it is not below eps^2, so a NaN stays one
// Clause     12
// Source     Wortsman et al. 2023, arXiv 2304.13013 (StableAdamW)
double SumUpdateSquaresBlock(Isa isa, const OptimizerRow& row, float clip, const float* g,
                             const float* v, int64_t n);

// Computes   sum of (after - before)^2 in FP64
// Shapes     before, after [n], n <= kSquareBlock: one block
// Order      as SumSquaresBlock
// Guarantee  -
// Clause     11, for a diagnostic: nothing that trains reads it
double SumSquaredChangeBlock(Isa isa, const float* before, const float* after, int64_t n);

// How many numbers are no ordinary ones.
struct OddNumbers {
  int64_t zero = 0, subnormal = 0, infinite = 0, nan = 0;

  bool none() const { return zero + subnormal + infinite + nan == 0; }
  OddNumbers& operator+=(const OddNumbers& other);
  bool operator==(const OddNumbers&) const = default;
};

// Computes   how many of x are zero (of either sign), subnormal, infinite, NaN
// Shapes     x [n], n <= kSquareBlock
// Order      none: integers
// Guarantee  same counts by numpy
// Clause     -
OddNumbers CountOdd(Isa isa, const float* x, int64_t n);

}  // namespace retrace

#endif  // RETRACE_KERNELS_ADAMW_H_
