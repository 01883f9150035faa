// GemmArgs: one matrix product. Used by gemm.h, which says what it computes and in which order, and by
// the CUDA kernel. A value.
#ifndef RETRACE_KERNELS_GEMM_ARGS_H_
#define RETRACE_KERNELS_GEMM_ARGS_H_

#include <cstdint>

#include "kernels/rounding.h"

namespace retrace {

// T is float or double. Strides are in elements and may be any number, 0 and negative included.
template <class T>
struct GemmArgs {
  int64_t m = 0, n = 0, k = 0;
  const T* a = nullptr;
  int64_t a_row_stride = 0, a_col_stride = 1;
  const T* b = nullptr;
  int64_t b_row_stride = 0, b_col_stride = 1;
  T* c = nullptr;
  int64_t c_row_stride = 0;
  Rounding round = Rounding::kNone;  // kBf16: float only
  bool add = false;                  // C = C + product
};

}  // namespace retrace

#endif  // RETRACE_KERNELS_GEMM_ARGS_H_
