// The op table of ops.h on F16: sixteen lanes at a time, the same text for AVX2 and AVX-512.
// Included once by each of ops_avx2.cc and ops_avx512.cc, which differ in flags only.
//
// Invariant: every element goes through the operations of ops_scalar.cc in the same order, so the
// bits are those of the scalar table, but for the sign and payload of a NaN (gemm.h says why). A
// lane chain stands still where its element is missing: adding a +0 instead would turn -0 into +0.
// Arguments are copied before the loops because a vector store may alias anything, and roundings
// are template parameters inside of them. Clauses 1, 2, 5 .. 9. Thread-safety: as ops.h.
#ifndef RETRACE_KERNELS_OPS_VECTOR_H_
#define RETRACE_KERNELS_OPS_VECTOR_H_

#include "kernels/ops.h"
#include "kernels/ops_isa.h"
#include "kernels/vector16.h"

// For lambdas: part of the loop that they stand in, never a function of their own.
#define RT_INLINE_BODY __attribute__((always_inline))

namespace retrace::RT_VECTOR_NAMESPACE {
namespace {

constexpr int64_t kChain = 256;

// ---- Lanes of a row ----------------------------------------------------------------------------

struct Whole {};  // all sixteen
struct Part {     // the first `count`, at the end of a row
  int64_t count;
};

// Missing lanes load as +0 (or `fill`), are not stored, and keep their old value in a chain.
RT_INLINE F16 LoadLanes(const float* p, Whole) { return Load(p); }
RT_INLINE F16 LoadLanes(const float* p, Part part) { return LoadFirst(p, part.count, 0.0f); }
RT_INLINE F16 LoadLanesOr(const float* p, float, Whole) { return Load(p); }
RT_INLINE F16 LoadLanesOr(const float* p, float fill, Part part) {
  return LoadFirst(p, part.count, fill);
}
RT_INLINE void StoreLanes(float* p, F16 x, Whole) { Store(p, x); }
RT_INLINE void StoreLanes(float* p, F16 x, Part part) { StoreFirst(p, part.count, x); }
RT_INLINE F16 Advance(F16 /*chain*/, F16 next, Whole) { return next; }
RT_INLINE F16 Advance(F16 chain, F16 next, Part part) {
  return Select(FirstLanes(part.count), next, chain);
}

// body(i, lanes) for i = first, first + 16, ... below last, in an array of n >= last elements.
template <class Body>
RT_INLINE void ForLanes(int64_t first, int64_t last, int64_t n, Body body) {
  int64_t i = first;
  for (; i < last && i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < last) body(i, Part{n - i});
}
template <class Body>
RT_INLINE void ForLanes(int64_t n, Body body) {
  ForLanes(0, n, n, body);
}

// Lanes [first, last) of a vector; the bounds may lie outside of it.
RT_INLINE M16 LanesBetween(int64_t first, int64_t last) {
  const int64_t low = first < 0 ? 0 : first < kLanes ? first : kLanes;
  const int64_t high = last < 0 ? 0 : last < kLanes ? last : kLanes;
  return And(FirstLanes(high), Not(FirstLanes(low)));
}

RT_INLINE void FillZero(float* p, int64_t first, int64_t last) {
  ForLanes(first, last, last,
           [&](int64_t i, auto lanes) RT_INLINE_BODY { StoreLanes(p + i, Splat(0.0f), lanes); });
}

// ---- Rounding, sums, maxima --------------------------------------------------------------------

template <Rounding kRounding>
struct RoundTo {};

template <Rounding kRounding, class F>
RT_INLINE F Round(F x, RoundTo<kRounding>) {
  if constexpr (kRounding == Rounding::kBf16) return math::RoundToBf16(x);
  return x;
}

// body(round) with the rounding as a type, to be given to Round().
template <class Body>
RT_INLINE void WithRounding(Rounding rounding, Body body) {
  if (rounding == Rounding::kBf16) return body(RoundTo<Rounding::kBf16>{});
  return body(RoundTo<Rounding::kNone>{});
}

RT_INLINE float DotByLanes(const float* x, const float* y, int64_t n) {
  F16 chain = Splat(0.0f);
  ForLanes(n, [&](int64_t i, auto lanes) RT_INLINE_BODY {
    chain = Advance(chain, Fma(LoadLanes(x + i, lanes), LoadLanes(y + i, lanes), chain), lanes);
  });
  return LaneTree(chain);
}

// A maximum by clause 1 in the making, of -Inf and all that was taken.
struct Maximum {
  F16 value;  // of what was not NaN; meaningless in lanes of `nan`
  M16 nan;
};
RT_INLINE Maximum NoMaximum() { return {Splat(-__builtin_inff()), FirstLanes(0)}; }
RT_INLINE Maximum Take(Maximum m, F16 x) {
  return {BothMax(m.value, x), Or(m.nan, Unordered(x, x))};
}
RT_INLINE Maximum Take(Maximum m, Maximum other) {
  return {BothMax(m.value, other.value), Or(m.nan, other.nan)};
}
RT_INLINE float Finish(Maximum m) {
  return Any(m.nan) ? math::FromBits(math::kCanonicalNanBits32) : LaneMax(m.value);
}

// ---- Embedding ---------------------------------------------------------------------------------

void Embed(const EmbedArgs<float>& args, int64_t first, int64_t last) {
  const EmbedArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t t = first; t < last; ++t) {
      float* x = a.x_TN + t * a.n;
      const int64_t row = a.ids_T[t] - a.row_first;
      if (row < 0 || row >= a.rows) {
        FillZero(x, 0, a.n);
        continue;
      }
      const float* e = a.table_VN + row * a.n;
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        StoreLanes(x + j, Round(LoadLanes(e + j, lanes) * Splat(a.scale), round), lanes);
      });
    }
  });
}

void EmbedBackward(const EmbedBackwardArgs<float>& args, int64_t first, int64_t last) {
  const EmbedBackwardArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t row = a.ids_T[t] - a.row_first;
      if (row < 0 || row >= a.rows || a.ids_T[t] == a.dropped) continue;
      float* g = a.dtable_VN + row * a.n;
      const float* dx = a.dx_TN + t * a.n;
      ForLanes(first, last, last, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        const F16 term = Round(LoadLanes(dx + j, lanes) * Splat(a.scale), round);
        StoreLanes(g + j, LoadLanes(g + j, lanes) + term, lanes);
      });
    }
  });
}

// ---- RMSNorm -----------------------------------------------------------------------------------

void RmsNorm(const RmsNormArgs<float>& args, int64_t first, int64_t last) {
  const RmsNormArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t i = first; i < last; ++i) {
      const float* x = a.x_RN + i * a.n;
      float* y = a.y_RN + i * a.n;
      const float mean = DotByLanes(x, x, a.n) / static_cast<float>(a.n);
      const float r = 1.0f / math::Sqrt(mean + a.eps);
      a.r_R[i] = r;
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        const F16 scaled = LoadLanes(x + j, lanes) * Splat(r);
        const F16 weighted = a.w_N ? scaled * LoadLanes(a.w_N + j, lanes) : scaled;
        StoreLanes(y + j, Round(weighted, round), lanes);
      });
    }
  });
}

void RmsNormBackward(const RmsNormBackwardArgs<float>& args, int64_t first, int64_t last) {
  const RmsNormBackwardArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t i = first; i < last; ++i) {
      const float* x = a.x_RN + i * a.n;
      const float* dy = a.dy_RN + i * a.n;
      float* dx = a.dx_RN + i * a.n;
      const float r = a.r_R[i];
      const auto gradient = [&](int64_t j, auto lanes) RT_INLINE_BODY {
        const F16 d = LoadLanes(dy + j, lanes);
        return a.w_N ? d * LoadLanes(a.w_N + j, lanes) : d;
      };
      F16 chain = Splat(0.0f);
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        const F16 normed = LoadLanes(x + j, lanes) * Splat(r);
        chain = Advance(chain, Fma(gradient(j, lanes), normed, chain), lanes);
      });
      const float c = LaneTree(chain) / static_cast<float>(a.n);
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        const F16 normed = LoadLanes(x + j, lanes) * Splat(r);
        const F16 d = Splat(r) * (gradient(j, lanes) - normed * Splat(c));
        StoreLanes(dx + j, Round(d, round), lanes);
      });
    }
  });
}

// Columns [j, j + 16 * kStrips): several chains side by side hide the latency of fma.
template <int kStrips, class Lanes>
RT_INLINE void WeightStrips(const RmsNormWeightArgs<float>& a, int64_t j, Lanes lanes) {
  F16 sum[kStrips], chain[kStrips];
  for (int s = 0; s < kStrips; ++s) sum[s] = Splat(0.0f);
  for (int64_t block = 0; block < a.rows; block += kChain) {
    const int64_t end = block + kChain < a.rows ? block + kChain : a.rows;
    for (int s = 0; s < kStrips; ++s) chain[s] = Splat(0.0f);
    for (int64_t i = block; i < end; ++i) {
      const F16 r = Splat(a.r_R[i]);
      for (int s = 0; s < kStrips; ++s) {
        const int64_t at = i * a.n + j + s * kLanes;
        chain[s] = Fma(LoadLanes(a.dy_RN + at, lanes), LoadLanes(a.x_RN + at, lanes) * r, chain[s]);
      }
    }
    for (int s = 0; s < kStrips; ++s) sum[s] = block == 0 ? chain[s] : sum[s] + chain[s];
  }
  for (int s = 0; s < kStrips; ++s) StoreLanes(a.dw_N + j + s * kLanes, sum[s], lanes);
}

void RmsNormWeight(const RmsNormWeightArgs<float>& args, int64_t first, int64_t last) {
  const RmsNormWeightArgs<float> a = args;
  int64_t j = first;
  for (; j + 2 * kLanes <= last; j += 2 * kLanes) WeightStrips<2>(a, j, Whole{});
  for (; j + kLanes <= last; j += kLanes) WeightStrips<1>(a, j, Whole{});
  if (j < last) WeightStrips<1>(a, j, Part{last - j});
}

// ---- RoPE --------------------------------------------------------------------------------------

void Rope(const RopeArgs<float>& args, int64_t first, int64_t last) {
  const RopeArgs<float> a = args;
  const int64_t half = a.dim / 2;
  const I16 turn = SplatInt(a.backward ? static_cast<int32_t>(0x80000000u) : 0);
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t t = first; t < last; ++t) {
      const float* cos = a.cos_SD + (t % a.length) * half;
      const float* sin = a.sin_SD + (t % a.length) * half;
      for (int64_t h = 0; h < a.heads; ++h) {
        const float* x = a.x_TC + (t * a.heads + h) * a.dim;
        float* y = a.y_TC + (t * a.heads + h) * a.dim;
        ForLanes(half, [&](int64_t i, auto lanes) RT_INLINE_BODY {
          const F16 c = LoadLanes(cos + i, lanes);
          const F16 s = FromBits(XorBits(Bits(LoadLanes(sin + i, lanes)), turn));
          const F16 x1 = LoadLanes(x + i, lanes), x2 = LoadLanes(x + i + half, lanes);
          const F16 y1 = Round(Round(x1 * c, round) - Round(x2 * s, round), round);
          const F16 y2 = Round(Round(x2 * c, round) + Round(x1 * s, round), round);
          StoreLanes(y + i, y1, lanes);
          StoreLanes(y + i + half, y2, lanes);
        });
      }
    }
  });
}

// ---- Softmax over the keys of a row ------------------------------------------------------------

// Vectors of a row are aligned to key 0 (of the row or of the block), so lane = key mod 16. The
// vectors that hold visible keys are [from, to); `n` elements may be touched.
struct VisibleRow {
  int64_t first, last;  // visible keys
  int64_t from, to, n;
};
RT_INLINE VisibleRow RowOf(VisibleKeys keys, int64_t n) {
  const int64_t to = (keys.last + kLanes - 1) / kLanes * kLanes;
  return {keys.first, keys.last, keys.first / kLanes * kLanes, to < n ? to : n, n};
}

// body(k, lanes, seen) for the vectors with visible keys.
template <class Body>
RT_INLINE void ForVisible(const VisibleRow& row, Body body) {
  ForLanes(row.from, row.to, row.n, [&](int64_t k, auto lanes) RT_INLINE_BODY {
    body(k, lanes, LanesBetween(row.first - k, row.last - k));
  });
}
RT_INLINE void ZeroUnseen(const VisibleRow& row, float* s) {
  FillZero(s, 0, row.from);
  FillZero(s, row.to, row.n);
}

// In place, masked neighbours included: nothing reads them. Nothing to do at scale 1.
RT_INLINE void ScaleScores(const VisibleRow& row, float* s, float scale, Rounding rounding) {
  if (scale == 1.0f) return;
  WithRounding(rounding, [&](auto round) RT_INLINE_BODY {
    ForLanes(row.from, row.to, row.n, [&](int64_t k, auto lanes) RT_INLINE_BODY {
      StoreLanes(s + k, Round(LoadLanes(s + k, lanes) * Splat(scale), round), lanes);
    });
  });
}
RT_INLINE float VisibleMax(const VisibleRow& row, const float* s) {
  Maximum m = NoMaximum();
  ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
    m = Take(m, Select(seen, LoadLanes(s + k, lanes), Splat(-__builtin_inff())));
  });
  return Finish(m);
}

// A gradient of a score: rounded, then scaled and rounded again where there is a scale.
template <class Round1>
RT_INLINE F16 ScoreGradient(F16 ds, float scale, Round1 round) {
  const F16 rounded = Round(ds, round);
  return scale == 1.0f ? rounded : Round(rounded * Splat(scale), round);
}

void Softmax(const SoftmaxArgs<float>& args, int64_t first, int64_t last) {
  const SoftmaxArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t i = first; i < last; ++i) {
      float* s = a.s_RS + i * a.length;
      float* rounded = a.p_rounded_RS ? a.p_rounded_RS + i * a.length : nullptr;
      const VisibleRow row = RowOf(Visible(i % a.length, a.window), a.length);
      ScaleScores(row, s, a.scale, a.round_scores);
      const float m = VisibleMax(row, s);
      F16 sum = Splat(0.0f);  // its lanes are never -0, so masked +0 may be added
      ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
        const F16 e = math::ExpCut(LoadLanes(s + k, lanes) - Splat(m));
        const F16 p = Select(seen, e, Splat(0.0f));
        sum = sum + p;
        StoreLanes(s + k, p, lanes);
      });
      const float inverse = 1.0f / LaneTree(sum);
      ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
        const F16 p = Select(seen, LoadLanes(s + k, lanes) * Splat(inverse), Splat(0.0f));
        StoreLanes(s + k, p, lanes);
        if (rounded) StoreLanes(rounded + k, Round(p, round), lanes);
      });
      ZeroUnseen(row, s);
      if (rounded) ZeroUnseen(row, rounded);
    }
  });
}

void SoftmaxBackward(const SoftmaxBackwardArgs<float>& args, int64_t first, int64_t last) {
  const SoftmaxBackwardArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t i = first; i < last; ++i) {
      const float* p = a.p_RS + i * a.length;
      float* ds = a.dp_RS + i * a.length;
      const VisibleRow row = RowOf(Visible(i % a.length, a.window), a.length);
      F16 chain = Splat(0.0f);
      ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
        const F16 next = Fma(LoadLanes(p + k, lanes), LoadLanes(ds + k, lanes), chain);
        chain = Select(seen, next, chain);
      });
      const float c = LaneTree(chain);
      ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
        const F16 d = LoadLanes(p + k, lanes) * (LoadLanes(ds + k, lanes) - Splat(c));
        StoreLanes(ds + k, Select(seen, ScoreGradient(d, a.scale, round), Splat(0.0f)), lanes);
      });
      ZeroUnseen(row, ds);
    }
  });
}

void OnlineSoftmax(const OnlineSoftmaxArgs<float>& args, int64_t first, int64_t last) {
  const OnlineSoftmaxArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t i = first; i < last; ++i) {
      float* s = a.s + i * a.stride;
      const int64_t query = a.query_first + i;
      const VisibleKeys seen_keys = VisibleInBlock(query, a.window, a.key_first, a.keys);
      if (seen_keys.first == seen_keys.last) {
        FillZero(s, 0, a.keys);
        a.touched[i] = 0;
        a.a[i] = 1.0f;
        continue;
      }
      const VisibleRow row = RowOf(seen_keys, a.keys);
      const bool opens = Visible(query, a.window).first >= a.key_first;
      ScaleScores(row, s, a.scale, a.round_scores);
      const float block_max = VisibleMax(row, s);
      const float m = opens ? block_max : math::Max(a.m[i], block_max);
      F16 sum = Splat(0.0f);
      ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
        const F16 e = math::ExpCut(LoadLanes(s + k, lanes) - Splat(m));
        const F16 p = Select(seen, e, Splat(0.0f));
        sum = sum + p;
        StoreLanes(s + k, Round(p, round), lanes);
      });
      ZeroUnseen(row, s);
      const float block_sum = LaneTree(sum);
      a.a[i] = opens ? 1.0f : math::ExpCut(a.m[i] - m);
      a.l[i] = opens ? block_sum : a.l[i] * a.a[i] + block_sum;
      a.m[i] = m;
      a.touched[i] = opens ? 1 : 2;
    }
  });
}

template <class RoundScores, class RoundP, class RoundDs>
RT_INLINE void BlockBackwardRows(const BlockBackwardArgs<float>& a, int64_t first, int64_t last,
                                 RoundScores round_scores, RoundP round_p, RoundDs round) {
  for (int64_t i = first; i < last; ++i) {
    float* s = a.s + i * a.stride;
    float* dp = a.dp + i * a.stride;
    const VisibleRow row =
        RowOf(VisibleInBlock(a.query_first + i, a.window, a.key_first, a.keys), a.keys);
    const float inverse = 1.0f / a.l[i], m = a.m[i], c = a.c[i];
    ForVisible(row, [&](int64_t k, auto lanes, M16 seen) RT_INLINE_BODY {
      const F16 raw = LoadLanes(s + k, lanes);
      const F16 score = a.scale == 1.0f ? raw : Round(raw * Splat(a.scale), round_scores);
      const F16 p = math::ExpCut(score - Splat(m)) * Splat(inverse);
      const F16 ds = ScoreGradient(p * (LoadLanes(dp + k, lanes) - Splat(c)), a.scale, round);
      StoreLanes(dp + k, Select(seen, ds, Splat(0.0f)), lanes);
      StoreLanes(s + k, Select(seen, Round(p, round_p), Splat(0.0f)), lanes);
    });
    ZeroUnseen(row, s);
    ZeroUnseen(row, dp);
  }
}

void BlockBackward(const BlockBackwardArgs<float>& args, int64_t first, int64_t last) {
  const BlockBackwardArgs<float> a = args;
  WithRounding(a.round_scores, [&](auto round_scores) RT_INLINE_BODY {
    WithRounding(a.round_p, [&](auto round_p) RT_INLINE_BODY {
      WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
        BlockBackwardRows(a, first, last, round_scores, round_p, round);
      });
    });
  });
}

// ---- Rows of attention's output ----------------------------------------------------------------

void RowDot(const RowDotArgs<float>& args, int64_t first, int64_t last) {
  const RowDotArgs<float> a = args;
  for (int64_t i = first; i < last; ++i) {
    a.c[i] = DotByLanes(a.x + i * a.x_stride, a.y + i * a.y_stride, a.n);
  }
}

void RescaleAdd(const RescaleAddArgs<float>& args, int64_t first, int64_t last) {
  const RescaleAddArgs<float> a = args;
  for (int64_t i = first; i < last; ++i) {
    float* o = a.o + i * a.o_stride;
    const float* t = a.t + i * a.n;
    const float factor = a.a[i];
    if (a.touched[i] == 0) continue;
    if (a.touched[i] == 1) {
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        StoreLanes(o + j, LoadLanes(t + j, lanes), lanes);
      });
    } else {
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        const F16 scaled = LoadLanes(o + j, lanes) * Splat(factor);
        StoreLanes(o + j, scaled + LoadLanes(t + j, lanes), lanes);
      });
    }
  }
}

void RowDivide(const RowDivideArgs<float>& args, int64_t first, int64_t last) {
  const RowDivideArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t i = first; i < last; ++i) {
      float* o = a.o + i * a.stride;
      const F16 l = Splat(a.l[i]);
      ForLanes(a.n, [&](int64_t j, auto lanes) RT_INLINE_BODY {
        StoreLanes(o + j, Round(LoadLanes(o + j, lanes) / l, round), lanes);
      });
    }
  });
}

// ---- GEGLU -------------------------------------------------------------------------------------

using Gelu = GeluConstants<float>;

RT_INLINE F16 GeluTanh(F16 t) {
  return math::Tanh(Splat(Gelu::k) * Fma(Splat(Gelu::c) * t, t * t, t));
}

void Geglu(const GegluArgs<float>& args, int64_t first, int64_t last) {
  const GegluArgs<float> a = args;
  const F16 half = Splat(0.5f), one = Splat(1.0f);
  WithRounding(a.round_gelu, [&](auto round_gelu) RT_INLINE_BODY {
    WithRounding(a.round_product, [&](auto round_product) RT_INLINE_BODY {
      ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
        const F16 t = LoadLanes(a.gate + i, lanes);
        const F16 gelu = Round((half * t) * (one + GeluTanh(t)), round_gelu);
        const F16 act = Round(gelu * LoadLanes(a.up + i, lanes), round_product);
        StoreLanes(a.act + i, act, lanes);
      });
    });
  });
}

template <class RoundGelu, class RoundDgelu, class RoundOut>
RT_INLINE void GegluBackwardRange(const GegluBackwardArgs<float>& a, int64_t first, int64_t last,
                                  RoundGelu round_gelu, RoundDgelu round_dgelu, RoundOut round) {
  const F16 half = Splat(0.5f), one = Splat(1.0f), zero = Splat(0.0f);
  ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
    const F16 t = LoadLanes(a.gate + i, lanes), u = LoadLanes(a.up + i, lanes);
    const F16 da = LoadLanes(a.dact + i, lanes);
    const F16 th = GeluTanh(t);
    const F16 gelu = Round((half * t) * (one + th), round_gelu);
    const F16 inner = Splat(Gelu::k) * Fma(Splat(Gelu::c3) * t, t, one);
    const F16 slope = half * (one + th) + (half * t) * (Fma(zero - th, th, one) * inner);
    const F16 dgelu = Round(da * u, round_dgelu);
    StoreLanes(a.dup + i, Round(da * gelu, round), lanes);
    StoreLanes(a.dgate + i, Round(dgelu * slope, round), lanes);
  });
}

void GegluBackward(const GegluBackwardArgs<float>& args, int64_t first, int64_t last) {
  const GegluBackwardArgs<float> a = args;
  WithRounding(a.round_gelu, [&](auto round_gelu) RT_INLINE_BODY {
    WithRounding(a.round_dgelu, [&](auto round_dgelu) RT_INLINE_BODY {
      WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
        GegluBackwardRange(a, first, last, round_gelu, round_dgelu, round);
      });
    });
  });
}

// ---- Flat arrays -------------------------------------------------------------------------------

void AddScale(const AddScaleArgs<float>& args, int64_t first, int64_t last) {
  const AddScaleArgs<float> a = args;
  WithRounding(a.round_sum, [&](auto round_sum) RT_INLINE_BODY {
    WithRounding(a.round_scale, [&](auto round_scale) RT_INLINE_BODY {
      ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
        const F16 sum = Round(LoadLanes(a.a + i, lanes) + LoadLanes(a.b + i, lanes), round_sum);
        const F16 y = a.scale == 1.0f ? sum : Round(sum * Splat(a.scale), round_scale);
        StoreLanes(a.y + i, y, lanes);
      });
    });
  });
}

void Scale(const ScaleArgs<float>& args, int64_t first, int64_t last) {
  const ScaleArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
      StoreLanes(a.y + i, Round(LoadLanes(a.x + i, lanes) * Splat(a.scale), round), lanes);
    });
  });
}

void Softcap(const SoftcapArgs<float>& args, int64_t first, int64_t last) {
  const SoftcapArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
      const F16 inner = Round(LoadLanes(a.z + i, lanes) / Splat(a.cap), round);
      const F16 th = Round(math::Tanh(inner), round);
      if (a.tanh) StoreLanes(a.tanh + i, th, lanes);
      StoreLanes(a.z + i, Round(Splat(a.cap) * th, round), lanes);
    });
  });
}

void SoftcapBackward(const SoftcapBackwardArgs<float>& args, int64_t first, int64_t last) {
  const SoftcapBackwardArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
      const F16 th = LoadLanes(a.tanh + i, lanes);
      const F16 slope = Fma(Splat(0.0f) - th, th, Splat(1.0f));
      const F16 dth = Round(LoadLanes(a.dz + i, lanes) * Splat(a.cap), round);
      StoreLanes(a.dz + i, Round(Round(dth * slope, round) / Splat(a.cap), round), lanes);
    });
  });
}

void Add(const AddArgs<float>& args, int64_t first, int64_t last) {
  const AddArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    ForLanes(first, last, last, [&](int64_t i, auto lanes) RT_INLINE_BODY {
      const F16 sum = LoadLanes(a.dst + i, lanes) + LoadLanes(a.src + i, lanes);
      StoreLanes(a.dst + i, Round(sum, round), lanes);
    });
  });
}

// ---- Cross-entropy -----------------------------------------------------------------------------

void RowMax(const RowMaxArgs<float>& args, int64_t first, int64_t last) {
  const RowMaxArgs<float> a = args;
  for (int64_t t = first; t < last; ++t) {
    const float* z = a.z_TV + t * a.n;
    // No order changes a maximum; two in the making hide the latency.
    Maximum m = NoMaximum(), odd = NoMaximum();
    int64_t v = 0;
    for (; v + 2 * kLanes <= a.n; v += 2 * kLanes) {
      m = Take(m, Load(z + v));
      odd = Take(odd, Load(z + v + kLanes));
    }
    ForLanes(v, a.n, a.n, [&](int64_t i, auto lanes) RT_INLINE_BODY {
      m = Take(m, LoadLanesOr(z + i, -__builtin_inff(), lanes));
    });
    a.m_T[t] = Finish(Take(m, odd));
  }
}

void SumExp(const SumExpArgs<float>& args, int64_t first, int64_t last) {
  const SumExpArgs<float> a = args;
  for (int64_t t = first; t < last; ++t) {
    const float* z = a.z_TV + t * a.n;
    const F16 m = Splat(a.m_T[t]);
    F16 sum = Splat(0.0f);
    ForLanes(a.n, [&](int64_t v, auto lanes) RT_INLINE_BODY {
      sum = Advance(sum, sum + math::ExpCut(LoadLanes(z + v, lanes) - m), lanes);
    });
    a.sum_T[t] = LaneTree(sum);
    const int64_t label = a.labels_T[t] - a.row_first;
    a.label_T[t] = label >= 0 && label < a.n ? z[label] : 0.0f;
  }
}

void CrossEntropyBackward(const CrossEntropyBackwardArgs<float>& args, int64_t first,
                          int64_t last) {
  const CrossEntropyBackwardArgs<float> a = args;
  WithRounding(a.round, [&](auto round) RT_INLINE_BODY {
    for (int64_t t = first; t < last; ++t) {
      float* z = a.z_TV + t * a.n;
      const float m = a.m_T[t], inverse = 1.0f / a.sum_T[t];
      const float factor = a.factor_T != nullptr ? a.factor_T[t] : 1.0f;
      const int64_t label = a.labels_T[t] - a.row_first;
      const bool here = label >= 0 && label < a.n;
      const float z_label = here ? z[label] : 0.0f;
      ForLanes(a.n, [&](int64_t v, auto lanes) RT_INLINE_BODY {
        const F16 p = math::ExpCut(LoadLanes(z + v, lanes) - Splat(m)) * Splat(inverse);
        StoreLanes(z + v, Round(p * Splat(factor) * Splat(a.inv_n), round), lanes);
      });
      if (!here) continue;
      const float p = math::ExpCut(z_label - m) * inverse * factor;
      z[label] = Round((p - 1.0f) * a.inv_n, round);
    }
  });
}

constexpr OpTable<float> kVectorOps = {
    .embed = Embed,
    .embed_backward = EmbedBackward,
    .rms_norm = RmsNorm,
    .rms_norm_backward = RmsNormBackward,
    .rms_norm_weight = RmsNormWeight,
    .rope = Rope,
    .softmax = Softmax,
    .softmax_backward = SoftmaxBackward,
    .online_softmax = OnlineSoftmax,
    .block_backward = BlockBackward,
    .row_dot = RowDot,
    .rescale_add = RescaleAdd,
    .row_divide = RowDivide,
    .geglu = Geglu,
    .geglu_backward = GegluBackward,
    .add_scale = AddScale,
    .scale = Scale,
    .softcap = Softcap,
    .softcap_backward = SoftcapBackward,
    .row_max = RowMax,
    .sum_exp = SumExp,
    .cross_entropy_backward = CrossEntropyBackward,
    .add = Add,
};

}  // namespace
}  // namespace retrace::RT_VECTOR_NAMESPACE

#endif  // RETRACE_KERNELS_OPS_VECTOR_H_
