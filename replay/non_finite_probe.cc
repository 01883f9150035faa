#include "replay/non_finite_probe.h"

#include <fmt/format.h>

#include <cmath>

namespace retrace {

template <class T>
void NonFiniteProbe::Look(const std::string& name, const T* data, int64_t rows, int64_t cols) {
  for (int64_t i = 0; found_.empty() && i < rows * cols; ++i) {
    if (std::isfinite(data[i])) continue;
    found_ = fmt::format("{} [{}, {}] = {}", name, i / cols, i % cols, data[i]);
  }
}

void NonFiniteProbe::Op(const std::string& name, const float* data, int64_t rows, int64_t cols) {
  Look(name, data, rows, cols);
}

void NonFiniteProbe::Op(const std::string& name, const double* data, int64_t rows, int64_t cols) {
  Look(name, data, rows, cols);
}

}  // namespace retrace
