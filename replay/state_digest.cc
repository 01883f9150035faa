#include "replay/state_digest.h"

#include <utility>

#include "core/check.h"

namespace retrace {

std::vector<ShardDigests> DigestShards(Engine& engine, const Layout& layout, const State& state) {
  std::vector<ShardDigests> digests(state.shards.size());
  std::vector<std::pair<size_t, size_t>> work;  // shard here, piece
  for (size_t i = 0; i < digests.size(); ++i) {
    digests[i].resize(layout.pieces(state.first_shard + static_cast<int>(i)).size());
    for (size_t p = 0; p < digests[i].size(); ++p) work.emplace_back(i, p);
  }
  const int64_t count = static_cast<int64_t>(work.size()) * kNumComponents;
  engine.pool().Run(count, [&](int64_t task, int) {
    const auto [i, p] = work[task / kNumComponents];
    const int64_t c = task % kNumComponents;
    const Piece& piece = layout.pieces(state.first_shard + static_cast<int>(i))[p];
    digests[i][p][c] = TensorDigest(state.shards[i].slabs[c].data() + piece.offset,
                                    piece.numel() * sizeof(float));
  });
  return digests;
}

Digest StateDigest(Engine& engine, const Layout& layout, const State& state) {
  RT_CHECK_EQ(layout.shards(), static_cast<int>(state.shards.size()));
  return StateDigest(state.counters, state.memory, DigestShards(engine, layout, state));
}

}  // namespace retrace
