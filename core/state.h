// State: all that the next update depends on. A value. Used by every layer above core.
// A process holds the slabs of a contiguous range of virtual shards (all V of them with one rank);
// counters and rule memories are the same on every rank. Digest: clause 15 of NUMERICS.md.
#ifndef RETRACE_CORE_STATE_H_
#define RETRACE_CORE_STATE_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/digest.h"
#include "core/layout.h"

namespace retrace {

// The counters that surgery may edit, and the position, which nothing may edit.
struct Counters {
  int64_t position = 0;        // k: updates done
  int64_t schedule_index = 0;  // argument of lr()
  int64_t data_cursor = 0;     // samples consumed
  std::vector<int64_t> adam_t;  // one per tensor, canonical order

  bool operator==(const Counters&) const = default;
};

// What adaptive rules remember (an EMA of the norm, ...), by name.
using RuleMemory = std::map<std::string, std::vector<double>>;

enum class Component { kParameter = 0, kM = 1, kV = 2 };
inline constexpr int kNumComponents = 3;
const char* ComponentName(Component component);  // "p", "m", "v"

// FP32 slabs of one virtual shard, each of Layout::slab_numel(shard) elements.
struct ShardState {
  std::array<std::vector<float>, kNumComponents> slabs;

  std::vector<float>& slab(Component c) { return slabs[static_cast<int>(c)]; }
  const std::vector<float>& slab(Component c) const { return slabs[static_cast<int>(c)]; }
};

struct State {
  Counters counters;
  RuleMemory memory;
  int first_shard = 0;  // shards[i] is virtual shard first_shard + i
  std::vector<ShardState> shards;
};

// Zeroed slabs for shards [first, first + count).
State MakeState(const Layout& layout, int first_shard, int shard_count);

// Digests of one shard: [piece][component], pieces in the order of layout.pieces(shard).
using ShardDigests = std::vector<std::array<Digest, kNumComponents>>;

ShardDigests DigestShard(const Layout& layout, int shard, const ShardState& state);

// The digest of a whole state from those of all V shards.
Digest StateDigest(const Counters& counters, const RuleMemory& memory,
                   const std::vector<ShardDigests>& shards);

// The digest of a state held whole in this process.
Digest StateDigest(const Layout& layout, const State& state);

}  // namespace retrace

#endif  // RETRACE_CORE_STATE_H_
