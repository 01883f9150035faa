// Train: a recording made or continued. Used by `retrace train` and, for branches, by replay.
#ifndef RETRACE_REPLAY_TRAIN_H_
#define RETRACE_REPLAY_TRAIN_H_

#include <functional>
#include <string>
#include <vector>

#include "replay/job.h"
#include "replay/record.h"
#include "replay/recorder.h"

namespace retrace {

struct TrainOptions {
  std::string run_dir;
  bool resume = false;
  int64_t until = -1;         // stop after this update; -1: the recipe's steps

  // Rank 0 only. `stop` and `fire` are asked at each update's boundary; `notice` gets sentences for the user;
  // `started` learns where the job begins; `updated` each update's record.
  std::function<bool()> stop;
  std::function<bool()> fire;  // true once for each time that the user wants the ring to stay
  std::function<void(const std::string&)> notice;
  std::function<void(int64_t position, int64_t target)> started;
  std::function<void(const UpdateRecord&, const Digest&)> updated;
};

enum class TrainEnd { kFinished, kStopped };

// Runs in every rank of the job. A run that ends, is stopped, or halts at a non-finite value leaves
// its last state kept, so it can be resumed and replayed.
// Errors: of the recipe, dataset, store and ranks; kFailed where the run halted (it names the
// tensor).
Result<TrainEnd> Train(const Recipe& recipe, Comm& comm, const JobOptions& job_options,
                       const TrainOptions& options);

// What a branch keeps besides its records.
struct BranchKeep {
  bool states = true;                   // every one
  std::vector<int64_t> keyframes = {};  // these positions even so
};

// The updates of a branch: from the job's present state, edited by the script, which becomes the
// first position of `writer`'s run, to `last`. Errors: as Train; a halt too, unless it is asked for:
// then it is told in `halted` and the branch ends there.
Status RecordBranch(Job& job, RunWriter* writer, const std::string& run_dir, int64_t last,
                    const BranchKeep& kept, Script* script,
                    const std::function<void(const UpdateRecord&, const Digest&)>& updated,
                    Status* halted = nullptr);

}  // namespace retrace

#endif  // RETRACE_REPLAY_TRAIN_H_
