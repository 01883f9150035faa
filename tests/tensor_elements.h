// The elements of tensors of a state or a journal as plain vectors, and their products in FP64, for
// tests that work numbers out by hand.
#ifndef RETRACE_TESTS_TENSOR_ELEMENTS_H_
#define RETRACE_TESTS_TENSOR_ELEMENTS_H_

#include <cmath>
#include <functional>
#include <vector>

#include "core/layout.h"
#include "core/state.h"

namespace retrace {

// Elements of a tensor by shard and place; pieces of a tensor do not overlap.
inline std::vector<float> Elements(const Layout& layout, int tensor,
                            const std::function<const float*(int shard)>& slab) {
  std::vector<float> out;
  for (int shard = 0; shard < layout.shards(); ++shard) {
    const Piece* piece = layout.FindPiece(shard, tensor);
    if (piece == nullptr) continue;
    const float* first = slab(shard) + piece->offset;
    out.insert(out.end(), first, first + piece->numel());
  }
  return out;
}

inline std::vector<float> Elements(const Layout& layout, const State& state, int tensor, Component c) {
  return Elements(layout, tensor,
                  [&](int shard) { return state.shards[shard].slab(c).data(); });
}

inline double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}
inline double Norm(const std::vector<float>& x) { return std::sqrt(Dot(x, x)); }

inline std::vector<float> Difference(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(a[i] - b[i]);
  return out;
}

}  // namespace retrace

#endif  // RETRACE_TESTS_TENSOR_ELEMENTS_H_
