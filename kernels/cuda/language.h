// CUDA's words for the kernels in this folder: nvcc's own, or, where g++ compiles the same files for
// the tests, those of emulator.h. Included by every .cu here and by nothing else.
//
// A kernel may use: threadIdx, blockIdx, blockDim, gridDim; Shared<T, N> variables marked
// __shared__; __syncthreads(); __shfl_xor_sync; the arithmetic of core/scalar_math.h and
// kernels/element_math.h; raw pointers. Nothing else, so that the emulator sees all that it does.
#ifndef RETRACE_KERNELS_CUDA_LANGUAGE_H_
#define RETRACE_KERNELS_CUDA_LANGUAGE_H_

#include <stdint.h>

#ifdef __CUDACC__

#define RT_UNROLL _Pragma("unroll")
#define RT_NO_UNROLL _Pragma("unroll 1")

namespace retrace::cuda {

// An array in shared memory.
template <class T, int kSize>
struct alignas(16) Shared {
  T data[kSize];
  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
};

void NoteLaunch(const char* kernel);  // keeps the first error; device_cuda.cu

template <class... Parameters, class... Arguments>
void Launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
            const Arguments&... arguments) {
  kernel<<<grid, threads>>>(arguments...);
  NoteLaunch(name);
}

}  // namespace retrace::cuda

#else
#include "kernels/cuda/emulator.h"
#endif

namespace retrace::cuda {

// How the grid of a kernel is chosen. No shape can change a bit; tests set others.
struct LaunchShape {
  unsigned threads = 128;       // of a block; a multiple of 32
  int64_t blocks_most = 65535;  // further work is done by the same blocks, in turn
  int tile = -1;                // of matrix products: 0 small, 1 large, -1 by the shape
};
LaunchShape& launch_shape();

// Blocks for `count` pieces of work, `per_block` to a block at a time; at least 1.
inline dim3 GridFor(int64_t count, int64_t per_block) {
  const int64_t wanted = (count + per_block - 1) / per_block;
  const int64_t most = launch_shape().blocks_most;
  const int64_t blocks = wanted < 1 ? 1 : wanted > most ? most : wanted;
  return dim3(static_cast<unsigned>(blocks), 1, 1);
}

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_LANGUAGE_H_
