// Parallel work on a list of items. Used by formats for compressing, hashing and decoding.
// Threads live for one call: an item is a mebibyte or so, starting a thread costs far less.
#ifndef RETRACE_FORMATS_PARALLEL_WORK_H_
#define RETRACE_FORMATS_PARALLEL_WORK_H_

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "core/status.h"

namespace retrace {

// work(worker, i) for every i in [0, count), worker in [0, threads): in any order, at once.
template <class Work>
void ParallelFor(size_t count, int threads, const Work& work) {
  std::atomic<size_t> next{0};
  const auto loop = [&](int worker) {
    for (size_t i; (i = next.fetch_add(1)) < count;) work(worker, i);
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads && static_cast<size_t>(t) < count; ++t) helpers.emplace_back(loop, t);
  loop(0);
  for (std::thread& helper : helpers) helper.join();
}

// make(worker, i, &item) on `threads` threads; use(i, item) on the calling thread, in the order of
// i. At most 2 x threads items exist at a time and are reused, so memory is bounded. The first error
// of `use` ends the work and is returned.
template <class Item, class Make, class Use>
Status OrderedWork(size_t count, int threads, const Make& make, const Use& use) {
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
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) workers.emplace_back(loop, t);
  Status status;
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
