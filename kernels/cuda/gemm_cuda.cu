// Matrix products on a CUDA device: the order and the guarantee of kernels/gemm.h.
#include "kernels/cuda/device_gemm.h"
#include "kernels/cuda/device_product.h"

namespace retrace::cuda {
namespace {

constexpr int kProducts = 16;  // of one launch; they are arguments of the kernel

template <class T>
struct Products {
  GemmArgs<T> of[kProducts];
};

// Row y of the grid has a product; its blocks take the tiles of C in turn.
template <class T, class S>
__global__ void __launch_bounds__(S::kThreads) GemmKernel(const __grid_constant__ Products<T> all) {
  const GemmArgs<T>& g = all.of[blockIdx.y];
  const int64_t down = (g.m + S::kRows - 1) / S::kRows, across = (g.n + S::kCols - 1) / S::kCols;
  for (int64_t tile = blockIdx.x; tile < down * across; tile += gridDim.x) {
    const int64_t row = tile / across * S::kRows, col = tile % across * S::kCols;
    T sum[S::kThreadRows][S::kThreadCols];
    ProductTile<T, S>({g.a + row * g.a_row_stride, g.a_row_stride, g.a_col_stride, g.m - row},
                      {g.b + col * g.b_col_stride, g.b_col_stride, g.b_row_stride, g.n - col}, g.k,
                      sum);
    RT_UNROLL
    for (int i = 0; i < S::kThreadRows; ++i) {
      const int64_t r = row + S::Row(i);
      if (r >= g.m) continue;
      RT_UNROLL
      for (int j = 0; j < S::kThreadCols; ++j) {
        const int64_t c = col + S::Col(j);
        if (c >= g.n) continue;
        T* at = g.c + r * g.c_row_stride + c;
        const T product = element::Rounded(sum[i][j], g.round);
        *at = g.add ? *at + product : product;
      }
    }
  }
}

template <class S>
int64_t TilesOf(int64_t m, int64_t n) {
  return (m + S::kRows - 1) / S::kRows * ((n + S::kCols - 1) / S::kCols);
}

template <class S, class T>
void LaunchProducts(const Products<T>& products, int count) {
  int64_t most = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t tiles = TilesOf<S>(products.of[i].m, products.of[i].n);
    most = tiles > most ? tiles : most;
  }
  if (most == 0) return;
  dim3 grid = GridFor(most, 1);
  grid.y = static_cast<unsigned>(count);
  Launch("Gemm", GemmKernel<T, S>, grid, S::kThreads, products);
}

// Large tiles where they keep every multiprocessor of a large device busy.
template <class T>
bool PrefersLarge(const Products<T>& products, int count) {
  constexpr int64_t kTilesToFill = 2 * 132;
  if (launch_shape().tile >= 0) return launch_shape().tile == 1;
  int64_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    tiles += TilesOf<typename ProductTiles<T>::Large>(products.of[i].m, products.of[i].n);
  }
  return tiles >= kTilesToFill;
}

}  // namespace

template <class T>
void DeviceGemm(const GemmArgs<T>* products, int64_t count) {
  for (int64_t at = 0; at < count; at += kProducts) {
    const int some = static_cast<int>(count - at < kProducts ? count - at : kProducts);
    Products<T> batch;
    for (int i = 0; i < some; ++i) batch.of[i] = products[at + i];
    if (PrefersLarge(batch, some)) {
      LaunchProducts<typename ProductTiles<T>::Large>(batch, some);
    } else {
      LaunchProducts<typename ProductTiles<T>::Small>(batch, some);
    }
  }
}

template void DeviceGemm(const GemmArgs<float>*, int64_t);
template void DeviceGemm(const GemmArgs<double>*, int64_t);

}  // namespace retrace::cuda
