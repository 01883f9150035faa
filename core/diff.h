// TensorDifference: how two tensors of the same shape differ, bits first. Used by state_diff.h,
// diff and tests. A value: a difference is a result, not an error. Pure; thread-safe.
//
// ULP distance: floats are numbered in their order, -0 and +0 alike 0, the smallest positive one 1,
// and so on through infinity; the distance is the difference of the numbers. It is defined for all
// but NaN. So it is 0 exactly for equal numbers, and two such elements can differ in bits only as
// -0 and +0, which is counted apart, as NaNs are.
#ifndef RETRACE_CORE_DIFF_H_
#define RETRACE_CORE_DIFF_H_

#include <cstdint>
#include <optional>
#include <span>

#include "core/tensor_view.h"

namespace retrace {

// Of a number and NaN. Larger than any other distance.
inline constexpr uint64_t kUlpNan = UINT64_MAX;

// 0 for two NaNs, whatever their bits.
uint64_t UlpDistance(float a, float b);
uint64_t UlpDistance(double a, double b);

struct ElementDifference {
  int64_t index = 0;   // row by row
  float a = 0, b = 0;  // of FP64 tensors: rounded
  uint64_t ulp = 0;    // of the tensors' type
  bool fp64 = false;
  double wide_a = 0, wide_b = 0;  // the values themselves

  int64_t row(int64_t cols) const { return index / cols; }
  int64_t col(int64_t cols) const { return index % cols; }
};

struct TensorDifference {
  int64_t elements = 0;
  int64_t differing = 0;                   // in bits
  std::optional<ElementDifference> first;  // with the least index

  uint64_t max_ulp = 0;  // over pairs without NaN, as are the next two
  double max_abs = 0;
  double max_rel = 0;  // |a - b| / max(|a|, |b|)

  int64_t nan_a = 0, nan_b = 0;  // NaN elements
  int64_t nan_one_side = 0;      // NaN in one of the two only
  int64_t nan_bits = 0;          // NaN in both, of different bits
  int64_t signed_zeros = 0;      // -0 in one, +0 in the other

  // FP64 sums over the pairs that are finite in both.
  double sum_aa = 0, sum_bb = 0, sum_ab = 0, sum_dd = 0;  // d = a - b

  bool identical() const { return differing == 0; }
  double RelativeL2() const;  // |a - b| / |a|; 0 where a = b, infinite where only a is 0
  double Cosine() const;      // 1 where a = b
};

// Both of the same rows and columns.
TensorDifference DiffTensors(const TensorView& a, const TensorView& b);

// The same of FP64 elements; ULPs are those of FP64.
TensorDifference DiffDoubles(std::span<const double> a, std::span<const double> b);

}  // namespace retrace

#endif  // RETRACE_CORE_DIFF_H_
