#include "core/diff.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/check.h"

namespace retrace {
namespace {

int64_t OrderedNumber(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int64_t magnitude = bits & 0x7fffffffu;
  return bits >> 31 ? -magnitude : magnitude;
}

// Accounts for one pair that differs in bits; sums are the caller's.
void AddDiffering(float a, float b, int64_t index, TensorDifference* d) {
  const uint64_t ulp = UlpDistance(a, b);
  ++d->differing;
  if (!d->first) d->first = {.index = index, .a = a, .b = b, .ulp = ulp};
  if (std::isnan(a) || std::isnan(b)) {
    if (std::isnan(a) && std::isnan(b))
      ++d->nan_bits;
    else
      ++d->nan_one_side;
    return;
  }
  if (ulp == 0) ++d->signed_zeros;
  const double distance = std::fabs(static_cast<double>(a) - static_cast<double>(b));
  const double size =
      std::max(std::fabs(static_cast<double>(a)), std::fabs(static_cast<double>(b)));
  d->max_ulp = std::max(d->max_ulp, ulp);
  d->max_abs = std::max(d->max_abs, distance);
  if (std::isinf(distance))
    d->max_rel = distance;
  else if (size > 0)
    d->max_rel = std::max(d->max_rel, distance / size);
}

void AddRun(const float* a, const float* b, int64_t count, int64_t index, TensorDifference* d) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) {
      AddDiffering(a[i], b[i], index + i, d);
    }
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) {
      d->nan_a += std::isnan(a[i]);
      d->nan_b += std::isnan(b[i]);
      continue;
    }
    const double x = a[i], y = b[i];
    d->sum_aa += x * x;
    d->sum_bb += y * y;
    d->sum_ab += x * y;
    d->sum_dd += (x - y) * (x - y);
  }
}

}  // namespace

uint64_t UlpDistance(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : kUlpNan;
  return static_cast<uint64_t>(std::llabs(OrderedNumber(a) - OrderedNumber(b)));
}

double TensorDifference::RelativeL2() const {
  if (sum_dd == 0) return 0;
  return std::sqrt(sum_dd) / std::sqrt(sum_aa);
}

double TensorDifference::Cosine() const {
  if (sum_dd == 0) return 1;
  if (sum_aa == 0 || sum_bb == 0) return 0;
  return sum_ab / (std::sqrt(sum_aa) * std::sqrt(sum_bb));
}

TensorDifference DiffTensors(const TensorView& a, const TensorView& b) {
  RT_CHECK_EQ(a.rows(), b.rows());
  RT_CHECK_EQ(a.cols(), b.cols());
  TensorDifference difference;
  difference.elements = a.numel();
  for (int64_t index = 0; index < a.numel();) {
    const std::span<const float> run_a = a.From(index), run_b = b.From(index);
    const int64_t count = std::min(std::ssize(run_a), std::ssize(run_b));
    AddRun(run_a.data(), run_b.data(), count, index, &difference);
    index += count;
  }
  return difference;
}

}  // namespace retrace
