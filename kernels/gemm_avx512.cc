#include "kernels/gemm_kernel.h"

namespace retrace::gemm_internal {
namespace {

// 28 of the 32 registers hold sums; 2 hold a row of B; elements of A are broadcast by the fused
// multiply-add as it loads them.
struct Avx512Float {
  using T = float;
  using V = __m512;
  static constexpr int kLanes = 16, kVectors = 2, kTileRows = 14;
  static constexpr int64_t kPackRowsMin = 56;

  RT_INLINE V Zero() { return _mm512_setzero_ps(); }
  RT_INLINE V Load(const T* p) { return _mm512_loadu_ps(p); }
  RT_INLINE void Store(T* p, V v) { _mm512_storeu_ps(p, v); }
  RT_INLINE V Broadcast(const T* p) { return _mm512_set1_ps(*p); }
  RT_INLINE V Add(V x, V y) { return _mm512_add_ps(x, y); }
  RT_INLINE V MultiplyAdd(V x, V y, V sum) { return _mm512_fmadd_ps(x, y, sum); }
  RT_INLINE V ToBf16(V v) {
    const __m512i bits = _mm512_castps_si512(v);
    // The unmasked shift makes GCC 12 warn of its own header's uninitialised value.
    const __m512i odd =
        _mm512_and_si512(_mm512_maskz_srli_epi32(0xffff, bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i cut = _mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(cut, is_nan, _mm512_set1_epi32(0x7fc00000)));
  }
};

struct Avx512Double {
  using T = double;
  using V = __m512d;
  static constexpr int kLanes = 8, kVectors = 2, kTileRows = 14;
  static constexpr int64_t kPackRowsMin = 56;

  RT_INLINE V Zero() { return _mm512_setzero_pd(); }
  RT_INLINE V Load(const T* p) { return _mm512_loadu_pd(p); }
  RT_INLINE void Store(T* p, V v) { _mm512_storeu_pd(p, v); }
  RT_INLINE V Broadcast(const T* p) { return _mm512_set1_pd(*p); }
  RT_INLINE V Add(V x, V y) { return _mm512_add_pd(x, y); }
  RT_INLINE V MultiplyAdd(V x, V y, V sum) { return _mm512_fmadd_pd(x, y, sum); }
  RT_INLINE V ToBf16(V v) { return v; }  // never asked for
};

}  // namespace

constinit const Kernel<float> kFloatAvx512 = MakeKernel<Avx512Float>();
constinit const Kernel<double> kDoubleAvx512 = MakeKernel<Avx512Double>();

}  // namespace retrace::gemm_internal
