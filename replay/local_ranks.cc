#include "replay/local_ranks.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/thread_pool.h"
#include "replay/solo_comm.h"

namespace retrace {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kWatchPeriod = std::chrono::milliseconds(20);

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

int ThreadsOfThisProcess() {
  DIR* directory = opendir("/proc/self/task");
  if (directory == nullptr) return 1;  // no /proc: the documented duty of the caller stands
  int threads = 0;
  while (const dirent* entry = readdir(directory)) threads += entry->d_name[0] != '.';
  closedir(directory);
#if defined(__SANITIZE_THREAD__)
  --threads;  // the sanitizer's own
#endif
  return threads;
}

// fn, whose libraries might throw: an exception must neither cross a layer nor leave ranks behind.
Status Call(const std::function<Status(Comm&)>& fn, Comm& comm) {
  try {
    return fn(comm);
  } catch (const std::bad_alloc&) {
    return FailedError(fmt::format(
        "rank {}: out of memory. 'retrace plan' says what a recipe needs; smaller "
        "micro-batches or execution.recompute_activations need less",
        comm.rank()));
  } catch (const std::exception& error) {
    return FailedError(fmt::format("rank {}: an exception: {}", comm.rank(), error.what()));
  } catch (...) {
    return FailedError(fmt::format("rank {}: an exception of unknown type", comm.rank()));
  }
}

[[noreturn]] void RunChild(const std::shared_ptr<ShmJob>& job, int rank, pid_t parent,
                           const std::function<Status(Comm&)>& fn) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(static_cast<int>(StatusCode::kFailed));  // died before prctl
  for (int signal_number : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal_number, SIG_IGN);
  Status status;
  {
    ShmComm comm(job, rank);
    status = CallAndMeet(fn, comm);
  }
  job->SetFinished(rank);
  std::fflush(nullptr);
  _exit(static_cast<int>(status.code()));  // no destructors: statics are the parent's
}

struct Child {
  int rank = 0;
  pid_t pid = 0;
  bool ended = false;
};

// Watches the children from a thread of its own, so that a death is seen while rank 0 computes.
class Watch {
 public:
  Watch(std::shared_ptr<ShmJob> job, const LocalRanksOptions& options)
      : job_(std::move(job)), options_(options) {}

  void Add(int rank, pid_t pid) { children_.push_back({rank, pid}); }
  // The thread takes no signals: a handler of the program's interrupts rank 0's own thread.
  Status Start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    Status status;
    try {
      thread_ = std::thread([this] { Run(); });
    } catch (const std::system_error& error) {
      status = FailedError(
          fmt::format("can not start the thread that watches the ranks: {}", error.what()));
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return status;
  }

  // Rank 0 is back: returns when every child is reaped.
  void Finish() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      rank0_back_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) {
      thread_.join();
    } else {
      Run();
    }
  }

 private:
  void Run() {
    std::optional<Clock::time_point> ending;  // since when all are expected to come back
    bool killed = false;
    while (true) {
      const bool all_ended = Reap();
      bool rank0_back;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        rank0_back = rank0_back_;
        if (rank0_back && all_ended) return;
        changed_.wait_for(lock, kWatchPeriod);
      }
      if (!ending && (rank0_back || job_->aborted())) ending = Clock::now();
      if (!ending) continue;
      if (!killed && SecondsSince(*ending) > options_.grace_s) {
        killed = true;
        for (const Child& child : children_) {
          if (!child.ended) kill(child.pid, SIGKILL);
        }
      }
      if (!rank0_back && SecondsSince(*ending) > options_.shm.time_limit_s) {
        Rank0IsStuck();
        ending = Clock::now();
      }
    }
  }

  // True if none is left.
  bool Reap() {
    bool all_ended = true;
    for (Child& child : children_) {
      if (child.ended) continue;
      int wait_status = 0;
      const pid_t result = waitpid(child.pid, &wait_status, WNOHANG);
      if (result == 0 || (result < 0 && errno == EINTR)) {
        all_ended = false;
        continue;
      }
      child.ended = true;
      if (job_->finished(child.rank) || job_->aborted()) continue;
      std::string how = "ended; somebody else took its exit status";
      if (result > 0 && WIFSIGNALED(wait_status)) {
        how = fmt::format("was killed by signal {} ({})", WTERMSIG(wait_status),
                          strsignal(WTERMSIG(wait_status)));
      } else if (result > 0) {
        how =
            fmt::format("exited with code {} before the end of the job", WEXITSTATUS(wait_status));
      }
      job_->Abort(child.rank, FailedError(fmt::format("{} {}", job_->Describe(child.rank), how)));
    }
    return all_ended;
  }

  void Rank0IsStuck() {
    const std::optional<ShmAbort> reason = job_->aborted();
    const Status status = FailedError(fmt::format(
        "{} did not come back within {:g} s after the job was ended{}", job_->Describe(0),
        options_.shm.time_limit_s, reason ? ": " + reason->status.message() : std::string()));
    if (options_.rank0_is_stuck) return options_.rank0_is_stuck(status);
    std::fprintf(stderr, "retrace: %s\n", status.message().c_str());
    _exit(static_cast<int>(StatusCode::kFailed));
  }

  std::shared_ptr<ShmJob> job_;
  const LocalRanksOptions& options_;
  std::vector<Child> children_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rank0_back_ = false;
};

// The first cause, as the user should read it.
Status Combined(const ShmJob& job, const Status& rank0) {
  const std::optional<ShmAbort> reason = job.aborted();
  if (!reason) return rank0;
  // An error that all ranks find for themselves (a bad recipe) reads best without a rank.
  if (reason->rank == 0 || (!rank0.ok() && rank0.code() != StatusCode::kFailed)) {
    return rank0.ok() ? reason->status : rank0;
  }
  const std::string name = fmt::format("rank {} ", reason->rank);
  if (reason->status.message().starts_with(name)) return reason->status;
  return reason->status.Within(fmt::format("rank {} (pid {})", reason->rank, reason->pid));
}

}  // namespace

Status RunLocalRanks(int ranks, const LocalRanksOptions& options,
                     const std::function<Status(Comm&)>& fn) {
  if (ranks == 1) {
    SoloComm comm;
    return Call(fn, comm);
  }
  RT_ASSIGN_OR_RETURN(const std::shared_ptr<ShmJob> job, ShmJob::Create(ranks, options.shm));
  RT_CHECK_EQ(1, ThreadsOfThisProcess());
  std::fflush(nullptr);
  Watch watch(job, options);
  const pid_t parent = getpid();
  for (int rank = 1; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) RunChild(job, rank, parent, fn);
    if (pid < 0) {
      const Status status = FailedError(
          fmt::format("can not start rank {} of {}: fork: {}", rank, ranks, std::strerror(errno)));
      job->Abort(0, status);
      watch.Finish();
      return status;
    }
    watch.Add(rank, pid);
  }
  Status status;
  {
    ShmComm comm(job, 0);
    status = watch.Start();
    if (status.ok()) {
      status = CallAndMeet(fn, comm);
    } else {
      comm.Abort(status);
    }
  }
  watch.Finish();
  return Combined(*job, status);
}

Status CallAndMeet(const std::function<Status(Comm&)>& fn, Comm& comm) {
  Status status = Call(fn, comm);
  if (status.ok()) {
    comm.set_phase("end of the job");
    status = comm.Barrier(comm.World());
  }
  if (!status.ok()) comm.Abort(status);
  return status;
}

std::string OversubscriptionNote(int ranks, int threads_per_rank) {
  const int processors = AvailableCpus();
  if (ranks * threads_per_rank <= processors) return "";
  return fmt::format(
      "{} ranks x {} threads = {} threads on {} available processors: they take turns, and a rank "
      "that waits for another may wait for its turn. The results are the same; --threads {} or "
      "fewer ranks are faster",
      ranks, threads_per_rank, ranks * threads_per_rank, processors,
      std::max(1, processors / ranks));
}

}  // namespace retrace
