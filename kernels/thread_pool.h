// ThreadPool: the threads that kernels run on. Used by every parallel kernel, by replay and by
// surgery. Invariants: a task is run exactly once; Run returns after the last one. Tasks are
// claimed in ascending order by whoever is free, so which worker runs what is a matter of luck: it
// may choose where scratch lies, never what is added to what (NUMERICS.md, "The promise"). Clause
// 1: before every task the worker's floating-point control register is asserted. Thread-safety: one
// Run at a time; a second one, nested or from another thread, is a checked error. Run orders
// memory: tasks see what the caller wrote before, the caller sees what tasks wrote.
#ifndef RETRACE_KERNELS_THREAD_POOL_H_
#define RETRACE_KERNELS_THREAD_POOL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/check.h"

namespace retrace {

class ThreadPool {
 public:
  // `threads` >= 1 counts the caller of Run, so a pool of one starts no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls f(int64_t task, int worker) for every task in [0, tasks); worker is in [0, threads()),
  // the caller is worker 0, and no two tasks run under one worker at a time. f may not throw.
  template <class F>
  void Run(int64_t tasks, F&& f) {
    using Function = std::remove_reference_t<F>;
    RunJob(Job{const_cast<void*>(static_cast<const void*>(std::addressof(f))),
               [](void* function, int64_t task, int worker) {
                 (*static_cast<Function*>(function))(task, worker);
               },
               tasks});
  }

 private:
  // A reference to a callable that outlives the run: no allocation.
  struct Job {
    void* function = nullptr;
    void (*call)(void* function, int64_t task, int worker) = nullptr;
    int64_t tasks = 0;
  };

  void RunJob(const Job& job) noexcept;
  void Publish(const Job& job);
  void RunTasks(int worker) noexcept;
  void AwaitTasks();
  void WorkerMain(int worker) noexcept;

  const int threads_;
  const int spins_;  // polls before a waiting thread goes to sleep

  // The counters live on cache lines of their own: all threads write them.
  alignas(64) std::atomic<int64_t> unclaimed_{0};   // <= 0: nothing left to claim
  alignas(64) std::atomic<int64_t> unfinished_{0};  // tasks claimed or not, but not yet done
  alignas(64) std::atomic<uint32_t> round_{0};  // raised by each parallel Run; workers sleep on it
  std::atomic<uint32_t> endings_{0};            // raised by who ends a run; its caller sleeps on it
  alignas(64) Job job_;                         // read only by those who hold a claimed task
  std::atomic<bool> running_{false};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

// Calls f(int64_t begin, int64_t end, int worker) on ranges that partition [0, rows), each of at
// least `min_rows_per_task` rows where there are as many. The cuts depend on the number of threads:
// what f computes for a row may not depend on the other rows of its range.
template <class F>
void ParallelRows(ThreadPool& pool, int64_t rows, int64_t min_rows_per_task, F&& f) {
  RT_CHECK(rows >= 0 && min_rows_per_task >= 1);
  // A few tasks per thread, so that a thread that lost its core holds up little.
  constexpr int64_t kTasksPerThread = 4;
  const int64_t most = pool.threads() == 1 ? 1 : kTasksPerThread * pool.threads();
  const int64_t tasks = std::min(most, std::max<int64_t>(1, rows / min_rows_per_task));
  if (rows == 0) return;
  const int64_t base = rows / tasks, longer = rows % tasks;  // the first `longer` have one row more
  pool.Run(tasks, [&](int64_t task, int worker) {
    const int64_t begin = task * base + std::min(task, longer);
    f(begin, begin + base + (task < longer ? 1 : 0), worker);
  });
}

// Processors that this process may run on (its affinity mask), at least 1.
int AvailableCpus();

// Clause 1: this thread rounds to nearest even and keeps subnormals, as operand and as result.
bool FloatEnvironmentIsExact();

}  // namespace retrace

#endif  // RETRACE_KERNELS_THREAD_POOL_H_
