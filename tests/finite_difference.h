// Derivatives by central differences, with their error: what analytic gradients are tested against.
#ifndef RETRACE_TESTS_FINITE_DIFFERENCE_H_
#define RETRACE_TESTS_FINITE_DIFFERENCE_H_

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace retrace {

struct Derivative {
  double value, error;
};

// d/dx f(x + delta) at delta = 0, for a smooth f computed in FP64 as a sum of terms of absolute sum
// `magnitude`. With D(h) the central difference, D(h) = f' + c h^2 + O(h^4), so (4 D(h) - D(2h))/3
// has the error O(h^4) and its distance from D(h) is |c| h^2, a generous bound for it. On top comes
// rounding: about 32 operations to a term, divided by h.
inline Derivative Differentiate(const std::function<double(double)>& f, double magnitude) {
  const double h = 0x1p-10;
  const double near = (f(h) - f(-h)) / (2 * h);
  const double far = (f(2 * h) - f(-2 * h)) / (4 * h);
  const double value = (4 * near - far) / 3;
  const double rounding = 32 * std::numeric_limits<double>::epsilon() * (magnitude + 1) / h;
  return {value, std::fabs(value - near) + rounding};
}

// `loss()` reads *x; `gradient` is the analytic d loss / d *x, to be within the error of the
// difference.
inline void ExpectDerivative(double* x, double gradient, double magnitude,
                             const std::function<double()>& loss) {
  const double at = *x;
  const Derivative expected = Differentiate(
      [&](double delta) {
        *x = at + delta;
        return loss();
      },
      magnitude);
  *x = at;
  EXPECT_NEAR(expected.value, gradient, expected.error);
  // The bound must be worth something: far below the gradients of order 1 that the tests arrange.
  EXPECT_LT(expected.error, 1e-3);
}

}  // namespace retrace

#endif  // RETRACE_TESTS_FINITE_DIFFERENCE_H_
