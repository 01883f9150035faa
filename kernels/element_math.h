// ElementMath: what the ops of the op table and AdamW do to one element, in the words of
// core/NUMERICS.md. Compiled by the host's compiler (ops_scalar.cc, adamw_kernel.h) and by CUDA's
// (kernels/cuda/*.cu): one text, so both sides perform the same IEEE operations in the same order.
//
// Who divides elements over threads or lanes, and who adds over them, stands in those files.
// Requires what core/scalar_math.h requires. Pure functions, no symbol that files could share.
// Clauses 1, 2, 4, 6, 12.
#ifndef RETRACE_KERNELS_ELEMENT_MATH_H_
#define RETRACE_KERNELS_ELEMENT_MATH_H_

#include "core/optimizer_block.h"
#include "core/scalar_math.h"
#include "kernels/ops.h"

namespace retrace::element {

constexpr int kLanes = 16;       // clause 6
constexpr int64_t kChain = 256;  // values in one chain of fused multiply-adds (clause 5)

template <class T>
RT_HD RT_INLINE T Rounded(T x, Rounding round) {
  if (round == Rounding::kNone) return x;
  return static_cast<T>(math::RoundToBf16(static_cast<float>(x)));
}

// Clause 6's end: lane[l] += lane[l+h] for h = 8, 4, 2, 1. Overwrites the lanes.
template <class T>
RT_HD RT_INLINE T SumOfLanes(T* lane) {
  for (int h = kLanes / 2; h > 0; h /= 2) {
    for (int l = 0; l < h; ++l) lane[l] = lane[l] + lane[l + h];
  }
  return lane[0];
}

// ---- Norms -------------------------------------------------------------------------------------

template <class T>
RT_HD RT_INLINE T InverseRms(T sum_of_squares, int64_t n, T eps) {
  const T mean = sum_of_squares / static_cast<T>(n);
  return T(1) / math::Sqrt(mean + eps);
}

// w null: no weight.
template <class T>
RT_HD RT_INLINE T Normed(T x, T r, const T* w, int64_t j, Rounding round) {
  const T scaled = x * r;
  return Rounded(w ? scaled * w[j] : scaled, round);
}

template <class T>
RT_HD RT_INLINE T Weighted(T dy, const T* w, int64_t j) {
  return w ? dy * w[j] : dy;
}

// g = Weighted(dy), c = the row's mean of g * (x * r).
template <class T>
RT_HD RT_INLINE T NormGradient(T g, T x, T r, T c, Rounding round) {
  return Rounded(r * (g - (x * r) * c), round);
}

// ---- RoPE --------------------------------------------------------------------------------------

// Half 0 or 1 of a rotated pair; `sin` has its sign by direction.
template <class T>
RT_HD RT_INLINE T RotatedFirst(T x1, T x2, T cos, T sin, Rounding round) {
  return Rounded(Rounded(x1 * cos, round) - Rounded(x2 * sin, round), round);
}
template <class T>
RT_HD RT_INLINE T RotatedSecond(T x1, T x2, T cos, T sin, Rounding round) {
  return Rounded(Rounded(x2 * cos, round) + Rounded(x1 * sin, round), round);
}

// ---- Attention ---------------------------------------------------------------------------------

template <class T>
RT_HD RT_INLINE T Score(T s, T scale, Rounding round) {
  return scale == T(1) ? s : Rounded(s * scale, round);
}

template <class T>
RT_HD RT_INLINE T ScoreGradient(T p, T dp, T c, T scale, Rounding round) {
  return Score(Rounded(p * (dp - c), round), scale, round);
}

// ---- Activations -------------------------------------------------------------------------------

template <class T>
RT_HD RT_INLINE T GeluTanh(T t) {
  return math::Tanh(GeluConstants<T>::k * math::Fma(GeluConstants<T>::c * t, t * t, t));
}

template <class T>
RT_HD RT_INLINE T Geglu(T gate, T up, Rounding round_gelu, Rounding round_product) {
  const T gelu = Rounded((T(0.5) * gate) * (T(1) + GeluTanh(gate)), round_gelu);
  return Rounded(gelu * up, round_product);
}

template <class T>
struct GegluGradients {
  T gate, up;
};

template <class T>
RT_HD RT_INLINE GegluGradients<T> GegluBackward(T t, T u, T da, Rounding round_gelu,
                                                Rounding round_dgelu, Rounding round) {
  using C = GeluConstants<T>;
  const T th = GeluTanh(t);
  const T gelu = Rounded((T(0.5) * t) * (T(1) + th), round_gelu);
  const T inner = C::k * math::Fma(C::c3 * t, t, T(1));
  const T slope = T(0.5) * (T(1) + th) + (T(0.5) * t) * (math::Fma(-th, th, T(1)) * inner);
  const T dgelu = Rounded(da * u, round_dgelu);
  return {Rounded(dgelu * slope, round), Rounded(da * gelu, round)};
}

template <class T>
RT_HD RT_INLINE T SoftcapTanh(T z, T cap, Rounding round) {
  return Rounded(math::Tanh(Rounded(z / cap, round)), round);
}

template <class T>
RT_HD RT_INLINE T SoftcapGradient(T dz, T th, T cap, Rounding round) {
  const T dth = Rounded(dz * cap, round);
  return Rounded(Rounded(dth * math::Fma(-th, th, T(1)), round) / cap, round);
}

// ---- Sums, cross entropy -----------------------------------------------------------------------

template <class T>
RT_HD RT_INLINE T AddScaled(T a, T b, T scale, Rounding round_sum, Rounding round_scale) {
  const T sum = Rounded(a + b, round_sum);
  return scale == T(1) ? sum : Rounded(sum * scale, round_scale);
}

// inverse = 1 / the row's sum.
template <class T>
RT_HD RT_INLINE T LogitGradient(T z, T m, T inverse, T factor, bool is_label, T inv_n,
                                Rounding round) {
  const T p = math::ExpCut(z - m) * inverse * factor;
  return Rounded((is_label ? p - T(1) : p) * inv_n, round);
}

// ---- AdamW (clause 12): FP32, every operation rounded, no fma -----------------------------------

// Every NaN is stored as 0x7fc00000.
RT_HD RT_INLINE float Canonical(float x) {
  return x == x ? x : math::FromBits(math::kCanonicalNanBits32);
}

struct Moments {
  float m, v;
};

// g: clipped. Not yet canonical.
RT_HD RT_INLINE float NextV(float v, float g, float beta2, float one_minus_beta2) {
  return beta2 * v + (one_minus_beta2 * g) * g;
}
RT_HD RT_INLINE Moments NextMoments(const OptimizerRow& row, float g, float m, float v) {
  return {row.beta1 * m + row.one_minus_beta1 * g, NextV(v, g, row.beta2, row.one_minus_beta2)};
}

// `next` as NextMoments gives them.
RT_HD RT_INLINE float NextParameter(const OptimizerRow& row, float p, Moments next) {
  const float adam = (next.m / row.bias_correction1) /
                     (math::Sqrt(next.v / row.bias_correction2) + row.eps);
  const float u = adam * row.update_clip + row.weight_decay * p;
  return Canonical(p - row.lr * u);
}

}  // namespace retrace::element

#endif  // RETRACE_KERNELS_ELEMENT_MATH_H_
