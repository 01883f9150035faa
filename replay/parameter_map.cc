#include "replay/parameter_map.h"

namespace retrace {

ParameterMap::ParameterMap(const Layout& layout, int first_shard, int shard_count)
    : layout_(&layout), first_shard_(first_shard), shard_count_(shard_count) {
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    for (int shard = first_shard; shard < first_shard + shard_count; ++shard) {
      const int owner = Owner(shard, static_cast<int>(t));
      const bool local = owner >= first_shard && owner < first_shard + shard_count;
      const auto key = std::pair(static_cast<int>(t), owner);
      if (local || replica_index_.contains(key)) continue;
      Piece piece = *layout.FindPiece(owner, static_cast<int>(t));
      piece.offset = replica_numel_;
      replica_numel_ += piece.numel();
      replica_index_[key] = replicas_.size();
      replicas_.push_back({piece, owner});
    }
  }
}

int64_t ParameterMap::slab_numel(int slab) const {
  return slab == shard_count_ ? replica_numel_ : layout_->slab_numel(first_shard_ + slab);
}

int ParameterMap::Owner(int shard, int tensor) const {
  const TensorSpec& spec = layout_->tensors()[tensor];
  const int64_t V = layout_->shards();
  if (spec.split == Split::kReplicated) return 0;
  if (spec.split != Split::kKvHeads || spec.kv_heads >= V) return shard;
  const int64_t sharing = V / spec.kv_heads;  // shards that use one KV head
  return static_cast<int>(shard / sharing * sharing);
}

ParameterMap::Place ParameterMap::Find(int shard, int tensor) const {
  if (tensor < 0) return {};
  const int owner = Owner(shard, tensor);
  if (owner >= first_shard_ && owner < first_shard_ + shard_count_) {
    const Piece* piece = layout_->FindPiece(owner, tensor);
    RT_CHECK(piece != nullptr);
    return {owner - first_shard_, piece->offset, piece->rows(), piece->cols()};
  }
  const Replica& replica = replicas_[replica_index_.at({tensor, owner})];
  return {shard_count_, replica.piece.offset, replica.piece.rows(), replica.piece.cols()};
}

}  // namespace retrace
