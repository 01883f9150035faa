#include "kernels/gemm_kernel.h"

namespace retrace::gemm_internal {
namespace {

// 12 of the 16 registers hold sums; 2 hold a row of B, 1 an element of A.
struct Avx2Float {
  using T = float;
  using V = __m256;
  static constexpr int kLanes = 8, kVectors = 2, kTileRows = 6;
  static constexpr int64_t kPackRowsMin = 48;

  RT_INLINE V Zero() { return _mm256_setzero_ps(); }
  RT_INLINE V Load(const T* p) { return _mm256_loadu_ps(p); }
  RT_INLINE void Store(T* p, V v) { _mm256_storeu_ps(p, v); }
  RT_INLINE V Broadcast(const T* p) { return _mm256_broadcast_ss(p); }
  RT_INLINE V Add(V x, V y) { return _mm256_add_ps(x, y); }
  RT_INLINE V MultiplyAdd(V x, V y, V sum) { return _mm256_fmadd_ps(x, y, sum); }
  RT_INLINE V ToBf16(V v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i cut = _mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    const V nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(_mm256_castsi256_ps(cut), nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
};

struct Avx2Double {
  using T = double;
  using V = __m256d;
  static constexpr int kLanes = 4, kVectors = 2, kTileRows = 6;
  static constexpr int64_t kPackRowsMin = 48;

  RT_INLINE V Zero() { return _mm256_setzero_pd(); }
  RT_INLINE V Load(const T* p) { return _mm256_loadu_pd(p); }
  RT_INLINE void Store(T* p, V v) { _mm256_storeu_pd(p, v); }
  RT_INLINE V Broadcast(const T* p) { return _mm256_broadcast_sd(p); }
  RT_INLINE V Add(V x, V y) { return _mm256_add_pd(x, y); }
  RT_INLINE V MultiplyAdd(V x, V y, V sum) { return _mm256_fmadd_pd(x, y, sum); }
  RT_INLINE V ToBf16(V v) { return v; }  // never asked for
};

}  // namespace

constinit const Kernel<float> kFloatAvx2 = MakeKernel<Avx2Float>();
constinit const Kernel<double> kDoubleAvx2 = MakeKernel<Avx2Double>();

}  // namespace retrace::gemm_internal
