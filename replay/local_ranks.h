// RunLocalRanks: one job of n ranks on this host. The calling process becomes rank 0 and forks the
// others, which share memory with it (shm_comm.h). Used by the commands that train or replay.
//
// It ends: a rank that returns an error, throws, exits, is killed or passes the time limit ends all
// ranks' calls; ranks that do not come back then are killed; every process is reaped before it
// returns. The ranks die with the calling process (and, as Linux has it, with its calling thread).
// They ignore SIGINT, SIGTERM and SIGHUP: whether and when to stop is rank 0's decision.
//
// The caller must be single-threaded (RT_CHECK), since fork() copies only one thread: join thread
// pools first, and start them inside fn. Buffers of stdio are flushed before the fork.
#ifndef RETRACE_REPLAY_LOCAL_RANKS_H_
#define RETRACE_REPLAY_LOCAL_RANKS_H_

#include <functional>
#include <string>

#include "core/status.h"
#include "replay/comm.h"
#include "replay/shm_comm.h"

namespace retrace {

struct LocalRanksOptions {
  ShmOptions shm;
  double grace_s = 10;  // for a rank to come back after the job was ended, before it is killed
  // Called, by a thread of its own, if rank 0 itself does not come back from fn within the time
  // limit after the job was ended. It may not return; the default prints the reason and _exit()s
  // with StatusCode::kFailed, since nothing else is left that ends the program.
  std::function<void(const Status&)> rank0_is_stuck;
};

// Runs fn(comm) in every rank. Ok if it is in all of them. Else the first rank's error, with its
// code; the message names the rank unless it is 0. One rank: no process is started.
Status RunLocalRanks(int ranks, const LocalRanksOptions& options,
                     const std::function<Status(Comm&)>& fn);

// One rank's part, for those who start ranks: fn, then a barrier, so that a rank that is done waits
// for the others and one that calls more often than another is told so. Exceptions become errors;
// an error ends the other ranks' calls.
Status CallAndMeet(const std::function<Status(Comm&)>& fn, Comm& comm);

// Empty, or a sentence for the user: more threads than processors make ranks wait for each other.
std::string OversubscriptionNote(int ranks, int threads_per_rank);

}  // namespace retrace

#endif  // RETRACE_REPLAY_LOCAL_RANKS_H_
