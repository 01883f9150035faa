// DeviceRows: how the threads of a grid share rows and elements, and clause 6's sum over the sixteen
// threads that share a row. Used by the .cu files of this folder.
//
// Row kernels give a row to half a warp: thread l of it is clause 6's lane l. Every kernel takes its
// work in strides of the whole grid, so that no launch shape can change a bit.
#ifndef RETRACE_KERNELS_CUDA_DEVICE_ROWS_H_
#define RETRACE_KERNELS_CUDA_DEVICE_ROWS_H_

#include "kernels/cuda/language.h"
#include "kernels/element_math.h"

namespace retrace::cuda {

#ifdef __CUDACC__
#define RT_DEVICE __device__ __forceinline__
#else
#define RT_DEVICE inline __attribute__((always_inline))
#endif

constexpr int kRowThreads = element::kLanes;

// ---- Elements: one to a thread ------------------------------------------------------------------

RT_DEVICE int64_t ThreadOfGrid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
RT_DEVICE int64_t ThreadsOfGrid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// ---- Rows: sixteen threads to each --------------------------------------------------------------

RT_DEVICE int LaneOfThread() { return static_cast<int>(threadIdx.x % kRowThreads); }
RT_DEVICE int64_t RowOfThread() { return ThreadOfGrid() / kRowThreads; }
RT_DEVICE int64_t RowsOfGrid() { return ThreadsOfGrid() / kRowThreads; }
// Rows [0, rows) by the threads of a block alone.
#define RT_FOR_ROWS_OF_BLOCK(i, rows)                                          \
  for (int64_t i = threadIdx.x / kRowThreads; i < (rows); i += blockDim.x / kRowThreads)
// Of the shuffles of the threads of a row.
RT_DEVICE unsigned RowMask() { return threadIdx.x % 32 < kRowThreads ? 0x0000ffffu : 0xffff0000u; }

// Clause 6's tree. Each thread brings its lane and gets the sum: lane[l] + lane[l ^ h] is, for
// l < h, the clause's lane[l] + lane[l + h], and for the others the same sum of the same two.
template <class T>
RT_DEVICE T SumOfRow(T lane) {
  const unsigned mask = RowMask();
  for (int h = kRowThreads / 2; h > 0; h /= 2) {
    lane = lane + __shfl_xor_sync(mask, lane, h, kRowThreads);
  }
  return lane;
}

// Clause 1's maximum, exact in any order.
template <class T>
RT_DEVICE T MaxOfRow(T lane) {
  const unsigned mask = RowMask();
  for (int h = kRowThreads / 2; h > 0; h /= 2) {
    lane = math::Max(lane, __shfl_xor_sync(mask, lane, h, kRowThreads));
  }
  return lane;
}

template <class T>
RT_DEVICE T MinusInfinity() {
  return -static_cast<T>(__builtin_inff());
}

// The first k >= first that is lane l's.
RT_DEVICE int64_t FirstOfLane(int64_t first, int lane) {
  return first + ((lane - first) % kRowThreads + kRowThreads) % kRowThreads;
}

// The elements of [begin, end) that are this thread's.
#define RT_FOR_LANE(k, begin, end) \
  for (int64_t k = FirstOfLane(begin, LaneOfThread()); k < (end); k += kRowThreads)

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_ROWS_H_
