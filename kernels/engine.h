// Engine: what runs the ops of one rank: an instruction set, a pool of threads, and their scratch, or
// a device in their place; at level native also the kernels of a library, which have their own
// threads. Used by attention.cc and replay. Not thread-safe: one caller at a time.
// Nothing in it can change a bit: threads split ranges that the op table says are independent.
//
// With a device, Multiply and Run return before the work is done, and pointers in their arguments
// are to ComputeVectors of that device; the pool and its threads are there as ever, for what is no op.
#ifndef RETRACE_KERNELS_ENGINE_H_
#define RETRACE_KERNELS_ENGINE_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/compute_vector.h"
#include "kernels/device.h"
#include "kernels/gemm.h"
#include "kernels/isa.h"
#include "kernels/native_kernels.h"
#include "kernels/ops.h"
#include "kernels/thread_pool.h"

namespace retrace {

class Engine {
 public:
  // `device` and `native`, where given, outlive the engine. At most one of them.
  Engine(Isa isa, int threads, Device* device = nullptr, const NativeKernels* native = nullptr)
      : isa_(isa), device_(device), native_(native), pool_(threads), scratch_(threads) {}

  Isa isa() const { return isa_; }
  Device* device() const { return device_; }  // null: the processor
  int threads() const { return static_cast<int>(scratch_.size()); }
  ThreadPool& pool() { return pool_; }
  GemmScratch& scratch(int worker) { return scratch_[worker]; }

  template <class T>
  void Multiply(const GemmArgs<T>& args) {
    if (device_ != nullptr) return device_->Multiply(std::span<const GemmArgs<T>>(&args, 1));
    if (native_ != nullptr) return MultiplyNatively(std::span<const GemmArgs<T>>(&args, 1));
    Gemm(isa_, pool_, scratch_, args);
  }
  template <class T>
  void MultiplyBatch(std::span<const GemmArgs<T>> batch) {
    if (device_ != nullptr) return device_->Multiply(batch);
    if (native_ != nullptr) return MultiplyNatively(batch);
    GemmBatch(isa_, pool_, scratch_, batch);
  }

  template <class T>
  const OpTable<T>& ops() const {
    return device_ != nullptr ? device_->ops(T()) : Ops<T>(isa_);
  }

  // Until the processor may touch what the ops work on. Errors of the device come by Wait, once and
  // for all that was before.
  void Sync() {
    if (device_ != nullptr && failed_.ok()) failed_ = device_->Wait();
  }
  Status Wait() {
    Sync();
    return failed_;
  }

  // Runs the op that `member` names over [0, count): the library's where the level has one.
  template <class T, class Args>
  void Run(void (*OpTable<T>::*member)(const Args&, int64_t, int64_t), const Args& args,
           int64_t count, int64_t cost, int64_t unit = 1) {
    if (native_ != nullptr) {
      const auto op = NativeOps<T>().*member;
      if (op != nullptr) return op(args, 0, count);
    }
    Run(ops<T>().*member, args, count, cost, unit);
  }

  // Runs op(args, first, last) over [0, count) in ranges of whole multiples of `unit`, each worth at
  // least about 65536 element operations at `cost` of them an index: some 10 microseconds, well above
  // what handing out a task costs.
  template <class Args>
  void Run(void (*op)(const Args&, int64_t, int64_t), const Args& args, int64_t count,
           int64_t cost, int64_t unit = 1) {
    if (device_ != nullptr) return op(args, 0, count);
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
  void MultiplyNatively(std::span<const GemmArgs<float>> batch) { native_->multiply(batch); }
  void MultiplyNatively(std::span<const GemmArgs<double>> batch) { native_->multiply64(batch); }
  template <class T>
  const OpTable<T>& NativeOps() const {
    if constexpr (std::is_same_v<T, float>) return native_->ops;
    else return native_->ops64;
  }

  Isa isa_;
  Device* device_;
  const NativeKernels* native_;
  Status failed_;
  ThreadPool pool_;
  std::vector<GemmScratch> scratch_;
};

}  // namespace retrace

#endif  // RETRACE_KERNELS_ENGINE_H_
