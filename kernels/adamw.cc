#include "kernels/adamw.h"

#include "core/check.h"
#include "kernels/adamw_isa.h"

namespace retrace {

void AdamW(Isa isa, const OptimizerRow& row, float clip, const float* g, float* p, float* m,
           float* v, int64_t n) {
  switch (isa) {
    case Isa::kScalar:
      return AdamWScalar(row, clip, g, p, m, v, n);
    case Isa::kAvx2:
      return AdamWAvx2(row, clip, g, p, m, v, n);
    case Isa::kAvx512:
      return AdamWAvx512(row, clip, g, p, m, v, n);
  }
}

double SumSquaresBlock(Isa isa, const float* x, int64_t n) {
  RT_CHECK(n <= kSquareBlock);
  switch (isa) {
    case Isa::kScalar:
      return SumSquaresScalar(x, n);
    case Isa::kAvx2:
      return SumSquaresAvx2(x, n);
    case Isa::kAvx512:
      return SumSquaresAvx512(x, n);
  }
  return 0;
}

double SumUpdateSquaresBlock(Isa isa, const OptimizerRow& row, float clip, const float* g,
                             const float* v, int64_t n) {
  RT_CHECK(n <= kSquareBlock);
  switch (isa) {
    case Isa::kScalar:
      return SumUpdateSquaresScalar(row, clip, g, v, n);
    case Isa::kAvx2:
      return SumUpdateSquaresAvx2(row, clip, g, v, n);
    case Isa::kAvx512:
      return SumUpdateSquaresAvx512(row, clip, g, v, n);
  }
  return 0;
}

double SumSquaredChangeBlock(Isa isa, const float* before, const float* after, int64_t n) {
  RT_CHECK(n <= kSquareBlock);
  switch (isa) {
    case Isa::kScalar:
      return SumSquaredChangeScalar(before, after, n);
    case Isa::kAvx2:
      return SumSquaredChangeAvx2(before, after, n);
    case Isa::kAvx512:
      return SumSquaredChangeAvx512(before, after, n);
  }
  return 0;
}

OddNumbers& OddNumbers::operator+=(const OddNumbers& other) {
  zero += other.zero;
  subnormal += other.subnormal;
  infinite += other.infinite;
  nan += other.nan;
  return *this;
}

OddNumbers CountOdd(Isa isa, const float* x, int64_t n) {
  RT_CHECK(n <= kSquareBlock);
  switch (isa) {
    case Isa::kScalar:
      return CountOddScalar(x, n);
    case Isa::kAvx2:
      return CountOddAvx2(x, n);
    case Isa::kAvx512:
      return CountOddAvx512(x, n);
  }
  return {};
}

}  // namespace retrace
