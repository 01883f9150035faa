// How vector_math_scalar.cc reaches the implementations of vector_math.h: one table per instruction
// set. Used by vector_math_*.cc only. Thread-safety: constant data.
#ifndef RETRACE_KERNELS_VECTOR_MATH_TABLE_H_
#define RETRACE_KERNELS_VECTOR_MATH_TABLE_H_

#include <cstdint>

namespace retrace {

using UnaryRows = void (*)(const float* x, float* y, int64_t n);
using BinaryRows = void (*)(const float* a, const float* b, float* y, int64_t n);

struct VectorMathTable {
  UnaryRows exp, exp_cut, log, tanh, sqrt, round_to_bf16, canonical_nan;
  BinaryRows max, min;
  UnaryRows lane_sums, lane_maxima;
};

namespace avx2 {
extern const VectorMathTable kVectorMath;
}
namespace avx512 {
extern const VectorMathTable kVectorMath;
}

}  // namespace retrace

#endif  // RETRACE_KERNELS_VECTOR_MATH_TABLE_H_
