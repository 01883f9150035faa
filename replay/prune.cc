#include "replay/prune.h"

#include <algorithm>

namespace retrace {

std::vector<PositionRange> PlanPrune(const RunHistory& history, const PrunePolicy& policy) {
  const StoreRecipe& store = policy.store;
  const int64_t first = history.first_position(), last = history.last_position();
  const int64_t ring = std::max(store.keep_last, store.flight.steps);
  return Superfluous(KeptStepsOf(history), [&](int64_t k) {
    return k == first || k > last - std::max<int64_t>(ring, 1) ||
           (store.every > 0 && k % store.every == 0) ||
           (k >= store.window_first && k <= store.window_last) ||
           (!policy.release_held && history.IsHeld(k));
  });
}

Status Prune(RunWriter* writer, const std::vector<PositionRange>& ranges) {
  for (const PositionRange& range : ranges) {
    RT_RETURN_IF_ERROR(writer->Retire(range.first, range.last));
  }
  return {};
}

}  // namespace retrace
