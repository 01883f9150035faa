// The inside of gemm.h: what an instruction set has to provide, and the blocked product that the
// vector instruction sets share. Included by kernels/gemm*.cc only; clause 5 of NUMERICS.md.
//
// Each gemm_ISA.cc describes its vectors in a struct S (see ComputeTile for what is asked of it)
// and instantiates the templates below. They stand in an unnamed namespace *on purpose*, header or
// not: compiled for AVX-512, a symbol that other files share could become the one copy that the
// linker keeps, and then run on a processor without it. For the same reason nothing here may use a
// non-builtin inline function or template of the standard library.
//
// Vectors run along j, registers along i and j, so each element's chain over k stays the clause's.
#ifndef RETRACE_KERNELS_GEMM_KERNEL_H_
#define RETRACE_KERNELS_GEMM_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "core/scalar_math.h"
#include "kernels/gemm.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace retrace::gemm_internal {

inline constexpr int64_t kChain =
    256;  // values of k in one chain of fused multiply-adds (clause 5)

// A rectangle of C, computed by one task.
struct Region {
  int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;
};

// One instruction set's product, for gemm.cc. Regions are best cut at multiples of a tile.
template <class T>
struct Kernel {
  void (*region)(const GemmArgs<T>& args, const Region& region, void* workspace);
  int64_t workspace_bytes;
  int64_t tile_rows, tile_cols;
};

extern const Kernel<float> kFloatScalar, kFloatAvx2, kFloatAvx512;
extern const Kernel<double> kDoubleScalar, kDoubleAvx2, kDoubleAvx512;

namespace {

RT_INLINE float ToBf16(float value) { return math::RoundToBf16(value); }
RT_INLINE double ToBf16(double value) { return value; }  // never asked for: gemm.cc checks

#if defined(__AVX2__)

// Transposes a block of 8×8 floats (4×4 doubles) of a matrix with unit column stride: dst row q
// gets column q of src. Rows from `rows` on repeat the last one, so nothing outside of src is read.
RT_INLINE void TransposeBlock(const float* src, int64_t row_stride, int64_t rows, float* dst,
                              int64_t dst_stride) {
  __m256 in[8], pairs[8], fours[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    in[i] = _mm256_loadu_ps(src + (i < rows ? i : rows - 1) * row_stride);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_ps(in[2 * i], in[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_ps(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int h = 0; h < 8; h += 4) {
    fours[h] = _mm256_shuffle_ps(pairs[h], pairs[h + 2], 0x44);
    fours[h + 1] = _mm256_shuffle_ps(pairs[h], pairs[h + 2], 0xee);
    fours[h + 2] = _mm256_shuffle_ps(pairs[h + 1], pairs[h + 3], 0x44);
    fours[h + 3] = _mm256_shuffle_ps(pairs[h + 1], pairs[h + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    _mm256_storeu_ps(dst + q * dst_stride, _mm256_permute2f128_ps(fours[q], fours[q + 4], 0x20));
  }
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    _mm256_storeu_ps(dst + (q + 4) * dst_stride,
                     _mm256_permute2f128_ps(fours[q], fours[q + 4], 0x31));
  }
}

RT_INLINE void TransposeBlock(const double* src, int64_t row_stride, int64_t rows, double* dst,
                              int64_t dst_stride) {
  __m256d in[4], pairs[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    in[i] = _mm256_loadu_pd(src + (i < rows ? i : rows - 1) * row_stride);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    pairs[2 * i] = _mm256_unpacklo_pd(in[2 * i], in[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_pd(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int q = 0; q < 2; ++q) {
    _mm256_storeu_pd(dst + q * dst_stride, _mm256_permute2f128_pd(pairs[q], pairs[q + 2], 0x20));
  }
#pragma GCC unroll 2
  for (int q = 0; q < 2; ++q) {
    _mm256_storeu_pd(dst + (q + 2) * dst_stride,
                     _mm256_permute2f128_pd(pairs[q], pairs[q + 2], 0x31));
  }
}

// Copies n × k elements, src[i * n_stride + q * k_stride], into panels of kWidth:
// dst[panel][q][lane]. The lanes beyond n of the last panel hold zeros or repeat a row; what is
// computed from them is never stored. May write up to 32 bytes beyond the last panel.
template <int kWidth, class T>
void PackPanels(const T* src, int64_t n_stride, int64_t k_stride, int64_t n, int64_t k, T* dst) {
  constexpr int64_t kBlock = 32 / sizeof(T);
  int64_t packed = 0;
  if (n_stride == 1) {
    packed = n / kWidth * kWidth;
    // A few rows at a time, along them: whole columns of a matrix whose row stride is a power of
    // two fall into one set of the cache.
    constexpr int64_t kRowsAtATime = 4;
    for (int64_t q0 = 0; q0 < k; q0 += kRowsAtATime) {
      const int64_t q1 = k - q0 < kRowsAtATime ? k : q0 + kRowsAtATime;
      for (int64_t i = 0; i < packed; i += kWidth) {
        for (int64_t q = q0; q < q1; ++q) {
          __builtin_memcpy(dst + i * k + q * kWidth, src + i + q * k_stride, kWidth * sizeof(T));
        }
      }
    }
  } else if (k_stride == 1 && k >= kBlock) {
    for (; packed < n; packed += kWidth) {
      const int64_t width = n - packed < kWidth ? n - packed : kWidth;
      const T* from = src + packed * n_stride;
      T* to = dst + packed * k;
      // The last blocks of either direction overlap the ones before instead of being short. A panel
      // narrower than a block spills over into its next q, so q ascends.
      for (int64_t i = 0; i < kWidth; i += kBlock) {
        const int64_t lane = i + kBlock <= kWidth ? i : kWidth < kBlock ? 0 : kWidth - kBlock;
        const int64_t row = lane < width ? lane : width - 1;
        for (int64_t q = 0; q < k; q += kBlock) {
          const int64_t q0 = q < k - kBlock ? q : k - kBlock;
          TransposeBlock(from + row * n_stride + q0, n_stride, width - row, to + q0 * kWidth + lane,
                         kWidth);
        }
      }
    }
  }
  for (; packed < n; packed += kWidth) {
    for (int64_t q = 0; q < k; ++q) {
      for (int64_t lane = 0; lane < kWidth; ++lane) {
        const int64_t i = packed + lane;
        dst[packed * k + q * kWidth + lane] = i < n ? src[i * n_stride + q * k_stride] : T{0};
      }
    }
  }
}

// out[i][j] = the chain over k of a[i, q]·b[q, j], for kRows × (kVectors·kLanes) elements. S
// provides T, V, kLanes, kVectors, kTileRows, Zero, Load, Store, Broadcast, MultiplyAdd.
template <class S, int kRows, bool kPackedA>
void ComputeTile(int64_t k, const typename S::T* a, int64_t a_row_stride, int64_t a_col_stride,
                 const typename S::T* b, int64_t b_row_stride, typename S::T* out,
                 int64_t out_stride) {
  typename S::V sum[kRows][S::kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < S::kVectors; ++v) sum[i][v] = S::Zero();
  }
  for (int64_t q = 0; q < k; ++q) {
    typename S::V b_row[S::kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < S::kVectors; ++v) b_row[v] = S::Load(b + v * S::kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const typename S::V a_i = S::Broadcast(kPackedA ? a + i : a + i * a_row_stride);
#pragma GCC unroll 4
      for (int v = 0; v < S::kVectors; ++v) sum[i][v] = S::MultiplyAdd(a_i, b_row[v], sum[i][v]);
    }
    a += kPackedA ? S::kTileRows : a_col_stride;
    b += b_row_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < S::kVectors; ++v) {
      S::Store(out + i * out_stride + v * S::kLanes, sum[i][v]);
    }
  }
}

template <class T>
using TileFunction = void (*)(int64_t, const T*, int64_t, int64_t, const T*, int64_t, T*, int64_t);

// A function for every number of rows, so the last rows of a matrix cost what they are.
template <class S, bool kPackedA, int kRows = S::kTileRows>
TileFunction<typename S::T> TileFunctionFor(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return TileFunctionFor<S, kPackedA, kRows - 1>(rows);
  }
  return ComputeTile<S, kRows, kPackedA>;
}

// What is left to do with the chains of one block of k: P0 + P1 + …, rounding, adding to C.
template <class T>
struct Finish {
  bool first, last;  // the block's place in the sum
  bool add, round;   // after the last block
  T* partial;  // P0 + … so far: C itself, or scratch where C must stay until the product is done
  int64_t partial_stride;
  T* c;
  int64_t c_stride;
};

// `chains` holds rows × cols elements in rows of kVectors·kLanes.
template <class S, class T = typename S::T>
void FinishTile(const T* chains, int64_t rows, int64_t cols, const Finish<T>& finish) {
  constexpr int64_t kCols = S::kVectors * S::kLanes;
  for (int64_t i = 0; i < rows; ++i, chains += kCols) {
    T* partial = finish.partial + i * finish.partial_stride;
    T* c = finish.c + i * finish.c_stride;
    int64_t j = 0;
    for (; j + S::kLanes <= cols; j += S::kLanes) {
      typename S::V value = S::Load(chains + j);
      if (!finish.first) value = S::Add(S::Load(partial + j), value);
      if (finish.last) {
        if (finish.round) value = S::ToBf16(value);
        if (finish.add) value = S::Add(S::Load(c + j), value);
      }
      S::Store((finish.last ? c : partial) + j, value);
    }
    for (; j < cols; ++j) {
      T value = chains[j];
      if (!finish.first) value = partial[j] + value;
      if (finish.last) {
        if (finish.round) value = ToBf16(value);
        if (finish.add) value = c[j] + value;
      }
      (finish.last ? c : partial)[j] = value;
    }
  }
}

// Sizes of what is packed at a time, in elements: a strip of B stays in the second-level cache
// while all rows of A pass, with room for the rows themselves. Chosen by measurement; no size can
// change a bit.
template <class S>
struct Blocking {
  using T = typename S::T;
  static constexpr int64_t kTileCols = S::kVectors * S::kLanes;
  static constexpr int64_t kPackedA = (int64_t{64} << 10) / sizeof(T);
  static constexpr int64_t kPackedB = (int64_t{256} << 10) / sizeof(T);
  static constexpr int64_t kPartials = (int64_t{512} << 10) / sizeof(T);
  static constexpr int64_t kSlack = 64 / sizeof(T);  // PackPanels writes a little too far
  static constexpr int64_t kWorkspaceBytes =
      (kPackedA + kPackedB + kPartials + 2 * kSlack) * sizeof(T);
};

// An operand as the tiles read it: panels of tile height or width, packed or in place.
template <class T>
struct Panels {
  const T* data;
  int64_t panel_step;  // from one row of A (column of B) to the next, at panel starts
  int64_t row_stride;  // A in place only
  int64_t k_stride;
};

// C[rows, cols] for one block of k, from panels. The panel of A is the outer one: it stays in the
// first-level cache while the panels of B stream from the second, and rows of C are written along.
template <class S, bool kPackedA, class T = typename S::T>
void ComputeBlock(int64_t rows, int64_t cols, int64_t k, const Panels<T>& a, const Panels<T>& b,
                  const Panels<T>& b_last, const Finish<T>& finish) {
  constexpr int64_t kRows = S::kTileRows, kCols = Blocking<S>::kTileCols;
  T* const out = finish.last ? finish.c : finish.partial;
  const int64_t out_stride = finish.last ? finish.c_stride : finish.partial_stride;
  const bool as_is = finish.first && !(finish.last && (finish.add || finish.round));
  alignas(64) T tile[kRows * kCols];
  for (int64_t i = 0; i < rows; i += kRows) {
    const int64_t height = rows - i < kRows ? rows - i : kRows;
    const TileFunction<T> compute = TileFunctionFor<S, kPackedA>(height);
    const T* a_panel = a.data + i * a.panel_step;
    for (int64_t j = 0; j < cols; j += kCols) {
      const int64_t width = cols - j < kCols ? cols - j : kCols;
      const T* b_panel = width < kCols ? b_last.data : b.data + j * b.panel_step;
      const int64_t b_stride = width < kCols ? b_last.k_stride : b.k_stride;
      if (as_is && width == kCols) {
        compute(k, a_panel, a.row_stride, a.k_stride, b_panel, b_stride, out + i * out_stride + j,
                out_stride);
      } else {
        compute(k, a_panel, a.row_stride, a.k_stride, b_panel, b_stride, tile, kCols);
        Finish<T> here = finish;
        here.partial += i * finish.partial_stride + j;
        here.c += i * finish.c_stride + j;
        FinishTile<S>(tile, height, width, here);
      }
    }
  }
}

// The rectangle `r` of C for one block of k, operands packed where it pays.
template <class S, class T = typename S::T>
void MultiplyBlock(const GemmArgs<T>& g, const Region& r, int64_t k_begin, int64_t k,
                   const Finish<T>& finish, T* packed_a, T* packed_b) {
  using Sizes = Blocking<S>;
  constexpr int64_t kRows = S::kTileRows, kCols = Sizes::kTileCols;
  const int64_t rows = r.row_end - r.row_begin, cols = r.col_end - r.col_begin;
  const T* b = g.b + k_begin * g.b_row_stride + r.col_begin * g.b_col_stride;
  const T* a = g.a + r.row_begin * g.a_row_stride + k_begin * g.a_col_stride;

  const bool pack_b = g.b_col_stride != 1 || rows >= S::kPackRowsMin;
  const int64_t whole_cols = cols / kCols * kCols;
  Panels<T> b_panels{b, 1, 0, g.b_row_stride}, b_last{packed_b, k, 0, kCols};
  if (pack_b) {
    PackPanels<kCols>(b, g.b_col_stride, g.b_row_stride, cols, k, packed_b);
    b_panels = b_last;
    b_last.data += whole_cols * k;
  } else if (whole_cols < cols) {  // vectors of the last panel would read beyond the row
    PackPanels<kCols>(b + whole_cols, 1, g.b_row_stride, cols - whole_cols, k, packed_b);
  }

  // Rows of A are read in place, a tile's few of them stay cached; columns would be scattered, and
  // so would be more rows than a set of the first-level cache holds, where they all fall into one
  // set.
  constexpr int64_t kWays = 8, kWayBytes = 4096;
  const bool one_set =
      kRows > kWays && g.a_row_stride * static_cast<int64_t>(sizeof(T)) % kWayBytes == 0;
  if (g.a_col_stride == 1 && !one_set) {
    ComputeBlock<S, false>(rows, cols, k, {a, g.a_row_stride, g.a_row_stride, 1}, b_panels, b_last,
                           finish);
    return;
  }
  const int64_t rows_step = Sizes::kPackedA / (k > 64 ? k : 64) / kRows * kRows;
  for (int64_t i = 0; i < rows; i += rows_step) {
    const int64_t height = rows - i < rows_step ? rows - i : rows_step;
    PackPanels<kRows>(a + i * g.a_row_stride, g.a_row_stride, g.a_col_stride, height, k, packed_a);
    Finish<T> here = finish;
    here.partial += i * finish.partial_stride;
    here.c += i * finish.c_stride;
    ComputeBlock<S, true>(height, cols, k, {packed_a, k, 1, kRows}, b_panels, b_last, here);
  }
}

// Kernel::region. Blocks of k are outside of all rows of a strip of columns, so B is packed once.
template <class S, class T = typename S::T>
void ComputeRegion(const GemmArgs<T>& g, const Region& region, void* workspace) {
  using Sizes = Blocking<S>;
  T* packed_a = static_cast<T*>(workspace);
  T* packed_b = packed_a + Sizes::kPackedA + Sizes::kSlack;
  T* partials = packed_b + Sizes::kPackedB + Sizes::kSlack;
  const int64_t chain = g.k < kChain ? (g.k > 64 ? g.k : 64) : kChain;
  const int64_t cols_step = Sizes::kPackedB / chain / Sizes::kTileCols * Sizes::kTileCols;
  // C is still needed when the sum over blocks begins: sum in scratch, fewer rows at a time.
  const bool use_partials = g.add && g.k > kChain;
  const int64_t rows_all = region.row_end - region.row_begin;
  const int64_t rows_step =
      use_partials ? Sizes::kPartials / cols_step / S::kTileRows * S::kTileRows : rows_all;
  for (int64_t row = region.row_begin; row < region.row_end; row += rows_step) {
    for (int64_t col = region.col_begin; col < region.col_end; col += cols_step) {
      const Region strip{row, region.row_end - row < rows_step ? region.row_end : row + rows_step,
                         col, region.col_end - col < cols_step ? region.col_end : col + cols_step};
      T* c = g.c + row * g.c_row_stride + col;
      Finish<T> finish{true, false,          g.add, g.round == Rounding::kBf16,
                       c,    g.c_row_stride, c,     g.c_row_stride};
      if (use_partials) {
        finish.partial = partials;
        finish.partial_stride = cols_step;
      }
      int64_t k_begin = 0;
      do {  // once for k = 0, whose product is +0
        const int64_t k = g.k - k_begin < kChain ? g.k - k_begin : kChain;
        finish.last = k_begin + k == g.k;
        MultiplyBlock<S>(g, strip, k_begin, k, finish, packed_a, packed_b);
        finish.first = false;
        k_begin += k;
      } while (k_begin < g.k);
    }
  }
}

template <class S>
constexpr Kernel<typename S::T> MakeKernel() {
  return {ComputeRegion<S>, Blocking<S>::kWorkspaceBytes, S::kTileRows, Blocking<S>::kTileCols};
}

#endif  // __AVX2__

}  // namespace
}  // namespace retrace::gemm_internal

#endif  // RETRACE_KERNELS_GEMM_KERNEL_H_
