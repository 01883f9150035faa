#include "replay/rank_place.h"

#include <fmt/format.h>

namespace retrace {

Result<RankPlace> RankPlace::Make(const TopologyRecipe& topology, int tp, int dp, int rank) {
  const int V = static_cast<int>(topology.virtual_shards), G = static_cast<int>(topology.lanes);
  if (tp < 1 || V % tp != 0) {
    return UsageError(fmt::format(
        "--tp {}: expected a divisor of the recipe's topology.virtual_shards = {}", tp, V));
  }
  if (dp < 1 || G % dp != 0) {
    return UsageError(
        fmt::format("--dp {}: expected a divisor of the recipe's topology.lanes = {}", dp, G));
  }
  RT_CHECK(rank >= 0 && rank < tp * dp);
  RankPlace place{.tp = tp, .dp = dp, .tp_rank = rank % tp, .dp_rank = rank / tp};
  place.shard_count = V / tp;
  place.first_shard = place.tp_rank * place.shard_count;
  place.lane_count = G / dp;
  place.first_lane = place.dp_rank * place.lane_count;
  return place;
}

}  // namespace retrace
