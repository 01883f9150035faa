// F16, I16, M16: sixteen lanes of float, of int32 and of truth, with the primitives of
// core/scalar_math.h, so that its functions and the kernels are written once for float and for
// lanes. Used by kernels/*_avx2.cc (two 256-bit registers) and kernels/*_avx512.cc (one of 512
// bits).
//
// Sixteen is clause 6's number of lanes, fixed by the contract and not by the machine.
// Invariant: every operation is the IEEE operation of scalar_math.h in each lane. Everything here
// is an aggregate or a static always-inline function, so an including file emits no shared symbol.
// Clauses 1, 2, 6 of core/NUMERICS.md. Thread-safety: pure functions.
#ifndef RETRACE_KERNELS_VECTOR16_H_
#define RETRACE_KERNELS_VECTOR16_H_

// GCC 12 takes its own headers' "undefined" operand of an unmasked 512-bit operation for a mistake.
#ifndef __clang__
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic pop
#endif

#include "core/scalar_math.h"

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define RT_VECTOR_NAMESPACE avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define RT_VECTOR_NAMESPACE avx2
#else
#error "vector16.h belongs in files named *_avx2.cc or *_avx512.cc, which get their flags in CMake"
#endif

namespace retrace::RT_VECTOR_NAMESPACE {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};
struct M16 {
  __mmask16 v;
};

RT_INLINE F16 Splat(float c) { return {_mm512_set1_ps(c)}; }
RT_INLINE I16 SplatInt(int32_t c) { return {_mm512_set1_epi32(c)}; }
RT_INLINE F16 Load(const float* p) { return {_mm512_loadu_ps(p)}; }
RT_INLINE void Store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
RT_INLINE M16 FirstLanes(int64_t count) {
  return {static_cast<__mmask16>((uint32_t{1} << count) - 1)};
}
RT_INLINE F16 LoadFirst(const float* p, int64_t count, float fill) {
  return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), FirstLanes(count).v, p)};
}
RT_INLINE void StoreFirst(float* p, int64_t count, F16 x) {
  _mm512_mask_storeu_ps(p, FirstLanes(count).v, x.v);
}

RT_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
RT_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
RT_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
RT_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
RT_INLINE F16 Fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
RT_INLINE F16 Sqrt(F16 x) { return {_mm512_sqrt_ps(x.v)}; }

RT_INLINE M16 operator<(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
RT_INLINE M16 operator<=(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
RT_INLINE M16 operator==(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
RT_INLINE M16 operator!=(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_NEQ_UQ)}; }
RT_INLINE M16 Unordered(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)}; }
RT_INLINE M16 And(M16 a, M16 b) { return {static_cast<__mmask16>(a.v & b.v)}; }
RT_INLINE M16 Or(M16 a, M16 b) { return {static_cast<__mmask16>(a.v | b.v)}; }
RT_INLINE M16 Not(M16 a) { return {static_cast<__mmask16>(~a.v)}; }
RT_INLINE bool Any(M16 a) { return a.v != 0; }
RT_INLINE bool All(M16 a) { return a.v == 0xffff; }
RT_INLINE F16 Select(M16 m, F16 yes, F16 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
RT_INLINE I16 Select(M16 m, I16 yes, I16 no) { return {_mm512_mask_blend_epi32(m.v, no.v, yes.v)}; }

RT_INLINE I16 Bits(F16 x) { return {_mm512_castps_si512(x.v)}; }
RT_INLINE F16 FromBits(I16 x) { return {_mm512_castsi512_ps(x.v)}; }
RT_INLINE F16 ToReal(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
RT_INLINE I16 AddBits(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
RT_INLINE I16 SubBits(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
RT_INLINE I16 AndBits(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
RT_INLINE I16 OrBits(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
RT_INLINE I16 XorBits(I16 a, I16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int kCount>
RT_INLINE I16 ShiftLeft(I16 a) {
  return {_mm512_slli_epi32(a.v, kCount)};
}
template <int kCount>
RT_INLINE I16 ShiftRightSigned(I16 a) {
  return {_mm512_srai_epi32(a.v, kCount)};
}
template <int kCount>
RT_INLINE I16 ShiftRightZero(I16 a) {
  return {_mm512_srli_epi32(a.v, kCount)};
}

// The instruction gives its second operand for a NaN or for two zeros; both orders together tell.
RT_INLINE F16 BothMax(F16 a, F16 b) {
  return {_mm512_and_ps(_mm512_max_ps(a.v, b.v), _mm512_max_ps(b.v, a.v))};
}
RT_INLINE F16 BothMin(F16 a, F16 b) {
  return {_mm512_or_ps(_mm512_min_ps(a.v, b.v), _mm512_min_ps(b.v, a.v))};
}

// Lanes 0..7 and 8..15.
RT_INLINE __m256 LowerHalf(F16 x) { return _mm512_castps512_ps256(x.v); }
RT_INLINE __m256 UpperHalf(F16 x) { return _mm512_extractf32x8_ps(x.v, 1); }

#else  // AVX2

struct F16 {
  __m256 lo, hi;  // lanes 0..7 and 8..15
};
struct I16 {
  __m256i lo, hi;
};
struct M16 {
  __m256 lo, hi;  // all bits of a lane set, or none
};

RT_INLINE F16 Splat(float c) { return {_mm256_set1_ps(c), _mm256_set1_ps(c)}; }
RT_INLINE I16 SplatInt(int32_t c) { return {_mm256_set1_epi32(c), _mm256_set1_epi32(c)}; }
RT_INLINE F16 Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
RT_INLINE void Store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
RT_INLINE M16 FirstLanes(int64_t count) {
  const __m256i n = _mm256_set1_epi32(static_cast<int32_t>(count));
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i second = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(n, first)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, second))};
}
RT_INLINE F16 LoadFirst(const float* p, int64_t count, float fill) {
  const M16 m = FirstLanes(count);
  const __m256 f = _mm256_set1_ps(fill);
  const __m256 lo = _mm256_maskload_ps(p, _mm256_castps_si256(m.lo));
  const __m256 hi = _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.hi));
  return {_mm256_blendv_ps(f, lo, m.lo), _mm256_blendv_ps(f, hi, m.hi)};
}
RT_INLINE void StoreFirst(float* p, int64_t count, F16 x) {
  const M16 m = FirstLanes(count);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.lo), x.lo);
  _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.hi), x.hi);
}

RT_INLINE F16 operator+(F16 a, F16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
RT_INLINE F16 operator-(F16 a, F16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
RT_INLINE F16 operator*(F16 a, F16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
RT_INLINE F16 operator/(F16 a, F16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
RT_INLINE F16 Fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
RT_INLINE F16 Sqrt(F16 x) { return {_mm256_sqrt_ps(x.lo), _mm256_sqrt_ps(x.hi)}; }

template <int kPredicate>
RT_INLINE M16 Compare(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, kPredicate), _mm256_cmp_ps(a.hi, b.hi, kPredicate)};
}
RT_INLINE M16 operator<(F16 a, F16 b) { return Compare<_CMP_LT_OQ>(a, b); }
RT_INLINE M16 operator<=(F16 a, F16 b) { return Compare<_CMP_LE_OQ>(a, b); }
RT_INLINE M16 operator==(F16 a, F16 b) { return Compare<_CMP_EQ_OQ>(a, b); }
RT_INLINE M16 operator!=(F16 a, F16 b) { return Compare<_CMP_NEQ_UQ>(a, b); }
RT_INLINE M16 Unordered(F16 a, F16 b) { return Compare<_CMP_UNORD_Q>(a, b); }
RT_INLINE M16 And(M16 a, M16 b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
RT_INLINE M16 Or(M16 a, M16 b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
RT_INLINE M16 Not(M16 a) {
  const __m256 ones = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
  return {_mm256_xor_ps(a.lo, ones), _mm256_xor_ps(a.hi, ones)};
}
RT_INLINE bool Any(M16 a) { return _mm256_movemask_ps(_mm256_or_ps(a.lo, a.hi)) != 0; }
RT_INLINE bool All(M16 a) { return _mm256_movemask_ps(_mm256_and_ps(a.lo, a.hi)) == 0xff; }
RT_INLINE F16 Select(M16 m, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
RT_INLINE I16 Select(M16 m, I16 yes, I16 no) {
  return {_mm256_blendv_epi8(no.lo, yes.lo, _mm256_castps_si256(m.lo)),
          _mm256_blendv_epi8(no.hi, yes.hi, _mm256_castps_si256(m.hi))};
}

RT_INLINE I16 Bits(F16 x) { return {_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)}; }
RT_INLINE F16 FromBits(I16 x) { return {_mm256_castsi256_ps(x.lo), _mm256_castsi256_ps(x.hi)}; }
RT_INLINE F16 ToReal(I16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
RT_INLINE I16 AddBits(I16 a, I16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
RT_INLINE I16 SubBits(I16 a, I16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
RT_INLINE I16 AndBits(I16 a, I16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
RT_INLINE I16 OrBits(I16 a, I16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
RT_INLINE I16 XorBits(I16 a, I16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int kCount>
RT_INLINE I16 ShiftLeft(I16 a) {
  return {_mm256_slli_epi32(a.lo, kCount), _mm256_slli_epi32(a.hi, kCount)};
}
template <int kCount>
RT_INLINE I16 ShiftRightSigned(I16 a) {
  return {_mm256_srai_epi32(a.lo, kCount), _mm256_srai_epi32(a.hi, kCount)};
}
template <int kCount>
RT_INLINE I16 ShiftRightZero(I16 a) {
  return {_mm256_srli_epi32(a.lo, kCount), _mm256_srli_epi32(a.hi, kCount)};
}

// The instruction gives its second operand for a NaN or for two zeros; both orders together tell.
RT_INLINE F16 BothMax(F16 a, F16 b) {
  return {_mm256_and_ps(_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(b.lo, a.lo)),
          _mm256_and_ps(_mm256_max_ps(a.hi, b.hi), _mm256_max_ps(b.hi, a.hi))};
}
RT_INLINE F16 BothMin(F16 a, F16 b) {
  return {_mm256_or_ps(_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(b.lo, a.lo)),
          _mm256_or_ps(_mm256_min_ps(a.hi, b.hi), _mm256_min_ps(b.hi, a.hi))};
}

RT_INLINE __m256 LowerHalf(F16 x) { return x.lo; }
RT_INLINE __m256 UpperHalf(F16 x) { return x.hi; }

#endif

RT_INLINE M16 operator>(F16 a, F16 b) { return b < a; }
RT_INLINE M16 operator>=(F16 a, F16 b) { return b <= a; }
RT_INLINE F16 Splat(F16 /*prototype*/, float constant) { return Splat(constant); }
RT_INLINE I16 Splat(I16 /*prototype*/, int32_t constant) { return SplatInt(constant); }

// Clause 1: any NaN gives the canonical NaN, +0 > -0.
RT_INLINE F16 Max(F16 a, F16 b) {
  const F16 nan = FromBits(SplatInt(math::kCanonicalNanBits32));
  return Select(Unordered(a, b), nan, BothMax(a, b));
}
RT_INLINE F16 Min(F16 a, F16 b) {
  const F16 nan = FromBits(SplatInt(math::kCanonicalNanBits32));
  return Select(Unordered(a, b), nan, BothMin(a, b));
}

// Computes: the sum over lanes. Order: clause 6's tree, lane[l] += lane[l + h] for h = 8, 4, 2, 1.
RT_INLINE float LaneTree(F16 x) {
  const __m256 eight = _mm256_add_ps(LowerHalf(x), UpperHalf(x));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// Computes: the largest lane by clause 1's max (which no order can change).
RT_INLINE float LaneMax(F16 x) {
  if (Any(Unordered(x, x))) return math::FromBits(math::kCanonicalNanBits32);
  const auto both = [](__m128 a, __m128 b) {
    return _mm_and_ps(_mm_max_ps(a, b), _mm_max_ps(b, a));
  };
  const __m256 low = LowerHalf(x), high = UpperHalf(x);
  const __m256 eight = _mm256_and_ps(_mm256_max_ps(low, high), _mm256_max_ps(high, low));
  const __m128 four = both(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = both(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(both(two, _mm_movehdup_ps(two)));
}

}  // namespace retrace::RT_VECTOR_NAMESPACE

#endif  // RETRACE_KERNELS_VECTOR16_H_
