#include "core/diff.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "core/check.h"

namespace retrace {
namespace {

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

// Sign and magnitude as one number; of the unsigned type, so that differences do not overflow.
template <class T>
BitsOf<T> OrderedNumber(T x) {
  using Bits = BitsOf<T>;
  constexpr Bits kSign = Bits{1} << (8 * sizeof(T) - 1);
  const Bits bits = std::bit_cast<Bits>(x);
  return bits & kSign ? kSign - (bits & ~kSign) : kSign + bits;
}

template <class T>
uint64_t Distance(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b) ? 0 : kUlpNan;
  const BitsOf<T> x = OrderedNumber(a), y = OrderedNumber(b);
  return x > y ? x - y : y - x;
}

// Accounts for one pair that differs in bits; sums are the caller's.
template <class T>
void AddDiffering(T a, T b, int64_t index, TensorDifference* d) {
  const uint64_t ulp = Distance(a, b);
  ++d->differing;
  if (!d->first) {
    d->first = {.index = index,
                .a = static_cast<float>(a),
                .b = static_cast<float>(b),
                .ulp = ulp,
                .fp64 = sizeof(T) == 8,
                .wide_a = a,
                .wide_b = b};
  }
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

template <class T>
void AddRun(const T* a, const T* b, int64_t count, int64_t index, TensorDifference* d) {
  for (int64_t i = 0; i < count; ++i) {
    if (std::bit_cast<BitsOf<T>>(a[i]) != std::bit_cast<BitsOf<T>>(b[i])) {
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

uint64_t UlpDistance(float a, float b) { return Distance(a, b); }
uint64_t UlpDistance(double a, double b) { return Distance(a, b); }

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

TensorDifference DiffDoubles(std::span<const double> a, std::span<const double> b) {
  RT_CHECK_EQ(a.size(), b.size());
  TensorDifference difference;
  difference.elements = std::ssize(a);
  AddRun(a.data(), b.data(), std::ssize(a), 0, &difference);
  return difference;
}

}  // namespace retrace
