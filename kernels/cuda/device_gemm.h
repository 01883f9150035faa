// DeviceGemm: matrix products on a CUDA device. Used as DeviceOps (device_ops.h) is.
//
// Computes   C = A·B or C + A·B of `count` independent products, as GemmBatch of kernels/gemm.h
// Shapes     kernels/gemm_args.h; pointers are memory that the device can read
// Order      clause 5, on CUDA cores: explicit fused multiply-adds, no tensor cores, which add in an
//            order of their own
// Guarantee  the bits of the scalar kernel for any tile and grid
// Clause     5, 8, 4
#ifndef RETRACE_KERNELS_CUDA_DEVICE_GEMM_H_
#define RETRACE_KERNELS_CUDA_DEVICE_GEMM_H_

#include "kernels/gemm_args.h"

namespace retrace::cuda {

template <class T>
void DeviceGemm(const GemmArgs<T>* products, int64_t count);

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_GEMM_H_
