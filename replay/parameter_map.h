// ParameterMap: where a rank keeps each part of each tensor that its shards compute with.
// Used by the trainer. A value, immutable.
//
// A rank holds one slab per virtual shard it carries, as Layout says, and one slab of *replicas*:
// pieces that its shards need but a shard of another rank owns (norms; a KV head that several shards
// share). Replicas get the same gradient bits as their owners, so they stay equal without
// communication; every save checks that they are.
#ifndef RETRACE_REPLAY_PARAMETER_MAP_H_
#define RETRACE_REPLAY_PARAMETER_MAP_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "core/layout.h"
#include "core/state.h"

namespace retrace {

class ParameterMap {
 public:
  ParameterMap(const Layout& layout, int first_shard, int shard_count);

  struct Place {
    int slab = -1;  // index below slabs(); -1: the model has no such tensor
    int64_t offset = 0;
    int64_t rows = 0, cols = 0;
  };
  struct Replica {
    Piece piece;  // offset is that in the replica slab
    int owner = 0;
  };

  const Layout& layout() const { return *layout_; }
  int first_shard() const { return first_shard_; }
  int shard_count() const { return shard_count_; }
  int slabs() const { return shard_count_ + 1; }  // the last one: replicas, perhaps empty
  int64_t slab_numel(int slab) const;
  const std::vector<Replica>& replicas() const { return replicas_; }

  // What virtual shard `shard` (one of this rank's) computes with for a tensor.
  Place Find(int shard, int tensor) const;

  // The shard that owns what `shard` uses of a tensor.
  int Owner(int shard, int tensor) const;

 private:
  const Layout* layout_;
  int first_shard_, shard_count_;
  std::vector<Replica> replicas_;
  std::map<std::pair<int, int>, size_t> replica_index_;  // (tensor, owner)
  int64_t replica_numel_ = 0;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_PARAMETER_MAP_H_
