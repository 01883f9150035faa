// RecipePlan: what a recipe asks of a machine and of its dataset, computed without allocating or
// opening any of it. Used by `retrace plan` (on GPUs: gpu_plan.h), before a job allocates anything
// and, for its count of operations, by `retrace bench step`; its samples by whatever moves the data
// cursor.
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

  // What storage gets in FP32, before compression: exact, of all ranks together.
  int64_t keyframe_bytes = 0;  // parameters, m and v
  int64_t journal_bytes = 0;   // the gradient
  // Steps with files that a run of all updates writes, its first and last state included. A ring
  // (keep_last, flight recorder) removes most of them again.
  int64_t keyframes = 0, journals = 0;

  double stored_bytes() const {
    return static_cast<double>(keyframes) * static_cast<double>(keyframe_bytes) +
           static_cast<double>(journals) * static_cast<double>(journal_bytes);
  }
};

// Bytes of files for each parameter, an estimate: measured on small models (docs/performance.md),
// byte-shuffled and compressed with zstd; `retrace bench store RUN` measures them on a run.
inline constexpr double kKeyframeFileBytes = 8.5;
inline constexpr double kJournalFileBytes = 3.4;

// One rank's part of it.
RankPlan PlanRank(const Recipe& recipe, const ParameterMap& map, const RankPlace& place);

// The samples of the training split that the recipe plans: the shuffle depends on their number
// (clause 14), and none comes after them.
int64_t PlannedSamples(const Recipe& recipe);

// Whole updates that there are samples for behind the data cursor.
int64_t UpdatesLeft(const Recipe& recipe, int64_t data_cursor);

// Errors: kUsage where tp does not divide the virtual shards, or dp the lanes.
Result<RecipePlan> PlanRecipe(const Recipe& recipe, int tp, int dp);

}  // namespace retrace

#endif  // RETRACE_REPLAY_RECIPE_PLAN_H_
