// The array loops of vector_math.h on F16, the same text for AVX2 and AVX-512.
// Included once by each of vector_math_avx2.cc and vector_math_avx512.cc, which differ in flags
// only. Clauses 1, 2, 3, 6 of core/NUMERICS.md. Thread-safety: pure functions.
#ifndef RETRACE_KERNELS_VECTOR_MATH_LANES_H_
#define RETRACE_KERNELS_VECTOR_MATH_LANES_H_

#include "kernels/vector16.h"
#include "kernels/vector_math_table.h"

namespace retrace::RT_VECTOR_NAMESPACE {

// The tail is a partial register filled with 1, an argument at which every function is quiet.
template <class Function>
RT_INLINE void MapLanes(const float* x, float* y, int64_t n, Function function) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, function(Load(x + i)));
  if (i < n) StoreFirst(y + i, n - i, function(LoadFirst(x + i, n - i, 1.0f)));
}

template <class Function>
RT_INLINE void MapLanes(const float* a, const float* b, float* y, int64_t n, Function function) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, function(Load(a + i), Load(b + i)));
  if (i == n) return;
  const F16 last_a = LoadFirst(a + i, n - i, 1.0f), last_b = LoadFirst(b + i, n - i, 1.0f);
  StoreFirst(y + i, n - i, function(last_a, last_b));
}

static void LanesExp(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::Exp(v); });
}
static void LanesExpCut(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::ExpCut(v); });
}
static void LanesLog(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::Log(v); });
}
static void LanesTanh(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::Tanh(v); });
}
static void LanesSqrt(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::CanonicalNan(Sqrt(v)); });
}
static void LanesRoundToBf16(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::RoundToBf16(v); });
}
static void LanesCanonicalNan(const float* x, float* y, int64_t n) {
  MapLanes(x, y, n, [](F16 v) { return math::CanonicalNan(v); });
}
static void LanesMax(const float* a, const float* b, float* y, int64_t n) {
  MapLanes(a, b, y, n, [](F16 v, F16 w) { return Max(v, w); });
}
static void LanesMin(const float* a, const float* b, float* y, int64_t n) {
  MapLanes(a, b, y, n, [](F16 v, F16 w) { return Min(v, w); });
}
static void LanesSum(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = math::CanonicalNan(LaneTree(Load(x + kLanes * i)));
}
static void LanesMaximum(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = LaneMax(Load(x + kLanes * i));
}

const VectorMathTable kVectorMath = {
    .exp = LanesExp,
    .exp_cut = LanesExpCut,
    .log = LanesLog,
    .tanh = LanesTanh,
    .sqrt = LanesSqrt,
    .round_to_bf16 = LanesRoundToBf16,
    .canonical_nan = LanesCanonicalNan,
    .max = LanesMax,
    .min = LanesMin,
    .lane_sums = LanesSum,
    .lane_maxima = LanesMaximum,
};

}  // namespace retrace::RT_VECTOR_NAMESPACE

#endif  // RETRACE_KERNELS_VECTOR_MATH_LANES_H_
