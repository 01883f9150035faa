// ShardTree: the one place where what shards computed is combined (clause 7): a balanced binary tree
// over virtual shards, lower part within a rank, upper part between ranks by moving bytes.
// Used by the transformer and the update. One per rank; not thread-safe.
#ifndef RETRACE_REPLAY_SHARD_TREE_H_
#define RETRACE_REPLAY_SHARD_TREE_H_

#include <cstdint>
#include <vector>

#include "kernels/engine.h"
#include "replay/comm.h"

namespace retrace {

class ShardTree {
 public:
  // `group`: the tensor-parallel group of this rank (or the data-parallel one, for lanes).
  ShardTree(Engine& engine, Comm& comm, RankGroup group)
      : engine_(engine), comm_(comm), group_(group) {}

  int ranks() const { return group_.size; }

  // Computes   partials[0] = round(tree over the parts of all members)
  // Shapes     partials: this rank's parts in order, n elements each, all overwritten; a power of two
  // Order      sum(lo..hi) = sum(lo..mid) + sum(mid..hi); a part is rounded by `partial_round` first
  // Guarantee  same bits for any division of the parts over ranks
  // Clause     7, 8, 10
  // `ranks`: how many ranks, an aligned run of the group's, hold parts; 0: all.
  template <class T>
  Status Sum(const std::vector<T*>& partials, int64_t n, Rounding partial_round, Rounding round,
             int ranks = 0);

  // The same with bitwise or: rows that exactly one part holds and all others hold as +0.
  template <class T>
  Status Merge(const std::vector<T*>& partials, int64_t n);

  // Element-wise maximum (exact in any order).
  template <class T>
  Status Max(const std::vector<T*>& partials, int64_t n);

 private:
  template <class T, class Combine>
  Status AcrossRanks(T* data, int64_t n, int ranks, Combine combine);

  Engine& engine_;
  Comm& comm_;
  RankGroup group_;
  ComputeVector<char> send_, receive_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_SHARD_TREE_H_
