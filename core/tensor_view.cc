#include "core/tensor_view.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace retrace {

TensorView::TensorView(int64_t rows, int64_t cols, std::vector<Part> parts)
    : rows_(rows), cols_(cols), parts_(std::move(parts)) {
  int64_t covered = 0;
  for (const Part& part : parts_) {
    RT_CHECK(part.row_first >= 0 && part.row_last <= rows && part.col_first >= 0 &&
             part.col_last <= cols);
    covered += (part.row_last - part.row_first) * (part.col_last - part.col_first);
  }
  RT_CHECK_EQ(rows * cols, covered);
}

std::span<const float> TensorView::From(int64_t index) const {
  const int64_t row = index / cols_, col = index % cols_;
  for (const Part& part : parts_) {
    if (row < part.row_first || row >= part.row_last || col < part.col_first ||
        col >= part.col_last) {
      continue;
    }
    const int64_t width = part.col_last - part.col_first;
    const int64_t at = (row - part.row_first) * width + (col - part.col_first);
    // Rows of a part as wide as the tensor follow one another.
    const int64_t last = width == cols_ ? (part.row_last - part.row_first) * width
                                        : (row - part.row_first + 1) * width;
    return {part.values + at, static_cast<size_t>(last - at)};
  }
  RT_CHECK(!"the parts cover every element");
  return {};
}

TensorStatistics StatisticsOf(const TensorView& tensor) {
  TensorStatistics s;
  s.elements = tensor.numel();
  double sum = 0, squares = 0;
  bool any = false;
  for (int64_t index = 0; index < tensor.numel();) {
    const std::span<const float> run = tensor.From(index);
    for (float x : run) {
      if (std::isnan(x)) {
        ++s.nans;
        continue;
      }
      s.min = any ? std::min(s.min, x) : x;
      s.max = any ? std::max(s.max, x) : x;
      any = true;
      if (std::isinf(x)) {
        ++s.infinities;
        continue;
      }
      if (x == 0) ++s.zeros;
      sum += x;
      squares += static_cast<double>(x) * x;
    }
    index += std::ssize(run);
  }
  s.norm = std::sqrt(squares);
  s.mean = s.finite() > 0 ? sum / static_cast<double>(s.finite()) : 0;
  return s;
}

std::vector<float> FirstValues(const TensorView& tensor, int64_t count) {
  std::vector<float> values;
  while (std::ssize(values) < std::min(count, tensor.numel())) {
    const std::span<const float> run = tensor.From(std::ssize(values));
    const int64_t take = std::min<int64_t>(std::ssize(run), count - std::ssize(values));
    values.insert(values.end(), run.begin(), run.begin() + take);
  }
  return values;
}

}  // namespace retrace
