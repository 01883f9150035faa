#include "core/check.h"
#include "core/scalar_math.h"
#include "kernels/vector_math.h"
#include "kernels/vector_math_table.h"

namespace retrace {
namespace {

template <float (*function)(float)>
void MapScalar(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = function(x[i]);
}

template <float (*function)(float, float)>
void MapScalar(const float* a, const float* b, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = function(a[i], b[i]);
}

float CanonicalSqrt(float x) { return math::CanonicalNan(math::Sqrt(x)); }

void ScalarLaneSums(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = math::CanonicalNan(math::LaneTree(x + 16 * i));
}

void ScalarLaneMaxima(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float largest = x[16 * i];
    for (int lane = 1; lane < 16; ++lane) largest = math::Max(largest, x[16 * i + lane]);
    y[i] = largest;
  }
}

constexpr VectorMathTable kScalarMath = {
    .exp = MapScalar<math::Exp<float>>,
    .exp_cut = MapScalar<math::ExpCut<float>>,
    .log = MapScalar<math::Log<float>>,
    .tanh = MapScalar<math::Tanh<float>>,
    .sqrt = MapScalar<CanonicalSqrt>,
    .round_to_bf16 = MapScalar<math::RoundToBf16<float>>,
    .canonical_nan = MapScalar<math::CanonicalNan<float>>,
    .max = MapScalar<math::Max>,
    .min = MapScalar<math::Min>,
    .lane_sums = ScalarLaneSums,
    .lane_maxima = ScalarLaneMaxima,
};

const VectorMathTable& TableFor(Isa isa) {
  RT_CHECK(IsaSupported(isa));
  switch (isa) {
    case Isa::kAvx512:
      return avx512::kVectorMath;
    case Isa::kAvx2:
      return avx2::kVectorMath;
    case Isa::kScalar:
      break;
  }
  return kScalarMath;
}

}  // namespace

void ExpRows(Isa isa, const float* x, float* y, int64_t n) { TableFor(isa).exp(x, y, n); }
void ExpCutRows(Isa isa, const float* x, float* y, int64_t n) { TableFor(isa).exp_cut(x, y, n); }
void LogRows(Isa isa, const float* x, float* y, int64_t n) { TableFor(isa).log(x, y, n); }
void TanhRows(Isa isa, const float* x, float* y, int64_t n) { TableFor(isa).tanh(x, y, n); }
void SqrtRows(Isa isa, const float* x, float* y, int64_t n) { TableFor(isa).sqrt(x, y, n); }
void RoundToBf16Rows(Isa isa, const float* x, float* y, int64_t n) {
  TableFor(isa).round_to_bf16(x, y, n);
}
void CanonicalNanRows(Isa isa, const float* x, float* y, int64_t n) {
  TableFor(isa).canonical_nan(x, y, n);
}
void MaxRows(Isa isa, const float* a, const float* b, float* y, int64_t n) {
  TableFor(isa).max(a, b, y, n);
}
void MinRows(Isa isa, const float* a, const float* b, float* y, int64_t n) {
  TableFor(isa).min(a, b, y, n);
}
void LaneSums(Isa isa, const float* x, float* y, int64_t n) { TableFor(isa).lane_sums(x, y, n); }
void LaneMaxima(Isa isa, const float* x, float* y, int64_t n) {
  TableFor(isa).lane_maxima(x, y, n);
}

}  // namespace retrace
