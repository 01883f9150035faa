#include "replay/exchange.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "replay/state_digest.h"

namespace retrace {
namespace {

constexpr Component kComponents[] = {Component::kParameter, Component::kM, Component::kV};

// Is any part of this tensor computed with by a shard that does not own it?
bool IsShared(const Layout& layout, int tensor) {
  const TensorSpec& spec = layout.tensors()[tensor];
  return spec.split == Split::kReplicated ||
         (spec.split == Split::kKvHeads && spec.kv_heads < layout.shards());
}

// Names the first replica that differs from its owner's digest.
Status CheckReplicas(RankContext context, const ParameterMap& map, const RankState& state,
                     const std::vector<ShardDigests>& all) {
  const Layout& layout = map.layout();
  for (const ParameterMap::Replica& replica : map.replicas()) {
    const std::vector<Piece>& pieces = layout.pieces(replica.owner);
    const size_t p = layout.FindPiece(replica.owner, replica.piece.tensor) - pieces.data();
    for (Component c : kComponents) {
      const Digest mine = TensorDigest(state.replicas.slab(c).data() + replica.piece.offset,
                                       replica.piece.numel() * sizeof(float));
      if (mine == all[replica.owner][p][static_cast<int>(c)]) continue;
      return FailedError(fmt::format(
          "RUN@{}: rank {} holds another {} of {} than its owner, shard {}: replicas drifted apart",
          state.state.counters.position, context.comm.rank(), ComponentName(c),
          layout.tensors()[replica.piece.tensor].name, replica.owner));
    }
  }
  return {};
}

}  // namespace

Result<std::vector<std::string>> GatherTexts(Comm& comm, const RankGroup& group,
                                             const std::string& mine) {
  const uint64_t size = mine.size();
  std::vector<uint64_t> sizes(group.size);
  RT_RETURN_IF_ERROR(comm.AllGather(group, &size, sizes.data(), sizeof size));
  const uint64_t most = *std::max_element(sizes.begin(), sizes.end());
  std::string padded = mine, all(most * group.size, '\0');
  padded.resize(most);
  RT_RETURN_IF_ERROR(comm.AllGather(group, padded.data(), all.data(), most));
  std::vector<std::string> texts;
  for (int i = 0; i < group.size; ++i) texts.push_back(all.substr(i * most, sizes[i]));
  return texts;
}

Status AgreeOnStatus(Comm& comm, const Status& mine) {
  if (comm.size() == 1) return mine;
  const std::string text =
      mine.ok() ? "" : std::string(1, '0' + static_cast<char>(mine.code())) + mine.message();
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> texts,
                      GatherTexts(comm, comm.World(), text));
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty()) continue;
    if (!mine.ok()) return mine;
    return Status(static_cast<StatusCode>(texts[rank][0] - '0'), texts[rank].substr(1));
  }
  return {};
}

Status ShareReplicas(RankContext context, const ParameterMap& map, RankState* state) {
  const Layout& layout = map.layout();
  const RankGroup group = context.place.tp_group();
  for (int root = 0; root < group.size; ++root) {
    std::vector<float> buffer;
    const auto each_shared = [&](auto visit) {
      for (int s = root * map.shard_count(); s < (root + 1) * map.shard_count(); ++s) {
        for (const Piece& piece : layout.pieces(s)) {
          if (IsShared(layout, piece.tensor)) visit(s, piece);
        }
      }
    };
    int64_t numel = 0;
    each_shared([&](int, const Piece& piece) { numel += kNumComponents * piece.numel(); });
    buffer.resize(numel);
    if (root == context.place.tp_rank) {
      float* at = buffer.data();
      each_shared([&](int s, const Piece& piece) {
        for (Component c : kComponents) {
          const float* from = state->slab(s - map.first_shard()).slab(c).data() + piece.offset;
          at = std::copy_n(from, piece.numel(), at);
        }
      });
    }
    // Broadcast takes member 0 as its source; every member tells all, and root's is taken.
    std::vector<float> all(numel * group.size);
    RT_RETURN_IF_ERROR(
        context.comm.AllGather(group, buffer.data(), all.data(), numel * sizeof(float)));
    const float* from = all.data() + root * numel;
    each_shared([&](int s, const Piece& piece) {
      for (const ParameterMap::Replica& replica : map.replicas()) {
        if (replica.owner != s || replica.piece.tensor != piece.tensor) continue;
        for (size_t c = 0; c < kNumComponents; ++c) {
          std::copy_n(from + c * piece.numel(), piece.numel(),
                      state->replicas.slabs[c].data() + replica.piece.offset);
        }
      }
      from += kNumComponents * piece.numel();
    });
  }
  return {};
}

Result<Digest> DigestAcrossRanks(RankContext context, const ParameterMap& map,
                                 const RankState& state) {
  const Layout& layout = map.layout();
  const int tp = context.place.tp;
  size_t most = 0;  // digests of a rank, at the most
  for (int r = 0; r < tp; ++r) {
    size_t count = 0;
    for (int s = r * map.shard_count(); s < (r + 1) * map.shard_count(); ++s) {
      count += layout.pieces(s).size() * kNumComponents;
    }
    most = std::max(most, count);
  }
  std::vector<Digest> mine;
  for (const ShardDigests& shard : DigestShards(context.engine, layout, state.state)) {
    for (const auto& piece : shard) mine.insert(mine.end(), piece.begin(), piece.end());
  }
  mine.resize(most);
  std::vector<Digest> gathered(most * tp);
  RT_RETURN_IF_ERROR(context.comm.AllGather(context.place.tp_group(), mine.data(),
                                            gathered.data(), most * sizeof(Digest)));
  std::vector<ShardDigests> all(layout.shards());
  for (int r = 0; r < tp; ++r) {
    const Digest* at = gathered.data() + r * most;
    for (int s = r * map.shard_count(); s < (r + 1) * map.shard_count(); ++s) {
      all[s].resize(layout.pieces(s).size());
      for (auto& piece : all[s]) {
        std::copy_n(at, kNumComponents, piece.begin());
        at += kNumComponents;
      }
    }
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(context.comm, CheckReplicas(context, map, state, all)));
  const Digest digest = StateDigest(state.state.counters, state.state.memory, all);
  if (context.place.dp == 1) return digest;
  std::vector<Digest> copies(context.place.dp);
  RT_RETURN_IF_ERROR(context.comm.AllGather(context.place.dp_group(), &digest, copies.data(),
                                            sizeof(Digest)));
  for (int d = 0; d < context.place.dp; ++d) {
    if (copies[d] == copies[0]) continue;
    return FailedError(fmt::format("RUN@{}: data-parallel rank {} holds state {}, rank 0 {}",
                                   state.state.counters.position, d, copies[d].Hex(),
                                   copies[0].Hex()));
  }
  return digest;
}

}  // namespace retrace
