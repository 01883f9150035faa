// DeviceProduct: a tile of a matrix product, computed by the threads of a block in clause 5's order.
// Used by the products (gemm_cuda.cu) and by blockwise attention.
//
// Both operands go through shared memory in stages of kDepth values of k, two stages in turn: the
// next one is on its way from global memory to registers while this one is multiplied. A thread has
// kThreadRows x kThreadCols elements in registers, twice: the running chain, and P0 + P1 + ….
#ifndef RETRACE_KERNELS_CUDA_DEVICE_PRODUCT_H_
#define RETRACE_KERNELS_CUDA_DEVICE_PRODUCT_H_

#include "kernels/cuda/device_rows.h"

namespace retrace::cuda {

// The shape of a block's tile. Registers come in groups of four neighbours, the groups of a thread
// lying a part of the tile apart, so that the reads of a warp from shared memory do not collide.
template <int kRows_, int kCols_, int kDepth_, int kThreadRows_, int kThreadCols_>
struct TileShape {
  static constexpr int kRows = kRows_, kCols = kCols_, kDepth = kDepth_;
  static constexpr int kThreadRows = kThreadRows_, kThreadCols = kThreadCols_;
  static constexpr int kThreadsAcross = kCols / kThreadCols;
  static constexpr int kThreads = kRows / kThreadRows * kThreadsAcross;
  // Of a stage of each operand: element (i, q) is at q * pitch + i.
  static constexpr int kPitchA = kRows + 4, kPitchB = kCols + 4;
  static_assert(element::kChain % kDepth == 0 && kThreadRows % 4 == 0 && kThreadCols % 4 == 0);

  // Row and column, within the tile, of a thread's register (i, j).
  static RT_DEVICE int Row(int i) {
    return static_cast<int>(threadIdx.x) / kThreadsAcross * 4 + RowStep(i);
  }
  static RT_DEVICE int Col(int j) {
    return static_cast<int>(threadIdx.x) % kThreadsAcross * 4 + ColStep(j);
  }
  // From register 0 to register i, j.
  static RT_DEVICE constexpr int RowStep(int i) {
    return i / 4 * (kRows * 4 / kThreadRows) + i % 4;
  }
  static RT_DEVICE constexpr int ColStep(int j) {
    return j / 4 * (kCols * 4 / kThreadCols) + j % 4;
  }
};

template <class T>
struct ProductTiles;
// 256 threads. The small one for what would leave most of a large one, or of the device, idle.
template <>
struct ProductTiles<float> {
  using Small = TileShape<64, 64, 8, 4, 4>;
  using Large = TileShape<128, 128, 8, 8, 8>;
};
template <>
struct ProductTiles<double> {
  using Small = TileShape<64, 64, 8, 4, 4>;
  using Large = TileShape<128, 64, 8, 8, 4>;
};

// Rows of A, or columns of B, [0, count) of a tile, read along k. Anything beyond reads as +0, and
// what is computed from it is never stored.
template <class T>
struct Operand {
  const T* data;
  int64_t stride;    // from one row of A (column of B) to the next
  int64_t k_stride;
  int64_t count;
};

// What one thread brings of an operand, stage after stage: neighbours in memory are brought by
// neighbouring threads.
template <class T, int kWidth, int kDepth, int kPitch, int kThreads>
struct Loader {
  static constexpr int kLoads = kWidth * kDepth / kThreads;
  static_assert(kThreads % kDepth == 0 && kThreads % kWidth == 0);

  const T* at;            // of the first load, in the stage that is next
  int64_t step, advance;  // from one load, and from one stage, to the next
  int i, q, count;        // the first load's place in the stage; rows there are
  int down, along;        // from one load to the next, of i and q; one of them is 0

  RT_DEVICE explicit Loader(const Operand<T>& from) {
    const int t = static_cast<int>(threadIdx.x);
    const bool along_k = from.k_stride == 1;
    i = along_k ? t / kDepth : t % kWidth;
    q = along_k ? t % kDepth : t / kWidth;
    down = along_k ? kThreads / kDepth : 0;
    along = along_k ? 0 : kThreads / kWidth;
    count = static_cast<int>(from.count < kWidth ? from.count : kWidth);
    at = from.data + i * from.stride + q * from.k_stride;
    step = down * from.stride + along * from.k_stride;
    advance = kDepth * from.k_stride;
  }

  // `left`: values of k in this stage and after it.
  RT_DEVICE void Load(int64_t left, T (&loaded)[kLoads]) {
    const int depth = static_cast<int>(left < kDepth ? left : kDepth);
    RT_UNROLL
    for (int l = 0; l < kLoads; ++l) {
      const bool there = i + l * down < count && q + l * along < depth;
      loaded[l] = there ? at[l * step] : T(0);
    }
    at += advance;
  }

  template <class Stages>
  RT_DEVICE void Store(const T (&loaded)[kLoads], Stages& stages, int stage) const {
    RT_UNROLL
    for (int l = 0; l < kLoads; ++l) {
      stages[stage + (q + l * along) * kPitch + i + l * down] = loaded[l];
    }
  }
};

// One value of k: chain[i][j] = fma(a[i], b[j], chain[i][j]).
template <class T, class S, class StagesA, class StagesB>
RT_DEVICE void MultiplyStep(StagesA& stages_a, StagesB& stages_b, int at_a, int at_b,
                            T (&chain)[S::kThreadRows][S::kThreadCols]) {
  T a[S::kThreadRows], b[S::kThreadCols];
  RT_UNROLL
  for (int i = 0; i < S::kThreadRows; ++i) a[i] = stages_a[at_a + S::RowStep(i)];
  RT_UNROLL
  for (int j = 0; j < S::kThreadCols; ++j) b[j] = stages_b[at_b + S::ColStep(j)];
  RT_UNROLL
  for (int i = 0; i < S::kThreadRows; ++i) {
    RT_UNROLL
    for (int j = 0; j < S::kThreadCols; ++j) chain[i][j] = math::Fma(a[i], b[j], chain[i][j]);
  }
}

// A stage, of which `depth` values of k are there. (A step beyond them would turn a chain of -0
// into +0.)
template <class T, class S, class StagesA, class StagesB>
RT_DEVICE void MultiplyStage(StagesA& stages_a, StagesB& stages_b, int at_a, int at_b, int depth,
                             T (&chain)[S::kThreadRows][S::kThreadCols]) {
  at_a += S::Row(0);
  at_b += S::Col(0);
  if (depth == S::kDepth) {
    RT_UNROLL
    for (int q = 0; q < S::kDepth; ++q) {
      MultiplyStep<T, S>(stages_a, stages_b, at_a + q * S::kPitchA, at_b + q * S::kPitchB, chain);
    }
    return;
  }
  RT_NO_UNROLL
  for (int q = 0; q < depth; ++q) {
    MultiplyStep<T, S>(stages_a, stages_b, at_a + q * S::kPitchA, at_b + q * S::kPitchB, chain);
  }
}

// Computes   sum[i][j] = the finished product's element (S::Row(i), S::Col(j)) of the tile
// Order      clause 5
// Guarantee  every thread of the block calls it with the same operands; when it returns all have
//            read what they needed of global memory, and the stages may be used again
template <class T, class S>
RT_DEVICE void ProductTile(const Operand<T>& a, const Operand<T>& b, int64_t k,
                           T (&sum)[S::kThreadRows][S::kThreadCols]) {
  constexpr int kStageA = S::kDepth * S::kPitchA, kStageB = S::kDepth * S::kPitchB;
  __shared__ Shared<T, 2 * kStageA> stage_a;
  __shared__ Shared<T, 2 * kStageB> stage_b;
  using LoaderA = Loader<T, S::kRows, S::kDepth, S::kPitchA, S::kThreads>;
  using LoaderB = Loader<T, S::kCols, S::kDepth, S::kPitchB, S::kThreads>;
  // -0 + P0 is P0, of -0 too; a product of nothing is +0.
  RT_UNROLL
  for (int i = 0; i < S::kThreadRows; ++i) {
    RT_UNROLL
    for (int j = 0; j < S::kThreadCols; ++j) sum[i][j] = k > 0 ? -T(0) : T(0);
  }
  LoaderA load_a(a);
  LoaderB load_b(b);
  T next_a[LoaderA::kLoads], next_b[LoaderB::kLoads];
  load_a.Load(k, next_a);
  load_b.Load(k, next_b);
  int half = 0;  // which of the two stages is multiplied
  for (int64_t left = k; left > 0;) {
    T chain[S::kThreadRows][S::kThreadCols];
    RT_UNROLL
    for (int i = 0; i < S::kThreadRows; ++i) {
      RT_UNROLL
      for (int j = 0; j < S::kThreadCols; ++j) chain[i][j] = 0;
    }
    RT_NO_UNROLL
    for (int of_chain = 0; of_chain < element::kChain && left > 0; of_chain += S::kDepth) {
      const int at_a = half * kStageA, at_b = half * kStageB;
      load_a.Store(next_a, stage_a, at_a);
      load_b.Store(next_b, stage_b, at_b);
      // One barrier a stage: whoever writes into this half again has passed the next one.
      __syncthreads();
      if (left > S::kDepth) {
        load_a.Load(left - S::kDepth, next_a);
        load_b.Load(left - S::kDepth, next_b);
      }
      MultiplyStage<T, S>(stage_a, stage_b, at_a, at_b,
                          static_cast<int>(left < S::kDepth ? left : S::kDepth), chain);
      left -= S::kDepth;
      half ^= 1;
    }
    RT_UNROLL
    for (int i = 0; i < S::kThreadRows; ++i) {
      RT_UNROLL
      for (int j = 0; j < S::kThreadCols; ++j) sum[i][j] = sum[i][j] + chain[i][j];
    }
  }
  __syncthreads();
}

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_PRODUCT_H_
