// Retention: what a run's policy keeps of each position, and which files it no longer needs. Used
// by the recorder, on rank 0, and by `retrace prune` and `pack`. Decides only; RunWriter does it.
//
// Invariant: files go only where no state that the policy keeps is reached over them, so a ring
// always begins at a keyframe. The newest state stays, too. Not thread-safe.
#ifndef RETRACE_REPLAY_RETENTION_H_
#define RETRACE_REPLAY_RETENTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "core/recipe.h"
#include "formats/run_dir.h"

namespace retrace {

enum class Keep { kNothing, kJournal, kKeyframe };

// What the policy keeps of position k of a run that begins at `first`. The first state is always
// kept, and so is what `store` says: a window's first state and every keyframe_every-th after it as
// keyframes, the others as journals; every every-th position as a keyframe; with a ring everything,
// with a keyframe at every keyframe_every-th position.
Keep KeepOf(const StoreRecipe& store, int64_t position, int64_t first);

struct PositionRange {
  int64_t first = 0, last = 0;
  bool operator==(const PositionRange&) const = default;
};

// A position that has files.
struct KeptStep {
  bool keyframe = false, journal = false;
  int64_t bytes = 0;  // of its files, as far as they matter to who asks
};
using KeptSteps = std::map<int64_t, KeptStep>;

// Bytes are 0.
KeptSteps KeptStepsOf(const RunHistory& history);

// The steps whose files lead to no wanted state, as ranges without a needed step in them.
std::vector<PositionRange> Superfluous(const KeptSteps& steps,
                                       const std::function<bool(int64_t)>& wanted);

class Retention {
 public:
  Retention(const StoreRecipe& store, int64_t first_position)
      : store_(store), first_(first_position) {}

  // What is to be kept of `position`, about to be made.
  Keep Next(int64_t position) const;
  // The run is at `position`, of which this is kept; nullopt: no files.
  void Reached(int64_t position, std::optional<KeptStep> step);
  void Hold(PositionRange range) { held_.push_back(range); }

  // The first state of the flight recorder's ring, a keyframe; -1: none.
  int64_t RingFirst() const;
  // Steps that are not needed any more; forgotten here.
  std::vector<PositionRange> TakeSuperfluous();

  // Whether the policy keeps the state of `position`; ring_first: RingFirst().
  bool Wants(int64_t position, int64_t ring_first) const;
  const KeptSteps& steps() const { return steps_; }

 private:
  bool WantsWithoutFlight(int64_t position) const;

  const StoreRecipe store_;
  const int64_t first_;
  int64_t present_ = -1;
  KeptSteps steps_;
  std::vector<PositionRange> held_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_RETENTION_H_
