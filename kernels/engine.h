// Engine: what runs the ops of one rank: an instruction set, a pool of threads, and their scratch.
// Used by attention.cc and replay. Not thread-safe: one caller at a time. Nothing in it can change a
// bit: threads split ranges that the op table says are independent.
#ifndef RETRACE_KERNELS_ENGINE_H_
#define RETRACE_KERNELS_ENGINE_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/isa.h"
#include "kernels/ops.h"
#include "kernels/thread_pool.h"

namespace retrace {

class Engine {
 public:
  Engine(Isa isa, int threads) : isa_(isa), pool_(threads), scratch_(threads) {}

  Isa isa() const { return isa_; }
  int threads() const { return static_cast<int>(scratch_.size()); }
  ThreadPool& pool() { return pool_; }
  GemmScratch& scratch(int worker) { return scratch_[worker]; }

  template <class T>
  void Multiply(const GemmArgs<T>& args) {
    Gemm(isa_, pool_, scratch_, args);
  }
  template <class T>
  void MultiplyBatch(std::span<const GemmArgs<T>> batch) {
    GemmBatch(isa_, pool_, scratch_, batch);
  }

  // Runs op(args, first, last) over [0, count) in ranges of whole multiples of `unit`, each worth at
  // least about 65536 element operations at `cost` of them an index: some 10 microseconds, well above
  // what handing out a task costs.
  template <class Args>
  void Run(void (*op)(const Args&, int64_t, int64_t), const Args& args, int64_t count,
           int64_t cost, int64_t unit = 1) {
    const int64_t least = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, cost));
    const int64_t share = (count + threads() - 1) / threads();
    int64_t range = std::max(least, std::min(share, 8 * least));
    range = (range + unit - 1) / unit * unit;
    const int64_t tasks = (count + range - 1) / range;
    if (tasks <= 1) return op(args, 0, count);
    pool_.Run(tasks, [&](int64_t task, int) {
      op(args, task * range, std::min(count, (task + 1) * range));
    });
  }

 private:
  Isa isa_;
  ThreadPool pool_;
  std::vector<GemmScratch> scratch_;
};

}  // namespace retrace

#endif  // RETRACE_KERNELS_ENGINE_H_
