// Rebuild: states of a run made again by replay and stored in it. Used by `retrace densify` (states
// that were not kept) and `retrace repair` (states whose files are damaged).
//
// Every state on the way has to have the digest that the ledger has; where one does not, nothing of
// it is stored. A stored step is committed by a "files" line, so a killed rebuild leaves a run that
// opens, and the next one goes on where it ended.
#ifndef RETRACE_SURGERY_REBUILD_H_
#define RETRACE_SURGERY_REBUILD_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "replay/job.h"
#include "replay/retention.h"

namespace retrace {

struct RebuildStep {
  int64_t position = 0;
  Keep keep = Keep::kNothing;
  bool operator==(const RebuildStep&) const = default;
};

struct RebuildPlan {
  std::vector<RebuildStep> steps;  // ascending
  int64_t updates = 0;             // to be lived again
  int64_t bytes = 0;               // about, of what is stored

  bool empty() const { return steps.empty(); }
};

// What makes every state of first..last reachable by a walk: keyframes where there is none to walk
// from or the way would be keyframe_every updates long, else journals.
// Errors: kUsage where the run does not have these positions.
Result<RebuildPlan> PlanDensify(const RunReader& run, const Layout& layout, int64_t first,
                                int64_t last, int64_t keyframe_every);

// The same for `damaged` positions (ascending), each as the run keeps it: a journal where it is one
// and its predecessor can be reached, else a keyframe. `run` must have forgotten them
// (RunReader::Forget); `before` is its history with them.
Result<RebuildPlan> PlanRepair(const RunReader& run, const RunHistory& before, const Layout& layout,
                               const std::vector<int64_t>& damaged);

// Collective. `writer` on rank 0 alone; `run` was opened before it. `done` is called in rank 0
// after each update that was lived again. Errors: kDamaged where replay parts from the recording,
// or the first state of a branch is lost.
Status Rebuild(const RunReader& run, Job& job, RunWriter* writer, const RebuildPlan& plan,
               const std::function<void(int64_t updates)>& done);

}  // namespace retrace

#endif  // RETRACE_SURGERY_REBUILD_H_
