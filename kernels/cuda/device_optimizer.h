// DeviceOptimizer: AdamW and the sums of squares on a CUDA device. Used as DeviceOps is.
//
// Computes   what AdamW, SumSquaresBlock, SumUpdateSquaresBlock, SumSquaredChangeBlock and CountOdd of
//            kernels/adamw.h do; sums and counts apart for each block of elements, whose addition is
//            the caller's
// Shapes     n elements of one tensor; kernels/device_optimizer_args.h
// Order      as there: element-wise in FP32 without fma; clause 6 in FP64 within a block
// Guarantee  the bits of the CPU for any grid
// Clause     11, 12
#ifndef RETRACE_KERNELS_CUDA_DEVICE_OPTIMIZER_H_
#define RETRACE_KERNELS_CUDA_DEVICE_OPTIMIZER_H_

#include "kernels/device_optimizer_args.h"

namespace retrace::cuda {

void DeviceAdamW(const DeviceAdamWArgs& a);

// sums[b]: of the b-th kSquareBlock elements of x.
void DeviceSumSquares(const float* x, int64_t n, double* sums);
void DeviceSumUpdateSquares(const DeviceUpdateSquaresArgs& a);

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_OPTIMIZER_H_
