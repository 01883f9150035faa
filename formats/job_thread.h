// JobThread: one thread that does jobs in the order in which they came. Used by rank_writer.h and
// run_dir.h to take work off the training thread. Post may be called from any thread.
#ifndef RETRACE_FORMATS_JOB_THREAD_H_
#define RETRACE_FORMATS_JOB_THREAD_H_

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <string>
#include <thread>

#include "core/status.h"

namespace retrace {

// In a catch (...): the exception as an error. None may leave a job: nobody is there to catch it.
inline Status CaughtError(const std::string& outer) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return FailedError(outer + ": out of memory");
  } catch (const std::exception& error) {
    return FailedError(outer + ": " + error.what());
  } catch (...) {
    return FailedError(outer + ": an exception of unknown type");
  }
}

class JobThread {
 public:
  JobThread() : thread_([this] { Loop(); }) {}
  ~JobThread() {  // does what was posted first
    Post(nullptr);
    thread_.join();
  }
  JobThread(const JobThread&) = delete;
  JobThread& operator=(const JobThread&) = delete;

  void Post(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    posted_.notify_one();
  }

 private:
  void Loop() {
    while (true) {
      std::unique_lock lock(mutex_);
      posted_.wait(lock, [this] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      if (!job) return;
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> jobs_;
  std::thread thread_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_JOB_THREAD_H_
