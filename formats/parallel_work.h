// Parallel work on a list of items. Used by formats for compressing, hashing and decoding.
// Threads live for one call: an item is a mebibyte or so, starting a thread costs far less. Where the
// system gives fewer threads than were asked for, these do all of the work.
#ifndef RETRACE_FORMATS_PARALLEL_WORK_H_
#define RETRACE_FORMATS_PARALLEL_WORK_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/status.h"

namespace retrace {

// run(first) .. run(first + count - 1) in threads of their own, or as many as the system starts.
template <class Run>
std::vector<std::thread> StartThreads(int first, int count, const Run& run) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  try {
    for (int t = first; t < first + count; ++t) threads.emplace_back(run, t);
  } catch (const std::system_error&) {
    // A limit on threads or memory.
  }
  return threads;
}

// work(worker, i) for every i in [0, count), worker in [0, threads): in any order, at once.
template <class Work>
void ParallelFor(size_t count, int threads, const Work& work) {
  std::atomic<size_t> next{0};
  const auto loop = [&](int worker) {
    for (size_t i; (i = next.fetch_add(1)) < count;) work(worker, i);
  };
  const int useful = static_cast<int>(std::min<size_t>(threads, count));
  std::vector<std::thread> helpers = StartThreads(1, std::max(0, useful - 1), loop);
  loop(0);
  for (std::thread& helper : helpers) helper.join();
}

// make(worker, i, &item) on `threads` threads (one: the calling thread alone); use(i, item) on the
// calling thread, in the order of i. At most 2 x threads items exist at a time and are reused, so memory is bounded. The first error
// of `use` ends the work and is returned.
template <class Item, class Make, class Use>
Status OrderedWork(size_t count, int threads, const Make& make, const Use& use) {
  if (threads == 1) {  // what was made is still in the cache when it is used
    Item item;
    Status status;
    for (size_t i = 0; i < count && status.ok(); ++i) {
      make(0, i, &item);
      status = use(i, item);
    }
    return status;
  }
  struct Slot {
    Item item;
    bool made = false;
  };
  std::vector<Slot> slots(2 * static_cast<size_t>(threads));
  std::mutex mutex;
  std::condition_variable changed;
  size_t next = 0, used = 0;
  bool stop = false;
  const auto loop = [&](int worker) {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || next >= count || next < used + slots.size(); });
      if (stop || next >= count) return;
      const size_t i = next++;
      Slot& slot = slots[i % slots.size()];
      lock.unlock();
      make(worker, i, &slot.item);
      lock.lock();
      slot.made = true;
      changed.notify_all();
    }
  };
  std::vector<std::thread> workers = StartThreads(0, threads, loop);
  Status status;
  for (size_t i = 0; workers.empty() && i < count && status.ok(); ++i) {
    make(0, i, &slots[0].item);
    status = use(i, slots[0].item);
  }
  if (workers.empty()) return status;
  for (size_t i = 0; i < count && status.ok(); ++i) {
    Slot& slot = slots[i % slots.size()];
    {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return slot.made; });
      slot.made = false;
    }
    status = use(i, slot.item);
    const std::lock_guard lock(mutex);
    used = i + 1;
    stop = !status.ok();
    changed.notify_all();
  }
  for (std::thread& worker : workers) worker.join();
  return status;
}

}  // namespace retrace

#endif  // RETRACE_FORMATS_PARALLEL_WORK_H_
