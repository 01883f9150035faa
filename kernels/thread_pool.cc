#include "kernels/thread_pool.h"

#include <sched.h>

#include <cerrno>
#include <system_error>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace retrace {
namespace {

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// A few ten microseconds: longer than the serial gap between two kernels, shorter than a time
// slice. With more threads than processors the thread waited for needs this very processor: do not
// spin.
int SpinsFor(int threads) { return threads <= AvailableCpus() ? 2000 : 0; }

void CheckFloatEnvironment() {
  if (!FloatEnvironmentIsExact()) [[unlikely]] {
    CheckFailed(__FILE__, __LINE__, "FloatEnvironmentIsExact()",
                "expected round-to-nearest without flush-to-zero or denormals-are-zero in every "
                "worker thread (clause 1), got another floating-point control register; a library "
                "or a task has changed it");
  }
}

}  // namespace

bool FloatEnvironmentIsExact() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000, kRoundingMode = 0x6000, kDenormalsAreZero = 0x0040;
  return (_mm_getcsr() & (kFlushToZero | kRoundingMode | kDenormalsAreZero)) == 0;
#elif defined(__aarch64__)
  uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  constexpr uint64_t kFlushToZero = 1u << 24, kRoundingMode = 3u << 22;
  return (fpcr & (kFlushToZero | kRoundingMode)) == 0;
#else
#error "say how this processor's floating-point control register is read (clause 1)"
#endif
}

int AvailableCpus() {
  // The kernel refuses a mask shorter than its own, which can be longer than cpu_set_t.
  for (int cpus_max = CPU_SETSIZE; cpus_max <= (1 << 20); cpus_max *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus_max);
    if (set == nullptr) return 1;
    const size_t size_bytes = CPU_ALLOC_SIZE(cpus_max);
    const bool known = sched_getaffinity(0, size_bytes, set) == 0;
    const bool too_short = !known && errno == EINVAL;
    const int cpus = known ? CPU_COUNT_S(size_bytes, set) : 1;
    CPU_FREE(set);
    if (!too_short) return std::max(1, cpus);
  }
  return 1;
}

ThreadPool::ThreadPool(int threads) : threads_(threads), spins_(SpinsFor(threads)) {
  RT_CHECK(threads >= 1);
  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int worker = 1; worker < threads; ++worker) {
      workers_.emplace_back([this, worker] { WorkerMain(worker); });
    }
  } catch (const std::system_error&) {
    // A limit on threads or memory: the caller and those that are there claim all tasks.
  }
}

ThreadPool::~ThreadPool() {
  RT_CHECK(!running_.load());
  stopping_.store(true);
  round_.fetch_add(1);
  round_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::RunJob(const Job& job) noexcept {
  RT_CHECK(job.tasks >= 0);
  const bool was_running = running_.exchange(true, std::memory_order_acquire);
  RT_CHECK(!was_running);  // Run inside a task, or from two threads at once
  if (threads_ == 1 || job.tasks <= 1) {
    for (int64_t task = 0; task < job.tasks; ++task) {
      CheckFloatEnvironment();
      job.call(job.function, task, 0);
    }
  } else {
    Publish(job);
    RunTasks(0);
    AwaitTasks();
  }
  running_.store(false, std::memory_order_release);
}

void ThreadPool::Publish(const Job& job) {
  // No one reads job_ now: it is read only between a claim and the report of that claim, and the
  // run before ended with the last report.
  job_ = job;
  unfinished_.store(job.tasks, std::memory_order_relaxed);
  unclaimed_.store(job.tasks, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_seq_cst);
  // Sleepers only; a spinning worker sees round_ by itself. Fewer tasks than threads: wake no more
  // than can find work, a wake-up costs the caller microseconds.
  if (job.tasks >= threads_) {
    round_.notify_all();
  } else {
    for (int64_t helper = 1; helper < job.tasks; ++helper) round_.notify_one();
  }
}

// Claims and runs tasks until none is left. A worker that comes late, even into the middle of a
// later run, does no harm: a successful claim is always one of the run in progress, and that run
// can not end, nor job_ change, before the claim is reported. This is why the caller need not wait
// for workers that are asleep or without a core, only for tasks.
void ThreadPool::RunTasks(int worker) noexcept {
  int64_t done = 0;
  while (true) {
    const int64_t left = unclaimed_.fetch_sub(1, std::memory_order_acquire);
    if (left <= 0) break;
    CheckFloatEnvironment();
    job_.call(job_.function, job_.tasks - left, worker);
    ++done;
  }
  if (done == 0) return;
  if (unfinished_.fetch_sub(done, std::memory_order_acq_rel) == done && worker != 0) {
    endings_.fetch_add(1, std::memory_order_release);
    endings_.notify_one();
  }
}

void ThreadPool::AwaitTasks() {
  for (int spin = 0; spin < spins_; ++spin) {
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    Pause();
  }
  while (true) {
    // In this order: whoever brings unfinished_ to 0 raises endings_ afterwards, so a value read
    // while unfinished_ was not 0 will change. (A late raise of an earlier run only wakes once too
    // often.)
    const uint32_t seen = endings_.load(std::memory_order_acquire);
    if (unfinished_.load(std::memory_order_acquire) == 0) return;
    endings_.wait(seen, std::memory_order_acquire);
  }
}

void ThreadPool::WorkerMain(int worker) noexcept {
  uint32_t seen = 0;
  while (true) {
    for (int spin = 0; spin < spins_ && round_.load(std::memory_order_acquire) == seen; ++spin) {
      Pause();
    }
    round_.wait(seen, std::memory_order_acquire);
    seen = round_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_acquire)) return;
    RunTasks(worker);
  }
}

}  // namespace retrace
