// What recording costs an update: the same updates with a journal each and with none. Used by
// `retrace bench stall`. Collective: runs in every rank.
#ifndef RETRACE_REPLAY_STALL_BENCH_H_
#define RETRACE_REPLAY_STALL_BENCH_H_

#include <functional>
#include <string>
#include <vector>

#include "replay/job.h"

namespace retrace {

// Of rank 0. An update includes the digest of the state in both columns.
struct StallSeconds {
  std::vector<double> bare;      // updates that keep nothing
  std::vector<double> recorded;  // updates that keep a journal
  std::vector<double> copied;    // of `recorded`: Recorder::Record, which copies and may wait
  std::vector<double>
      durable;        // of the last one of a round: until it is committed, training at rest
  double waited = 0;  // of all of them: for storage
};

// `rounds` times: `updates` bare ones, then as many with a journal, into a new run in `dir`, which
// is the caller's to remove. The first of each kind in a round is not counted: the work of the one
// before overlaps it. Errors: those of the job and of the store.
Result<StallSeconds> MeasureStall(Job& job, const std::string& dir, int updates, int rounds,
                                  const std::function<void(int done)>& done);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STALL_BENCH_H_
