// Speed of matrix products in the shapes of a small transformer's step. Used by `retrace bench
// gemm`. Measures only: which implementation runs is the caller's choice, and no result is kept.
// Thread-safety: none needed; owns what it uses.
#ifndef RETRACE_KERNELS_GEMM_BENCH_H_
#define RETRACE_KERNELS_GEMM_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/isa.h"

namespace retrace {

struct GemmBenchRow {
  std::string name;    // where in the step the shape occurs
  std::string layout;  // "NN", "NT", "TN": is A, is B read transposed
  int64_t products = 1, m = 0, n = 0, k = 0;
  // 2·m·n·k·products per second, of the fastest of several runs, in units of 1e9
  double gflops = 0;
};

// Shapes of a small transformer's step: 512 tokens, hidden size 256, MLP and vocabulary of 4096,
// heads of 64 and 128.
std::vector<GemmBenchRow> SmallModelProducts();

// FP32 products (FP64 where `fp64`), each shape measured for about `seconds_per_row`: `rows` with
// gflops set.
std::vector<GemmBenchRow> GemmBenchmark(std::vector<GemmBenchRow> rows, Isa isa, int threads,
                                        bool fp64, double seconds_per_row);

}  // namespace retrace

#endif  // RETRACE_KERNELS_GEMM_BENCH_H_
