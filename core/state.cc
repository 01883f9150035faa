#include "core/state.h"

#include <bit>
#include <cstdio>

#include "core/huge_pages.h"

namespace retrace {
namespace {

// Doubles as bits: the digest must tell -0 from +0.
void AppendBits(double value, std::string* out) {
  char text[24];
  std::snprintf(text, sizeof text, " %016llx",
                static_cast<unsigned long long>(std::bit_cast<uint64_t>(value)));
  *out += text;
}

std::string ScalarText(const Counters& counters, const RuleMemory& memory, size_t shards) {
  std::string text = "retrace state 1\n";
  text += "shards " + std::to_string(shards) + "\n";
  text += "position " + std::to_string(counters.position) + "\n";
  text += "schedule_index " + std::to_string(counters.schedule_index) + "\n";
  text += "data_cursor " + std::to_string(counters.data_cursor) + "\n";
  text += "adam_t";
  for (int64_t t : counters.adam_t) text += " " + std::to_string(t);
  text += "\n";
  for (const auto& [name, values] : memory) {
    text += "memory " + name;
    for (double value : values) AppendBits(value, &text);
    text += "\n";
  }
  return text;
}

}  // namespace

const char* ComponentName(Component component) {
  static constexpr const char* kNames[] = {"p", "m", "v"};
  return kNames[static_cast<int>(component)];
}

State MakeState(const Layout& layout, int first_shard, int shard_count) {
  State state;
  state.first_shard = first_shard;
  state.counters.adam_t.assign(layout.tensors().size(), 0);
  state.shards.resize(shard_count);
  for (int i = 0; i < shard_count; ++i) {
    for (auto& slab : state.shards[i].slabs)
      ResizeInHugePages(&slab, layout.slab_numel(first_shard + i));
  }
  return state;
}

ShardDigests DigestShard(const Layout& layout, int shard, const ShardState& state) {
  const std::vector<Piece>& pieces = layout.pieces(shard);
  ShardDigests digests(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    for (int c = 0; c < kNumComponents; ++c) {
      digests[i][c] =
          TensorDigest(state.slabs[c].data() + pieces[i].offset, pieces[i].numel() * sizeof(float));
    }
  }
  return digests;
}

Digest StateDigest(const Counters& counters, const RuleMemory& memory,
                   const std::vector<ShardDigests>& shards) {
  std::vector<Digest> parts = {DigestOf(ScalarText(counters, memory, shards.size()))};
  for (const ShardDigests& shard : shards) {
    parts.push_back(DigestOf(shard.data(), shard.size() * sizeof(shard[0])));
  }
  return DigestOf(parts);
}

Digest StateDigest(const Layout& layout, const State& state) {
  RT_CHECK_EQ(layout.shards(), static_cast<int>(state.shards.size()));
  std::vector<ShardDigests> shards;
  for (int s = 0; s < layout.shards(); ++s) {
    shards.push_back(DigestShard(layout, s, state.shards[s]));
  }
  return StateDigest(state.counters, state.memory, shards);
}

}  // namespace retrace
