// AdamW and the sum of squares: the optimizer's arithmetic, the same at every level (portable and
// native) and in the walk of a journal. Used by replay/update.cc and replay/timeline.cc.
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

}  // namespace retrace

#endif  // RETRACE_KERNELS_ADAMW_H_
