#include "replay/retention.h"

#include <algorithm>

namespace retrace {
namespace {

Keep InWindow(const StoreRecipe& store, int64_t position, int64_t first) {
  if (position < store.window_first || position > store.window_last) return Keep::kNothing;
  const int64_t begin = std::max(store.window_first, first);
  return (position - begin) % store.keyframe_every == 0 ? Keep::kKeyframe : Keep::kJournal;
}

Keep InRing(const StoreRecipe& store, int64_t position, int64_t first) {
  if (!store.HasRing()) return Keep::kNothing;
  return (position - first) % store.keyframe_every == 0 ? Keep::kKeyframe : Keep::kJournal;
}

}  // namespace

Keep KeepOf(const StoreRecipe& store, int64_t position, int64_t first) {
  if (position == first) return Keep::kKeyframe;
  if (store.every > 0 && position % store.every == 0) return Keep::kKeyframe;
  return std::max(InWindow(store, position, first), InRing(store, position, first));
}

KeptSteps KeptStepsOf(const RunHistory& history) {
  KeptSteps steps;
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    const PositionEntry& entry = *history.Find(k);
    if (entry.master) steps[k] = {entry.HasKeyframe(), entry.HasJournal(), 0};
  }
  return steps;
}

std::vector<PositionRange> Superfluous(const KeptSteps& steps,
                                       const std::function<bool(int64_t)>& wanted) {
  std::vector<PositionRange> ranges;
  bool leads = false;   // to a wanted state, from the position before the last one seen
  bool joined = false;  // the last step seen is the first of ranges.back()
  int64_t before = 0;   // that position
  for (auto at = steps.rbegin(); at != steps.rend(); ++at) {
    const auto& [position, step] = *at;
    const bool needed = wanted(position) || (leads && position == before);
    leads = needed && step.journal && !step.keyframe;
    before = position - 1;
    if (needed) {
      joined = false;
    } else if (joined) {
      ranges.back().first = position;
    } else {
      ranges.push_back({position, position});
      joined = true;
    }
  }
  std::reverse(ranges.begin(), ranges.end());
  return ranges;
}

bool Retention::WantsWithoutFlight(int64_t position) const {
  if (position == first_) return true;
  if (store_.every > 0 && position % store_.every == 0) return true;
  if (position >= store_.window_first && position <= store_.window_last) return true;
  if (store_.keep_last > 0 && position > present_ - store_.keep_last) return true;
  return std::any_of(held_.begin(), held_.end(), [position](const PositionRange& range) {
    return position >= range.first && position <= range.last;
  });
}

bool Retention::Wants(int64_t position, int64_t ring_first) const {
  return position == present_ || WantsWithoutFlight(position) ||
         (ring_first >= 0 && position >= ring_first);
}

// From the newest state back: whole segments of a keyframe and the journals after it, until there
// are enough states or the next segment would be too many bytes.
int64_t Retention::RingFirst() const {
  const FlightRecipe& flight = store_.flight;
  if (flight.steps == 0) return -1;
  const int64_t oldest = present_ - flight.steps + 1;
  int64_t ring_first = -1, next = present_, bytes = 0;
  for (auto at = steps_.rbegin(); at != steps_.rend(); ++at, --next) {
    const auto& [position, step] = *at;
    if (position != next) break;
    if (!WantsWithoutFlight(position)) bytes += step.bytes;
    if (flight.bytes > 0 && ring_first >= 0 && bytes > flight.bytes) break;
    if (step.keyframe) ring_first = position;
    if (step.keyframe && position <= oldest) break;
    if (!step.keyframe && !step.journal) break;
  }
  return ring_first;
}

// With a bound in bytes a segment that would take more than half of it is ended early, so that the
// segment before it can go. A journal takes about as much as the one before.
Keep Retention::Next(int64_t position) const {
  const Keep keep = KeepOf(store_, position, first_);
  if (keep != Keep::kJournal || store_.flight.steps == 0 || store_.flight.bytes == 0) return keep;
  int64_t bytes = steps_.empty() ? 0 : steps_.rbegin()->second.bytes;
  for (auto at = steps_.rbegin(); at != steps_.rend(); ++at) {
    bytes += at->second.bytes;
    if (at->second.keyframe) break;
  }
  return bytes > store_.flight.bytes / 2 ? Keep::kKeyframe : keep;
}

void Retention::Reached(int64_t position, std::optional<KeptStep> step) {
  present_ = position;
  if (step) steps_[position] = *step;
}

std::vector<PositionRange> Retention::TakeSuperfluous() {
  if (!store_.HasRing()) return {};
  const int64_t ring_first = RingFirst();
  const std::vector<PositionRange> ranges =
      Superfluous(steps_, [&](int64_t position) { return Wants(position, ring_first); });
  for (const PositionRange& range : ranges) {
    steps_.erase(steps_.lower_bound(range.first), steps_.upper_bound(range.last));
  }
  return ranges;
}

}  // namespace retrace
