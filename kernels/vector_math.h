// The FP32 functions of core/scalar_math.h over arrays, on a chosen instruction set.
// Used by the self-test and by tests that hold scalar and vector code to the same bits; kernels
// call the functions on lanes directly.
//
// Shapes: x and y of n values, n >= 0; y may be x, but may not overlap it otherwise.
// Guarantee: y[i] depends on x[i] alone and has the same bits for every Isa. Clauses 1, 2, 3, 6.
// Thread-safety: no shared state. The instruction set must be supported by the processor (isa.h).
#ifndef RETRACE_KERNELS_VECTOR_MATH_H_
#define RETRACE_KERNELS_VECTOR_MATH_H_

#include <cstdint>

#include "kernels/isa.h"

namespace retrace {

void ExpRows(Isa isa, const float* x, float* y, int64_t n);
void ExpCutRows(Isa isa, const float* x, float* y, int64_t n);
void LogRows(Isa isa, const float* x, float* y, int64_t n);
void TanhRows(Isa isa, const float* x, float* y, int64_t n);
void SqrtRows(Isa isa, const float* x, float* y, int64_t n);
void RoundToBf16Rows(Isa isa, const float* x, float* y, int64_t n);
void CanonicalNanRows(Isa isa, const float* x, float* y, int64_t n);

// y[i] = clause 1's max (min) of a[i] and b[i].
void MaxRows(Isa isa, const float* a, const float* b, float* y, int64_t n);
void MinRows(Isa isa, const float* a, const float* b, float* y, int64_t n);

// y[i] = sum (maximum) of the 16 lanes x[16 i .. 16 i + 16), n groups; sums in clause 6's order.
void LaneSums(Isa isa, const float* x, float* y, int64_t n);
void LaneMaxima(Isa isa, const float* x, float* y, int64_t n);

}  // namespace retrace

#endif  // RETRACE_KERNELS_VECTOR_MATH_H_
