// The arguments of the optimizer's kernels on a device (kernels/device.h). Values.
#ifndef RETRACE_KERNELS_DEVICE_OPTIMIZER_ARGS_H_
#define RETRACE_KERNELS_DEVICE_OPTIMIZER_ARGS_H_

#include <cstdint>

#include "core/optimizer_block.h"

namespace retrace {

// Elements whose sums DeviceAdamW adds up together (those of record.norms: replay/update.cc).
inline constexpr int64_t kDeviceSumBlock = 4096;

// What AdamW left of a block of elements: sums in FP64 by clause 6, counts as OddNumbers has them
// (kernels/adamw.h). Rows of `odd`: g, p, m, v; columns: zero, subnormal, infinite, NaN.
struct DeviceBlockSums {
  double p, change, m, v;
  int32_t odd[4][4];
};

// The factor on element i of a piece: `factor`, or, where a clip is per row, rows[(first + i) / cols].
struct DeviceClip {
  float factor = 1;
  const float* rows = nullptr;
  int64_t first = 0, cols = 1;
};

struct DeviceAdamWArgs {
  OptimizerRow row;
  DeviceClip clip;
  const float* g;
  float *p, *m, *v;
  int64_t n;
  DeviceBlockSums* sums;  // one per kDeviceSumBlock elements; null: not wanted
};

struct DeviceUpdateSquaresArgs {
  OptimizerRow row;
  DeviceClip clip;
  const float *g, *v;
  int64_t n;
  double* sums;  // one per kSquareBlock elements
};

}  // namespace retrace

#endif  // RETRACE_KERNELS_DEVICE_OPTIMIZER_ARGS_H_
