#include "kernels/gemm_bench.h"

#include <algorithm>
#include <chrono>

#include "kernels/gemm.h"

namespace retrace {
namespace {

template <class T>
class Bench {
 public:
  Bench(Isa isa, int threads) : isa_(isa), pool_(threads), scratch_(static_cast<size_t>(threads)) {}

  double Gflops(const GemmBenchRow& row, double seconds) {
    const int64_t a_size = row.m * row.k, b_size = row.k * row.n, c_size = row.m * row.n;
    std::vector<T> a = Values(row.products * a_size), b = Values(row.products * b_size);
    std::vector<T> c(static_cast<size_t>(row.products * c_size));
    const bool a_transposed = row.layout[0] == 'T', b_transposed = row.layout[1] == 'T';
    std::vector<GemmArgs<T>> products;
    for (int64_t p = 0; p < row.products; ++p) {
      products.push_back({.m = row.m,
                          .n = row.n,
                          .k = row.k,
                          .a = a.data() + p * a_size,
                          .a_row_stride = a_transposed ? 1 : row.k,
                          .a_col_stride = a_transposed ? row.m : 1,
                          .b = b.data() + p * b_size,
                          .b_row_stride = b_transposed ? 1 : row.n,
                          .b_col_stride = b_transposed ? row.k : 1,
                          .c = c.data() + p * c_size,
                          .c_row_stride = row.n});
    }
    const double flops = 2.0 * static_cast<double>(row.products * c_size * row.k);
    // One timing holds enough calls for the clock to resolve; the fastest one is the least
    // disturbed.
    const int calls = 1 + static_cast<int>(2e6 / flops);
    double best = 0, elapsed = 0;
    for (int run = 0; run < 3 || elapsed < seconds; ++run) {
      const auto start = std::chrono::steady_clock::now();
      for (int call = 0; call < calls; ++call) GemmBatch<T>(isa_, pool_, scratch_, products);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      elapsed += time.count();
      best = std::max(best, flops * calls / time.count() / 1e9);
    }
    return best;
  }

 private:
  static std::vector<T> Values(int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(i * 37 % 101) / T{101};
    return values;
  }

  const Isa isa_;
  ThreadPool pool_;
  std::vector<GemmScratch> scratch_;
};

template <class T>
void Measure(Isa isa, int threads, double seconds_per_row, std::vector<GemmBenchRow>* rows) {
  Bench<T> bench(isa, threads);
  for (GemmBenchRow& row : *rows) row.gflops = bench.Gflops(row, seconds_per_row);
}

}  // namespace

std::vector<GemmBenchRow> SmallModelProducts() {
  return {
      {"square", "NN", 1, 256, 256, 256},          {"square", "NN", 1, 512, 512, 512},
      {"projection", "NT", 1, 512, 64, 64},        {"projection", "NT", 1, 512, 128, 128},
      {"projection", "NT", 1, 512, 256, 256},      {"projection dX", "NN", 1, 512, 64, 64},
      {"projection dX", "NN", 1, 512, 256, 256},   {"projection dW", "TN", 1, 64, 64, 512},
      {"projection dW", "TN", 1, 256, 256, 512},   {"head", "NT", 1, 512, 4096, 64},
      {"head", "NT", 1, 512, 4096, 256},           {"head dX", "NN", 1, 512, 64, 4096},
      {"head dX", "NN", 1, 512, 256, 4096},        {"head dW", "TN", 1, 4096, 64, 512},
      {"head dW", "TN", 1, 4096, 256, 512},        {"scores", "NT", 32, 32, 32, 128},
      {"scores", "NT", 4, 512, 512, 64},           {"attention output", "NN", 32, 32, 128, 32},
      {"attention output", "NN", 4, 512, 64, 512}, {"small", "NN", 1, 16, 16, 16},
  };
}

std::vector<GemmBenchRow> GemmBenchmark(std::vector<GemmBenchRow> rows, Isa isa, int threads,
                                        bool fp64, double seconds_per_row) {
  if (fp64) {
    Measure<double>(isa, threads, seconds_per_row, &rows);
  } else {
    Measure<float>(isa, threads, seconds_per_row, &rows);
  }
  return rows;
}

}  // namespace retrace
