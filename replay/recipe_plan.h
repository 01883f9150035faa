// RecipePlan: what a recipe asks of a machine, computed without allocating any of it. Used by
// `retrace recipe plan` and, for its count of operations, by `retrace bench step`.
//
// Counts the large buffers of a rank: its state, its gradients, copies of the weights in the
// compute format, activations with what the backward pass keeps, and the recorder's staging. Left
// out, since small: the packing scratch of matrix products, per-thread tiles, exchange buffers
// between ranks, optimizer blocks, the program itself. tests/recipe_plan_test.cc holds the sum
// against what an update allocates. Pure.
#ifndef RETRACE_REPLAY_RECIPE_PLAN_H_
#define RETRACE_REPLAY_RECIPE_PLAN_H_

#include <cstdint>
#include <vector>

#include "core/recipe.h"
#include "core/status.h"
#include "replay/parameter_map.h"
#include "replay/rank_place.h"

namespace retrace {

// One tensor-parallel rank; each of the dp data-parallel copies of it needs the same.
struct RankPlan {
  int tp_rank = 0;
  int64_t parameters = 0;  // of its virtual shards
  int64_t replicas = 0;    // elements that others own and it computes with too
  int64_t state_bytes = 0;
  int64_t gradient_bytes = 0;
  int64_t weight_copy_bytes = 0;
  int64_t activation_bytes = 0;
  int64_t staging_bytes = 0;  // of the recorder, on the first data-parallel copy

  int64_t update_bytes() const {  // without recording
    return state_bytes + gradient_bytes + weight_copy_bytes + activation_bytes;
  }
  int64_t bytes() const { return update_bytes() + staging_bytes; }
};

struct RecipePlan {
  int64_t parameters = 0, tensors = 0;
  int64_t tokens = 0;  // of an update
  double flops = 0;    // of an update, by matrix products alone: 2 per multiply-add
  std::vector<RankPlan> ranks;

  // What storage gets.
  int64_t keyframe_bytes = 0;                         // of FP32, before compression
  int64_t journal_bytes = 0;                          // an estimate, see kJournalBytesPerParameter
  int64_t window_keyframes = 0, window_journals = 0;  // that store.window keeps
  int64_t every_keyframes = 0;  // that store.every keeps; some may lie in the window
};

// Measured on gradients of small models, byte-shuffled and compressed with zstd level 1; `retrace
// bench store RUN` measures it on a run.
inline constexpr double kJournalBytesPerParameter = 3.4;

// One rank's part of it.
RankPlan PlanRank(const Recipe& recipe, const ParameterMap& map, const RankPlace& place);

// Errors: kUsage where tp does not divide the virtual shards, or dp the lanes.
Result<RecipePlan> PlanRecipe(const Recipe& recipe, int tp, int dp);

}  // namespace retrace

#endif  // RETRACE_REPLAY_RECIPE_PLAN_H_
