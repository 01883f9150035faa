#include "kernels/gemm.h"

#include <algorithm>
#include <new>

#include "kernels/gemm_kernel.h"

namespace retrace {
namespace {

using gemm_internal::Kernel;
using gemm_internal::Region;

constexpr size_t kAlignmentBytes = 64;
constexpr int64_t kTasksPerThread = 3;  // a thread that lost its core holds up a third of its share
constexpr int64_t kTaskOps = 400'000;  // multiply-adds; some ten microseconds, a hand-off costs two
constexpr int64_t kPackingWeight = 16;  // multiply-adds that cost what packing one element costs

const Kernel<float>& KernelFor(Isa isa, float) {
  switch (isa) {
    case Isa::kAvx512:
      return gemm_internal::kFloatAvx512;
    case Isa::kAvx2:
      return gemm_internal::kFloatAvx2;
    case Isa::kScalar:
      break;
  }
  return gemm_internal::kFloatScalar;
}

const Kernel<double>& KernelFor(Isa isa, double) {
  switch (isa) {
    case Isa::kAvx512:
      return gemm_internal::kDoubleAvx512;
    case Isa::kAvx2:
      return gemm_internal::kDoubleAvx2;
    case Isa::kScalar:
      break;
  }
  return gemm_internal::kDoubleScalar;
}

template <class T>
void Check(const GemmArgs<T>& g) {
  RT_CHECK(g.m >= 0 && g.n >= 0 && g.k >= 0);
  if constexpr (!std::is_same_v<T, float>) RT_CHECK(g.round == Rounding::kNone);
}

// How C is cut into tasks: row_parts × col_parts rectangles of whole tiles.
struct Grid {
  int64_t row_parts = 1, col_parts = 1;
};

int64_t CeilDivide(int64_t x, int64_t y) { return (x + y - 1) / y; }

// At most `parts` rectangles, cut so that the operands packed again by each cost the least.
Grid ChooseGrid(int64_t row_tiles, int64_t col_tiles, int64_t tile_rows, int64_t tile_cols,
                int64_t parts) {
  Grid best;
  int64_t best_cost = -1;
  for (int64_t row_parts = 1; row_parts <= std::min(parts, row_tiles); ++row_parts) {
    const int64_t col_parts = std::min(parts / row_parts, col_tiles);
    const int64_t rows = CeilDivide(row_tiles, row_parts) * tile_rows;
    const int64_t cols = CeilDivide(col_tiles, col_parts) * tile_cols;
    // The time of one part if all run at once: what matters is the largest.
    const int64_t cost = rows * cols + kPackingWeight * (rows + cols);
    if (best_cost < 0 || cost < best_cost) {
      best_cost = cost;
      best = {row_parts, col_parts};
    }
  }
  return best;
}

template <class T>
void RunPart(const Kernel<T>& kernel, const GemmArgs<T>& g, int64_t parts, int64_t part,
             GemmScratch& scratch) {
  const int64_t row_tiles = CeilDivide(g.m, kernel.tile_rows);
  const int64_t col_tiles = CeilDivide(g.n, kernel.tile_cols);
  if (row_tiles == 0 || col_tiles == 0) return;
  const Grid grid = ChooseGrid(row_tiles, col_tiles, kernel.tile_rows, kernel.tile_cols, parts);
  if (part >= grid.row_parts * grid.col_parts) return;
  const int64_t row_part = part / grid.col_parts, col_part = part % grid.col_parts;
  const auto row = [&](int64_t p) {
    return std::min(g.m, row_tiles * p / grid.row_parts * kernel.tile_rows);
  };
  const auto col = [&](int64_t p) {
    return std::min(g.n, col_tiles * p / grid.col_parts * kernel.tile_cols);
  };
  const Region region{row(row_part), row(row_part + 1), col(col_part), col(col_part + 1)};
  kernel.region(g, region, scratch.Reserve(static_cast<size_t>(kernel.workspace_bytes)));
}

}  // namespace

void GemmScratch::Free::operator()(std::byte* data) const {
  ::operator delete (data, std::align_val_t{kAlignmentBytes});
}

void* GemmScratch::Reserve(size_t size_bytes) {
  if (size_bytes > size_bytes_) {
    data_.reset();
    data_.reset(
        static_cast<std::byte*>(::operator new (size_bytes, std::align_val_t{kAlignmentBytes})));
    size_bytes_ = size_bytes;
  }
  return data_.get();
}

template <class T>
void GemmSerial(Isa isa, const GemmArgs<T>& args, GemmScratch& scratch) {
  Check(args);
  if (args.m == 0 || args.n == 0) return;
  const Kernel<T>& kernel = KernelFor(isa, T{});
  kernel.region(args, {0, args.m, 0, args.n},
                scratch.Reserve(static_cast<size_t>(kernel.workspace_bytes)));
}

template <class T>
void GemmBatch(Isa isa, ThreadPool& pool, std::vector<GemmScratch>& scratch,
               std::span<const GemmArgs<T>> products) {
  RT_CHECK(scratch.size() >= static_cast<size_t>(pool.threads()));
  const int64_t count = static_cast<int64_t>(products.size());
  double ops = 0;
  for (const GemmArgs<T>& product : products) {
    Check(product);
    ops += static_cast<double>(product.m) * static_cast<double>(product.n) *
           static_cast<double>(product.k);
  }
  const int64_t most = pool.threads() == 1 ? 1 : kTasksPerThread * pool.threads();
  const int64_t tasks = std::max<int64_t>(
      1, static_cast<int64_t>(std::min(static_cast<double>(most), ops / kTaskOps)));
  if (tasks == 1) {
    for (const GemmArgs<T>& product : products) GemmSerial(isa, product, scratch[0]);
    return;
  }
  const Kernel<T>& kernel = KernelFor(isa, T{});
  if (count >= tasks) {  // whole products, several to a task
    pool.Run(tasks, [&](int64_t task, int worker) {
      for (int64_t p = count * task / tasks; p < count * (task + 1) / tasks; ++p) {
        GemmSerial(isa, products[static_cast<size_t>(p)], scratch[static_cast<size_t>(worker)]);
      }
    });
    return;
  }
  const int64_t parts = CeilDivide(tasks, count);
  pool.Run(count * parts, [&](int64_t task, int worker) {
    RunPart(kernel, products[static_cast<size_t>(task / parts)], parts, task % parts,
            scratch[static_cast<size_t>(worker)]);
  });
}

template <class T>
void Gemm(Isa isa, ThreadPool& pool, std::vector<GemmScratch>& scratch, const GemmArgs<T>& args) {
  GemmBatch(isa, pool, scratch, std::span<const GemmArgs<T>>(&args, 1));
}

template void GemmSerial(Isa, const GemmArgs<float>&, GemmScratch&);
template void GemmSerial(Isa, const GemmArgs<double>&, GemmScratch&);
template void GemmBatch(Isa, ThreadPool&, std::vector<GemmScratch>&,
                        std::span<const GemmArgs<float>>);
template void GemmBatch(Isa, ThreadPool&, std::vector<GemmScratch>&,
                        std::span<const GemmArgs<double>>);
template void Gemm(Isa, ThreadPool&, std::vector<GemmScratch>&, const GemmArgs<float>&);
template void Gemm(Isa, ThreadPool&, std::vector<GemmScratch>&, const GemmArgs<double>&);

}  // namespace retrace
