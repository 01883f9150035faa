// The optimizer's kernels: sixteen threads to a block of elements whose sums are wanted, thread l
// having clause 6's lane l; where none are, one element to a thread.
#include "kernels/cuda/device_optimizer.h"

#include "kernels/adamw.h"
#include "kernels/cuda/device_rows.h"

namespace retrace::cuda {
namespace {

RT_DEVICE float ClipOf(const DeviceClip& clip, int64_t i) {
  return clip.rows ? clip.rows[(clip.first + i) / clip.cols] : clip.factor;
}

// AdamW on element i, in memory.
RT_DEVICE void UpdateElement(const DeviceAdamWArgs& a, int64_t i) {
  if (a.row.action == TensorAction::kSkip) return;
  const element::Moments next =
      element::NextMoments(a.row, ClipOf(a.clip, i) * a.g[i], a.m[i], a.v[i]);
  a.m[i] = element::Canonical(next.m);
  a.v[i] = element::Canonical(next.v);
  if (a.row.action == TensorAction::kUpdate) a.p[i] = element::NextParameter(a.row, a.p[i], next);
}

__global__ void AdamWKernel(const __grid_constant__ DeviceAdamWArgs a) {
  for (int64_t i = ThreadOfGrid(); i < a.n; i += ThreadsOfGrid()) UpdateElement(a, i);
}

// This thread's part of a block's sums and counts.
struct LaneSums {
  double p = 0, change = 0, m = 0, v = 0;
  int32_t odd[4][4] = {};

  RT_DEVICE static double Squared(double x) { return x * x; }
  RT_DEVICE void Count(int of, float x) {
    const int32_t magnitude = math::Bits(x) & 0x7fffffff;
    odd[of][0] += magnitude == 0;
    odd[of][1] += magnitude != 0 && magnitude < 0x00800000;
    odd[of][2] += magnitude == 0x7f800000;
    odd[of][3] += magnitude > 0x7f800000;
  }
};

__global__ void AdamWSumsKernel(const __grid_constant__ DeviceAdamWArgs a) {
  const int64_t blocks = (a.n + kDeviceSumBlock - 1) / kDeviceSumBlock;
  for (int64_t block = RowOfThread(); block < blocks; block += RowsOfGrid()) {
    const int64_t first = block * kDeviceSumBlock;
    const int64_t last = first + kDeviceSumBlock < a.n ? first + kDeviceSumBlock : a.n;
    LaneSums sums;
    RT_FOR_LANE(i, first, last) {
      const float before = a.p[i];
      UpdateElement(a, i);
      sums.p = sums.p + LaneSums::Squared(before);
      sums.change = sums.change + LaneSums::Squared(static_cast<double>(a.p[i]) - before);
      sums.m = sums.m + LaneSums::Squared(a.m[i]);
      sums.v = sums.v + LaneSums::Squared(a.v[i]);
      sums.Count(0, a.g[i]);
      sums.Count(1, a.p[i]);
      sums.Count(2, a.m[i]);
      sums.Count(3, a.v[i]);
    }
    DeviceBlockSums of_block = {SumOfRow(sums.p), SumOfRow(sums.change), SumOfRow(sums.m),
                                SumOfRow(sums.v), {}};
    RT_UNROLL
    for (int of = 0; of < 4; ++of) {
      RT_UNROLL
      for (int kind = 0; kind < 4; ++kind) of_block.odd[of][kind] = SumOfRow(sums.odd[of][kind]);
    }
    if (LaneOfThread() == 0) a.sums[block] = of_block;
  }
}

__global__ void SumSquaresKernel(const float* x, int64_t n, double* sums) {
  const int64_t blocks = (n + kSquareBlock - 1) / kSquareBlock;
  for (int64_t block = RowOfThread(); block < blocks; block += RowsOfGrid()) {
    const int64_t first = block * kSquareBlock;
    const int64_t last = first + kSquareBlock < n ? first + kSquareBlock : n;
    double lane = 0;
    RT_FOR_LANE(i, first, last) lane = lane + LaneSums::Squared(x[i]);
    lane = SumOfRow(lane);
    if (LaneOfThread() == 0) sums[block] = lane;
  }
}

__global__ void SumUpdateSquaresKernel(const __grid_constant__ DeviceUpdateSquaresArgs a) {
  const double least = static_cast<double>(a.row.eps) * static_cast<double>(a.row.eps);
  const int64_t blocks = (a.n + kSquareBlock - 1) / kSquareBlock;
  for (int64_t block = RowOfThread(); block < blocks; block += RowsOfGrid()) {
    const int64_t first = block * kSquareBlock;
    const int64_t last = first + kSquareBlock < a.n ? first + kSquareBlock : a.n;
    double lane = 0;
    RT_FOR_LANE(i, first, last) {
      const float g = ClipOf(a.clip, i) * a.g[i];
      const float v = element::NextV(a.v[i], g, a.row.beta2, a.row.one_minus_beta2);
      const double corrected = v / a.row.bias_correction2;
      lane = lane + LaneSums::Squared(g) / (corrected < least ? least : corrected);
    }
    lane = SumOfRow(lane);
    if (LaneOfThread() == 0) a.sums[block] = lane;
  }
}

// Of kernels whose blocks of `size` elements have sixteen threads each.
dim3 GridOfBlocks(int64_t n, int64_t size) {
  return GridFor((n + size - 1) / size, launch_shape().threads / kRowThreads);
}

}  // namespace

void DeviceAdamW(const DeviceAdamWArgs& a) {
  if (a.n == 0) return;
  const unsigned threads = launch_shape().threads;
  if (a.sums != nullptr) {
    Launch("AdamWSums", AdamWSumsKernel, GridOfBlocks(a.n, kDeviceSumBlock), threads, a);
  } else {
    Launch("AdamW", AdamWKernel, GridFor(a.n, threads), threads, a);
  }
}

void DeviceSumSquares(const float* x, int64_t n, double* sums) {
  if (n == 0) return;
  Launch("SumSquares", SumSquaresKernel, GridOfBlocks(n, kSquareBlock), launch_shape().threads, x,
         n, sums);
}

void DeviceSumUpdateSquares(const DeviceUpdateSquaresArgs& a) {
  if (a.n == 0) return;
  Launch("SumUpdateSquares", SumUpdateSquaresKernel, GridOfBlocks(a.n, kSquareBlock),
         launch_shape().threads, a);
}

}  // namespace retrace::cuda
