// ShmComm: the Comm of the ranks of one host, over one shared mapping. Used by local_ranks.h
// (forked processes) and by tests (threads of one process); it does not tell them apart.
//
// Every ordered pair of ranks has a channel: a short ring of messages that point into the sender's
// staging area. A call posts its kind, group and size with each piece, so two ranks that call
// different things find out at once. Payloads larger than the staging area go in pieces.
//
// A wait spins for some microseconds, then sleeps on a futex and is bounded by the time limit. Any
// rank's Abort() wakes and ends all ranks' calls; every error of a ShmComm is such an abort, so one
// rank's error is everyone's. A rank's death is seen by whoever started it (RunLocalRanks), who
// calls ShmJob::Abort() on its behalf.
//
// ShmJob is thread-safe; a ShmComm belongs to one thread.
#ifndef RETRACE_REPLAY_SHM_COMM_H_
#define RETRACE_REPLAY_SHM_COMM_H_

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"
#include "replay/comm.h"
#include "replay/comm_call.h"

namespace retrace {

inline constexpr int kShmRanksMax = 128;

struct ShmOptions {
  size_t slot_bytes = 256 << 10;  // of staging; each rank has kShmSlots of them
  double time_limit_s = 300;      // of one call, time spent stopped (SIGSTOP, Ctrl-Z) not counted
  // Spinning before sleeping. Negative: 20 µs when each rank can have a processor, else none.
  double spin_us = -1;
};

// Why the job ended early. The first abort stands; later ones are its consequences.
struct ShmAbort {
  int rank = 0;
  pid_t pid = 0;
  Status status;  // as given by that rank, so with its own code
};

// The shared mapping. Create it before the ranks are forked, or hand it to the threads.
class ShmJob {
 public:
  static Result<std::shared_ptr<ShmJob>> Create(int ranks, const ShmOptions& options = {});
  ~ShmJob();
  ShmJob(const ShmJob&) = delete;
  ShmJob& operator=(const ShmJob&) = delete;

  int ranks() const { return ranks_; }
  const ShmOptions& options() const { return options_; }

  // Ends the job on behalf of `rank`: all calls, present and future, return kFailed with `why`.
  void Abort(int rank, const Status& why);
  std::optional<ShmAbort> aborted() const;

  // A rank that is done says so before it exits; one that exits without is lost.
  void SetFinished(int rank);
  bool finished(int rank) const;

  // "rank 1 (pid 4711), in AllGather of 64 bytes among ranks 0..1, phase 'update 17'".
  std::string Describe(int rank) const;

 private:
  friend class ShmComm;
  struct Shared;
  struct RankBlock;
  struct Channel;
  struct Message;

  ShmJob() = default;
  RankBlock& rank_block(int rank) const;
  Channel& channel(int from, int to) const;
  std::byte* staging(int rank) const;
  void Wake(int rank) const;

  int ranks_ = 0;
  ShmOptions options_;
  size_t map_bytes_ = 0;
  Shared* shared_ = nullptr;
};

class ShmComm final : public Comm {
 public:
  // Made by the thread or process that will be this rank.
  ShmComm(std::shared_ptr<ShmJob> job, int rank);

  int rank() const override { return rank_; }
  int size() const override { return job_->ranks(); }
  Status AllToAll(const RankGroup& group, const void* send, void* recv,
                  size_t block_bytes) override;
  Status AllGather(const RankGroup& group, const void* mine, void* all, size_t bytes) override;
  Status Broadcast(const RankGroup& group, void* data, size_t bytes) override;
  Status Barrier(const RankGroup& group) override;
  void Abort(const Status& why) override { job_->Abort(rank_, why); }

 private:
  Status Begin(const CommCall& call);
  Status End(Status status);
  Status Fail(const CommCall& call, const std::string& what);
  Status AbortedStatus(const CommCall& call) const;
  std::string Where(const CommCall& call) const;
  Status Wait(const CommCall& call, int peer, const std::atomic<uint32_t>& counter,
              uint32_t target);
  Status WaitAsleep(const CommCall& call, int peer, const std::atomic<uint32_t>& counter,
                    uint32_t target);
  Status TimedOut(const CommCall& call, int peer);
  Status AcquireSlot(const CommCall& call);
  Status Post(const CommCall& call, int peer, uint64_t piece, size_t offset);
  Status Take(const CommCall& call, int peer, uint64_t piece, const std::byte** data);
  void Release(int peer);
  Status Exchange(const CommCall& call, const std::byte* send, size_t send_stride, std::byte* recv);

  std::shared_ptr<ShmJob> job_;
  int rank_;
  double spin_us_;
  double waited_s_ = 0;  // in the present call
  std::string published_phase_;
  int slot_ = 0;
  // Per slot: who was sent a piece of it, and the channel's count that says it has been read.
  std::vector<std::vector<std::pair<int, uint32_t>>> slot_readers_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_SHM_COMM_H_
