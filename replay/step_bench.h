// Where the time of an update goes, and its matrix products. Used by `retrace bench step`. Measures
// only: the updates are those of any job. Collective: runs in every rank.
#ifndef RETRACE_REPLAY_STEP_BENCH_H_
#define RETRACE_REPLAY_STEP_BENCH_H_

#include <functional>
#include <string>
#include <vector>

#include "kernels/gemm_bench.h"
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

// From the end of the op before to the end of this one, exchanges with other ranks included.
struct OpSpan {
  std::string name;               // the probe's
  double begin = 0, seconds = 0;  // begin: since the first update
};

// The job's next `updates` updates, after one that is not counted (it allocates). `done` is called
// in rank 0 after each. `spans`, where given, gets every op of the counted updates.
Result<std::vector<StepSeconds>> MeasureSteps(Job& job, int updates,
                                              const std::function<void(int done)>& done,
                                              std::vector<OpSpan>* spans = nullptr);

// The matrix products of a micro-batch, forward and backward, of one virtual shard: each shape
// once, named for where it occurs first. Attention's are those of materialised scores.
std::vector<GemmBenchRow> ProductsOf(const Recipe& recipe);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STEP_BENCH_H_
