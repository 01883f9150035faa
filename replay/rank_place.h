// RankPlace: where a rank stands in a physical topology of dp x tp ranks (clause 7). A value.
// Rank d*tp + r is tensor-parallel rank r of data-parallel rank d; it carries virtual shards
// [r*V/tp, (r+1)*V/tp) and lanes [d*G/dp, (d+1)*G/dp).
#ifndef RETRACE_REPLAY_RANK_PLACE_H_
#define RETRACE_REPLAY_RANK_PLACE_H_

#include "core/recipe.h"
#include "core/status.h"
#include "replay/comm.h"

namespace retrace {

struct RankPlace {
  int tp = 1, dp = 1;
  int tp_rank = 0, dp_rank = 0;
  int first_shard = 0, shard_count = 1;
  int first_lane = 0, lane_count = 1;

  RankGroup tp_group() const { return {dp_rank * tp, 1, tp}; }
  RankGroup dp_group() const { return {tp_rank, tp, dp}; }

  // Errors: kUsage where tp does not divide V, or dp not G.
  static Result<RankPlace> Make(const TopologyRecipe& topology, int tp, int dp, int rank);
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_RANK_PLACE_H_
