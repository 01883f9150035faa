// DryRun: what the interventions of a branch would change, before anything is recorded. Used by
// `retrace replay --dry-run`. Collective; the parent is read, nothing is written.
#ifndef RETRACE_SURGERY_DRY_RUN_H_
#define RETRACE_SURGERY_DRY_RUN_H_

#include <optional>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "surgery/branch.h"

namespace retrace {

// One component of one tensor that a state intervention changes.
struct TensorChange {
  std::string tensor;
  Component component = Component::kParameter;
  double norm_before = 0, norm_after = 0;  // FP64, plain sums: to be read, not compared
  int64_t elements = 0;                    // whose bits change
};

// The schedule's index, the data cursor, or Adam's t of a tensor.
struct CounterChange {
  std::string counter;
  std::optional<std::string> tensor;
  int64_t before = 0, after = 0;

  std::string Name() const { return tensor ? counter + " of " + *tensor : counter; }
};

// What one intervention makes of what an update does, after those before it in the list.
struct SamplesChange {
  int64_t update = 0;
  std::vector<int64_t> before, after = {};
  int64_t cursor_before = 0, cursor_after = 0;  // after the update
  bool skipped = false, t_moves = true, schedule_moves = true;
};

// What one intervention changes. Which lists are filled depends on its kind.
struct PlannedIntervention {
  Intervention intervention;  // dated
  std::vector<TensorChange> tensors = {};
  std::vector<CounterChange> counters = {};
  std::vector<std::string> memories = {};     // of rules, that come, go or change
  std::vector<RecipeDifference> recipe = {};  // against what is in force without it
  std::vector<std::string> names = {};        // tensors that its glob matches
  std::vector<SamplesChange> updates = {};    // the first few that it changes
  int64_t updates_changed = 0;                // all of them
  // A change of state: what it was tried on, the branch's first state or, dated later, the
  // parent's; or, not known, why there is none.
  std::string state = {};
  bool known = true;
};

// In the order in which they act. Errors: as MakeBranch before its first update.
Result<std::vector<PlannedIntervention>> PlanBranch(const RunReader& run, Job& job,
                                                    const BranchPlan& plan);

}  // namespace retrace

#endif  // RETRACE_SURGERY_DRY_RUN_H_
