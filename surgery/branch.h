// Branch: replaying updates of a run, as recorded or with interventions. Used by `retrace replay`
// and experiments. Collective: called in every rank of a job.
#ifndef RETRACE_SURGERY_BRANCH_H_
#define RETRACE_SURGERY_BRANCH_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "replay/job.h"
#include "replay/train.h"
#include "surgery/intervention.h"

namespace retrace {

// What is in force in a run from update `first` on: for a branch, what its lineage says; else
// nothing. Errors: kDamaged where the lineage names interventions that this build does not know.
Result<std::vector<Intervention>> InheritedInterventions(const RunReader& run, int64_t first);

// All that the run was made under, from its first update on.
Result<InterventionScript> RecordedScript(const RunReader& run);

// Takes the job to RUN@(first-1), replayed from the nearest kept state where it is not kept itself.
// Errors: kUsage where the run does not have it; kDamaged where replay towards it parts from the
// recording.
Status GoBefore(const RunReader& run, Job& job, int64_t first);

// What is in force in a branch of updates first..last of the job's run: what the parent has in
// force, for as long as the branch lasts, then `interventions`. Checked as far as it can be before
// anything runs.
Result<InterventionScript> BranchScript(const RunReader& run, const Job& job, int64_t first,
                                        int64_t last,
                                        const std::vector<Intervention>& interventions);

// How a replayed update compares with its recording.
struct ReplayedUpdate {
  int64_t update = 0;
  bool same_state = false, same_record = false;
  Digest expected, got;
  UpdateRecord recorded, replayed;

  bool identical() const { return same_state && same_record; }
};

// Replays updates first..last exactly as recorded, from the nearest kept state before them, and calls
// `visit` (rank 0) after each of first..last. Stops after the first update that is not identical.
// Result: whether all were. Errors: kUsage where the run does not have these updates.
Result<bool> ReplayAsRecorded(const RunReader& run, Job& job, int64_t first, int64_t last,
                              const std::function<void(const ReplayedUpdate&)>& visit);

// The same from the job's present state, which is RUN@(first-1).
Result<bool> ReplayHere(const RunReader& run, Job& job, int64_t last,
                        const std::function<void(const ReplayedUpdate&)>& visit);

struct BranchPlan {
  int64_t first = 0, last = 0;  // updates
  std::vector<Intervention> interventions;
  std::string out;  // directory of the branch
  BranchKeep kept = {};
};

// Records the branch. `updated` is called in rank 0.
Status MakeBranch(const RunReader& run, Job& job, const BranchPlan& plan,
                  const std::function<void(const UpdateRecord&, const Digest&)>& updated);

// The same with a job that is at RUN@(first-1) already; its digest is checked. `halted`: RecordBranch.
Status MakeBranchHere(const RunReader& run, Job& job, const BranchPlan& plan,
                      const std::function<void(const UpdateRecord&, const Digest&)>& updated,
                      Status* halted = nullptr);

}  // namespace retrace

#endif  // RETRACE_SURGERY_BRANCH_H_
