// Clause 5 in code: what every other implementation is compared with.
#include <cmath>

#include "kernels/gemm_kernel.h"

namespace retrace::gemm_internal {
namespace {

template <class T>
RT_INLINE T Product(const GemmArgs<T>& g, int64_t i, int64_t j) {
  const T* a = g.a + i * g.a_row_stride;
  const T* b = g.b + j * g.b_col_stride;
  T sum = 0;
  int64_t k = 0;
  for (int64_t begin = 0; begin < g.k; begin += kChain) {
    T chain = 0;
    for (; k < g.k && k < begin + kChain; ++k) {
      chain = std::fma(a[k * g.a_col_stride], b[k * g.b_row_stride], chain);
    }
    sum = begin == 0 ? chain : sum + chain;
  }
  return sum;
}

template <class T>
RT_INLINE void RegionLoop(const GemmArgs<T>& g, const Region& region) {
  for (int64_t i = region.row_begin; i < region.row_end; ++i) {
    for (int64_t j = region.col_begin; j < region.col_end; ++j) {
      T product = Product(g, i, j);
      if (g.round == Rounding::kBf16) product = ToBf16(product);
      T& c = g.c[i * g.c_row_stride + j];
      c = g.add ? c + product : product;
    }
  }
}

// std::fma is one instruction where the compiler may use it, else a call of libm (which gives the
// same bits, but at a tenth of the speed); most processors that run this can.
#if defined(__x86_64__)
template <class T>
[[gnu::target("fma")]] void RegionFma(const GemmArgs<T>& g, const Region& region) {
  RegionLoop(g, region);
}
#endif

template <class T>
void ScalarRegion(const GemmArgs<T>& g, const Region& region, void*) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("fma")) return RegionFma(g, region);
#endif
  RegionLoop(g, region);
}

}  // namespace

constinit const Kernel<float> kFloatScalar = {ScalarRegion<float>, 0, 4, 16};
constinit const Kernel<double> kDoubleScalar = {ScalarRegion<double>, 0, 4, 8};

}  // namespace retrace::gemm_internal
