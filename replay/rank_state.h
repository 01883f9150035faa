// RankState: the part of a state that one rank holds: its shards' slabs, and replicas of what its
// shards use but others own (parameter_map.h). Used by the trainer.
#ifndef RETRACE_REPLAY_RANK_STATE_H_
#define RETRACE_REPLAY_RANK_STATE_H_

#include "core/state.h"
#include "replay/parameter_map.h"

namespace retrace {

struct RankState {
  State state;
  ShardState replicas;

  // Slab i of the ParameterMap: shards first, then the replicas.
  ShardState& slab(int i) {
    return i < static_cast<int>(state.shards.size()) ? state.shards[i] : replicas;
  }
  const ShardState& slab(int i) const { return const_cast<RankState*>(this)->slab(i); }
};

inline RankState MakeRankState(const ParameterMap& map) {
  RankState rank{MakeState(map.layout(), map.first_shard(), map.shard_count()), {}};
  for (auto& slab : rank.replicas.slabs) slab.assign(map.slab_numel(map.shard_count()), 0.0f);
  return rank;
}

}  // namespace retrace

#endif  // RETRACE_REPLAY_RANK_STATE_H_
