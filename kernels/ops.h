// Ops: the row-wise arithmetic of the training step, forward and backward, on raw pointers.
// Used by kernels/attention.cc and replay/transformer.cc. The normative text is the op table of
// core/NUMERICS.md; ops_scalar.cc is that table in code (FP32 and FP64), the vector files give the
// same bits faster (FP32), but for the sign and payload of a NaN (gemm.h says why). Every op works
// on a range of rows or columns, so threads split the range and no split can change a bit.
// Stateless and thread-safe on disjoint ranges.
//
// Legend of shapes: R rows, N columns of a row; T tokens; D head dimension; V vocabulary rows of the
// shard; S sequence length. Arrays are row-major without padding unless a stride is given.
#ifndef RETRACE_KERNELS_OPS_H_
#define RETRACE_KERNELS_OPS_H_

#include <cstdint>

#include "core/scalar_math.h"
#include "kernels/isa.h"
#include "kernels/rounding.h"

namespace retrace {

// Computes   x[t,:] = round(E[ids[t] - row_first, :] * scale), +0 where the id is not in the shard.
// Shapes     E [rows,N], ids [T], x [T,N]; range over t.
// Order      none: one product per element.
// Guarantee  each row of x is owned by one shard; shards are combined by bits, not added.
// Clause     7
template <class T>
struct EmbedArgs {
  const T* table_VN;
  const int32_t* ids_T;
  T* x_TN;
  int64_t row_first, rows, n;
  T scale;
  Rounding round;
};

// Computes   dE[ids[t],:] += round(dx[t,:] * scale) for t ascending; ids outside the shard and
//            the id `dropped` (-1: none) are passed over.
// Shapes     dx [T,N], dE [rows,N]; range over columns.
// Order      tokens ascending, onto what dE holds (the head's product).
// Guarantee  no atomics: each column range belongs to one caller.
// Clause     8
template <class T>
struct EmbedBackwardArgs {
  const T* dx_TN;
  const int32_t* ids_T;
  T* dtable_VN;
  int64_t tokens, row_first, rows, n;
  int32_t dropped;
  T scale;
  Rounding round;
};

// Computes   r = 1 / sqrt(sum(x^2)/N + eps); y = round((x*r)*w)   (w null: y = round(x*r))
// Shapes     x, y [R,N], w [N], r [R]; range over rows.
// Order      squares by clause 6 (lane chains of fma).
// Guarantee  r is stored unrounded for the backward pass.
// Clause     6
template <class T>
struct RmsNormArgs {
  const T* x_RN;
  const T* w_N;
  T* y_RN;
  T* r_R;
  int64_t n;
  T eps;
  Rounding round;
};

// Computes   g = dy*w; c = sum(g * (x*r)) / N; dx = round(r * (g - (x*r)*c))
// Shapes     as forward; range over rows.
// Order      the sum by clause 6 (lane chains of fma(g, x*r)).
// Guarantee  reads x and r as the forward pass stored them.
// Clause     6
template <class T>
struct RmsNormBackwardArgs {
  const T* x_RN;
  const T* w_N;
  const T* r_R;
  const T* dy_RN;
  T* dx_RN;
  int64_t n;
  Rounding round;
};

// Computes   dw[j] = sum over rows of dy[i,j] * (x[i,j]*r[i])
// Shapes     dw [N]; range over columns.
// Order      clause 5 over the R rows: chains of fma in blocks of 256 rows, blocks left to right.
// Guarantee  not rounded here: shard partials are (clause 7).
// Clause     5
template <class T>
struct RmsNormWeightArgs {
  const T* x_RN;
  const T* r_R;
  const T* dy_RN;
  T* dw_N;
  int64_t rows, n;
};

// Computes   y1 = round(round(x1*c) - round(x2*s)), y2 = round(round(x2*c) + round(x1*s)) for each
//            head, halves x1 and x2 of D/2; `backward` uses -s.
// Shapes     x, y [T, heads*D], cos and sin [S, D/2]; token t has position t mod S; range over t.
// Order      as written; no fma.
// Guarantee  y may be x.
// Clause     2
template <class T>
struct RopeArgs {
  const T* x_TC;
  T* y_TC;
  const T* cos_SD;
  const T* sin_SD;
  int64_t length, heads, dim;
  bool backward;
  Rounding round;
};

// Keys that query i (its position within the sequence) sees: [first, last).
struct VisibleKeys {
  int64_t first, last;
};
RT_HD RT_INLINE VisibleKeys Visible(int64_t query, int64_t window) {
  const int64_t first = window > 0 && query - window + 1 > 0 ? query - window + 1 : 0;
  return {first, query + 1};
}
// The part of the block [key_first, key_first + keys) that a query sees, relative to key_first;
// {0, 0} where it sees none.
RT_HD RT_INLINE VisibleKeys VisibleInBlock(int64_t query, int64_t window, int64_t key_first,
                                           int64_t keys) {
  VisibleKeys seen = Visible(query, window);
  seen.first = seen.first < key_first ? 0 : seen.first - key_first;
  seen.last = seen.last - key_first < keys ? seen.last - key_first : keys;
  if (seen.first >= seen.last) seen = {0, 0};
  return seen;
}

// Computes   s = round_scores(s*scale) if scale != 1; m = max; e = ExpCut(s - m); l = sum(e);
//            p = e * (1/l); masked keys +0. In place. p_rounded = round(p) where not null.
// Shapes     [R,S], row i of a sequence-and-head block has query position i mod S; range over rows.
// Order      l by clause 6, lanes by absolute key position.
// Guarantee  p is stored unrounded; the backward pass uses it.
// Clause     6, 9
template <class T>
struct SoftmaxArgs {
  T* s_RS;
  T* p_rounded_RS;
  int64_t length, window;
  T scale;
  Rounding round_scores, round;
};

// Computes   c = sum(p*dp); ds = round(p * (dp - c)); ds = round(ds*scale) if scale != 1; masked +0.
// Shapes     p, dp [R,S]; ds overwrites dp; range over rows.
// Order      the sum by clause 6 (lane chains of fma(p, dp)), lanes by absolute key position.
// Guarantee  masked entries of dp are never read.
// Clause     6, 9
template <class T>
struct SoftmaxBackwardArgs {
  const T* p_RS;
  T* dp_RS;
  int64_t length, window;
  T scale;
  Rounding round;
};

// One key block of clause 9 for a range of query rows: the online softmax.
// Computes   s as in SoftmaxArgs; m' = max(m, block max); a = ExpCut(m - m'); p = ExpCut(s - m');
//            l = l*a + sum(p); m = m'. First visible block of a row: a is not used, l = sum(p).
//            A row that sees no key of the block: unchanged, p = +0, a = 1.
// Shapes     s [rows, stride], columns = keys [key_first, key_first + keys); m, l, a [rows];
//            row i has query position query_first + i. p overwrites s, rounded by `round`.
// Order      sum(p) by clause 6 over the block, lane = (key - key_first) mod 16, p unrounded.
// Guarantee  touched[i] is 0 (no key seen), 1 (first block), 2 (rescale o by a).
// Clause     9
template <class T>
struct OnlineSoftmaxArgs {
  T* s;
  T* m;
  T* l;
  T* a;
  uint8_t* touched;
  int64_t stride, query_first, key_first, keys, window;
  T scale;
  Rounding round_scores, round;
};

// Computes   p = ExpCut(s - m) * (1/l) from recomputed scores; c given (c = sum(dO * O), clause 6
//            over D); ds = round(p * (dp - c)), scaled as above; p rounded by round_p for the dV
//            product. Masked entries +0.
// Shapes     s, dp [rows, stride]; m, l, c [rows]; p overwrites s, ds overwrites dp.
// Order      element-wise.
// Guarantee  same p as the forward pass had after its last block.
// Clause     9
template <class T>
struct BlockBackwardArgs {
  T* s;
  T* dp;
  const T* m;
  const T* l;
  const T* c;
  int64_t stride, query_first, key_first, keys, window;
  T scale;
  Rounding round_scores, round_p, round;
};

// Computes   c[i] = sum over d of x[i,d] * y[i,d]
// Shapes     x, y: rows of n elements with the given strides; range over rows.
// Order      clause 6 (lane chains of fma).
// Guarantee  -
// Clause     6
template <class T>
struct RowDotArgs {
  const T* x;
  const T* y;
  T* c;
  int64_t n, x_stride, y_stride;
};

// Computes   o = o*a + t by rows as `touched` says: 0: unchanged, 1: o = t, 2: o = o*a + t.
// Shapes     o [rows, o_stride] of n columns, t [rows, n]; range over rows.
// Order      one product, one sum; no fma.
// Guarantee  -
// Clause     9
template <class T>
struct RescaleAddArgs {
  T* o;
  const T* t;
  const T* a;
  const uint8_t* touched;
  int64_t n, o_stride;
};

// Computes   o = round(o / l) by rows.
// Shapes     o [rows, stride] of n columns, l [rows]; range over rows.
// Order      one division per element.
// Guarantee  -
// Clause     9
template <class T>
struct RowDivideArgs {
  T* o;
  const T* l;
  int64_t n, stride;
  Rounding round;
};

// The constants of gelu, rounded once to T.
template <class T>
struct GeluConstants {
  static constexpr T k = static_cast<T>(0.79788456080286535587989211986876);  // sqrt(2/pi)
  static constexpr T c = static_cast<T>(0.044715);
  static constexpr T c3 = static_cast<T>(0.134145);  // 3c
};

// Computes   a = round_product(round_gelu(gelu(g)) * u), gelu(t) = (0.5*t) * (1 + tanh(k*(t + c*t^3)))
//            with k = sqrt(2/pi), c = 0.044715, inner = k * fma(c*t, t*t, t).
// Shapes     flat; range over elements.
// Order      as written.
// Guarantee  -
// Clause     2
template <class T>
struct GegluArgs {
  const T* gate;
  const T* up;
  T* act;
  Rounding round_gelu, round_product;
};

// Computes   dup = round(da * round_gelu(gelu(g))); dgelu = round_dgelu(da*u);
//            dgate = round(dgelu * gelu'(g)), gelu' = 0.5*(1+th) + (0.5*t)*((1 - th*th)*inner')
//            with inner' = k * fma(3c*t, t, 1).
// Shapes     flat; range over elements. dgate may be gate's buffer, dup up's.
// Order      as written; 1 - th*th is fma(-th, th, 1).
// Guarantee  -
// Clause     2
template <class T>
struct GegluBackwardArgs {
  const T* gate;
  const T* up;
  const T* dact;
  T* dgate;
  T* dup;
  Rounding round_gelu, round_dgelu, round;
};

// Computes   y = round_scale(round_sum(a + b) * c)   (c == 1: y = round_sum(a + b))
// Shapes     flat; range over elements. y may be a or b.
// Order      as written.
// Guarantee  -
// Clause     1
template <class T>
struct AddScaleArgs {
  const T* a;
  const T* b;
  T* y;
  T scale;
  Rounding round_sum, round_scale;
};

// Computes   y = round(x * c)
// Shapes     flat; range over elements. y may be x.
// Order      one product.
// Guarantee  -
// Clause     1
template <class T>
struct ScaleArgs {
  const T* x;
  T* y;
  T scale;
  Rounding round;
};

// Computes   z = round(cap * round(tanh(round(z/cap)))) in place; the division is a division.
// Shapes     flat; range over elements; `tanh` (not null) receives the rounded tanh.
// Order      as written.
// Guarantee  -
// Clause     2
template <class T>
struct SoftcapArgs {
  T* z;
  T* tanh;
  T cap;
  Rounding round;
};

// Computes   dz = round(round(round(dz*cap) * (1 - th^2)) / cap) in place, 1 - th^2 = fma(-th,th,1).
// Shapes     flat; range over elements.
// Order      as written.
// Guarantee  -
// Clause     2
template <class T>
struct SoftcapBackwardArgs {
  T* dz;
  const T* tanh;
  T cap;
  Rounding round;
};

// Computes   m[t] = max over the shard's vocabulary of z[t,:]
// Shapes     z [T,V]; range over t.
// Order      max is exact (clause 1: NaN wins, +0 > -0).
// Guarantee  -
// Clause     1
template <class T>
struct RowMaxArgs {
  const T* z_TV;
  T* m_T;
  int64_t n;
};

// Computes   e[t] = sum over the shard of ExpCut(z - m[t]); label[t] = z[t, label - row_first], +0
//            where the label is not in the shard.
// Shapes     z [T,V]; range over t.
// Order      clause 6 over the shard's row.
// Guarantee  -
// Clause     6, 7
template <class T>
struct SumExpArgs {
  const T* z_TV;
  const T* m_T;
  const int32_t* labels_T;
  T* sum_T;
  T* label_T;
  int64_t row_first, n;
};

// Computes   dz = round((ExpCut(z - m) * (1/sum) * factor[t] - [v == label]) * inv_n) in place;
//            factor null: 1. A z-loss makes it 1 + 2 zeta logsumexp[t].
// Shapes     z [T,V]; range over t.
// Order      as written.
// Guarantee  -
// Clause     8
template <class T>
struct CrossEntropyBackwardArgs {
  T* z_TV;
  const T* m_T;
  const T* sum_T;
  const int32_t* labels_T;
  int64_t row_first, n;
  T inv_n;
  Rounding round;
  const T* factor_T = nullptr;
};

// Computes   dst = dst + src; then dst = round(dst)
// Shapes     flat; range over elements.
// Order      one sum.
// Guarantee  a step of the balanced tree of clause 7.
// Clause     7, 8
template <class T>
struct AddArgs {
  T* dst;
  const T* src;
  Rounding round;
};

// The ops of one instruction set. Ranges are [first, last).
template <class T>
struct OpTable {
  void (*embed)(const EmbedArgs<T>&, int64_t first, int64_t last);
  void (*embed_backward)(const EmbedBackwardArgs<T>&, int64_t first, int64_t last);
  void (*rms_norm)(const RmsNormArgs<T>&, int64_t first, int64_t last);
  void (*rms_norm_backward)(const RmsNormBackwardArgs<T>&, int64_t first, int64_t last);
  void (*rms_norm_weight)(const RmsNormWeightArgs<T>&, int64_t first, int64_t last);
  void (*rope)(const RopeArgs<T>&, int64_t first, int64_t last);
  void (*softmax)(const SoftmaxArgs<T>&, int64_t first, int64_t last);
  void (*softmax_backward)(const SoftmaxBackwardArgs<T>&, int64_t first, int64_t last);
  void (*online_softmax)(const OnlineSoftmaxArgs<T>&, int64_t first, int64_t last);
  void (*block_backward)(const BlockBackwardArgs<T>&, int64_t first, int64_t last);
  void (*row_dot)(const RowDotArgs<T>&, int64_t first, int64_t last);
  void (*rescale_add)(const RescaleAddArgs<T>&, int64_t first, int64_t last);
  void (*row_divide)(const RowDivideArgs<T>&, int64_t first, int64_t last);
  void (*geglu)(const GegluArgs<T>&, int64_t first, int64_t last);
  void (*geglu_backward)(const GegluBackwardArgs<T>&, int64_t first, int64_t last);
  void (*add_scale)(const AddScaleArgs<T>&, int64_t first, int64_t last);
  void (*scale)(const ScaleArgs<T>&, int64_t first, int64_t last);
  void (*softcap)(const SoftcapArgs<T>&, int64_t first, int64_t last);
  void (*softcap_backward)(const SoftcapBackwardArgs<T>&, int64_t first, int64_t last);
  void (*row_max)(const RowMaxArgs<T>&, int64_t first, int64_t last);
  void (*sum_exp)(const SumExpArgs<T>&, int64_t first, int64_t last);
  void (*cross_entropy_backward)(const CrossEntropyBackwardArgs<T>&, int64_t first, int64_t last);
  void (*add)(const AddArgs<T>&, int64_t first, int64_t last);
};

// FP32: the vector version where `isa` has one. FP64: always scalar.
template <class T>
const OpTable<T>& Ops(Isa isa);

}  // namespace retrace

#endif  // RETRACE_KERNELS_OPS_H_
