// TensorView: a whole tensor that lies in memory in rectangles: the pieces of the shards that own
// it, or one block. Used by diff.h and by everything that reports on tensors. Elements are counted
// row by row of the whole tensor, so nothing that walks a view depends on how many shards hold it.
// A value that borrows the elements; thread-safe.
#ifndef RETRACE_CORE_TENSOR_VIEW_H_
#define RETRACE_CORE_TENSOR_VIEW_H_

#include <cstdint>
#include <span>
#include <vector>

namespace retrace {

class TensorView {
 public:
  struct Part {
    int64_t row_first = 0, row_last = 0;  // [first, last) of the whole tensor
    int64_t col_first = 0, col_last = 0;
    const float* values = nullptr;  // row by row
  };

  TensorView() = default;
  // One block, row by row.
  TensorView(int64_t rows, int64_t cols, const float* values)
      : TensorView(rows, cols, {{0, rows, 0, cols, values}}) {}
  // The parts cover each element exactly once.
  TensorView(int64_t rows, int64_t cols, std::vector<Part> parts);

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t numel() const { return rows_ * cols_; }

  // The elements from `index` on that lie one after another in memory; not empty for an index
  // within [0, numel).
  std::span<const float> From(int64_t index) const;

 private:
  int64_t rows_ = 0, cols_ = 0;
  std::vector<Part> parts_;
};

// Sums in FP64 over the finite elements, in order.
struct TensorStatistics {
  int64_t elements = 0;
  int64_t zeros = 0;  // of either sign
  int64_t nans = 0, infinities = 0;
  double norm = 0;  // L2
  double mean = 0;
  float min = 0, max = 0;  // without NaN; 0 where there is no such element

  int64_t finite() const { return elements - nans - infinities; }
};

TensorStatistics StatisticsOf(const TensorView& tensor);

// The first `count` elements, or all.
std::vector<float> FirstValues(const TensorView& tensor, int64_t count);

}  // namespace retrace

#endif  // RETRACE_CORE_TENSOR_VIEW_H_
