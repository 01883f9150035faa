// Where the time of an update goes. Used by `retrace bench step`. Measures only: the updates are
// those of any job. Collective: runs in every rank.
#ifndef RETRACE_REPLAY_STEP_BENCH_H_
#define RETRACE_REPLAY_STEP_BENCH_H_

#include <functional>
#include <vector>

#include "replay/job.h"

namespace retrace {

// Seconds of one update on rank 0, digest of the state included, as in training.
struct StepSeconds {
  double forward = 0;     // with reading the batch
  double backward = 0;    // with recomputed activations
  double evaluation = 0;  // of the fixed batch
  double optimizer = 0;   // lanes combined, norm, clip, AdamW
  double digest = 0;

  double total() const { return forward + backward + evaluation + optimizer + digest; }
};

// The job's next `updates` updates, after one that is not counted (it allocates). `done` is called
// in rank 0 after each.
Result<std::vector<StepSeconds>> MeasureSteps(Job& job, int updates,
                                              const std::function<void(int done)>& done);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STEP_BENCH_H_
