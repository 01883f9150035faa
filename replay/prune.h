// What pruning would take from a run. Used by `retrace prune` and `pack`. Decides only.
#ifndef RETRACE_REPLAY_PRUNE_H_
#define RETRACE_REPLAY_PRUNE_H_

#include <cstdint>
#include <vector>

#include "core/recipe.h"
#include "formats/run_dir.h"
#include "replay/retention.h"

namespace retrace {

struct PrunePolicy {
  StoreRecipe store;          // its rings count as the last states
  bool release_held = false;  // what a firing or densify made stay may go, too
};

// Ranges whose files lead to no state that the policy keeps. The first and the last state are
// always kept: without them nothing can be replayed, or resumed.
std::vector<PositionRange> PlanPrune(const RunHistory& history, const PrunePolicy& policy);

// Says so in the ledger, then removes the files, range by range.
Status Prune(RunWriter* writer, const std::vector<PositionRange>& ranges);

}  // namespace retrace

#endif  // RETRACE_REPLAY_PRUNE_H_
