// CommCall: one collective call as the ranks compare it. Used by the Comm implementations, to find
// calls that disagree and to name them. Values only; thread-safe.
#ifndef RETRACE_REPLAY_COMM_CALL_H_
#define RETRACE_REPLAY_COMM_CALL_H_

#include <cstdint>
#include <string>

#include "core/check.h"
#include "replay/comm.h"

namespace retrace {

enum class CommKind : uint32_t { kNone = 0, kAllToAll, kAllGather, kBroadcast, kBarrier };

struct CommCall {
  CommKind kind = CommKind::kNone;
  RankGroup group;
  uint64_t bytes =
      0;  // of a block (AllToAll), of one member's part (AllGather), of all (Broadcast)
};

inline bool SameCall(const CommCall& a, const CommCall& b) {
  return a.kind == b.kind && a.group.first == b.group.first && a.group.stride == b.group.stride &&
         a.group.size == b.group.size && a.bytes == b.bytes;
}

// "ranks 0..3", "ranks 1, 3, .. 7".
inline std::string GroupText(const RankGroup& group) {
  const std::string first = std::to_string(group.first);
  const std::string last = std::to_string(group.RankAt(group.size - 1));
  if (group.size == 1) return "rank " + first + " alone";
  if (group.stride == 1) return "ranks " + first + ".." + last;
  if (group.size == 2) return "ranks " + first + " and " + last;
  return "ranks " + first + ", " + std::to_string(group.RankAt(1)) + ", .. " + last;
}

inline std::string CallText(const CommCall& call) {
  const std::string bytes = std::to_string(call.bytes);
  const std::string among = " among " + GroupText(call.group);
  switch (call.kind) {
    case CommKind::kNone:
      return "no call";
    case CommKind::kAllToAll:
      return "AllToAll of blocks of " + bytes + " bytes" + among;
    case CommKind::kAllGather:
      return "AllGather of " + bytes + " bytes each" + among;
    case CommKind::kBroadcast:
      return "Broadcast of " + bytes + " bytes" + among;
    case CommKind::kBarrier:
      return "Barrier" + among;
  }
  return "call of unknown kind " + std::to_string(static_cast<uint32_t>(call.kind));
}

// Every implementation checks the group its caller made.
inline void CheckGroup(const RankGroup& group, int rank, int ranks) {
  RT_CHECK(group.size >= 1 && group.stride >= 1 && group.first >= 0);
  RT_CHECK(group.RankAt(group.size - 1) < ranks);
  const int index = group.IndexOf(rank);
  RT_CHECK(rank >= group.first && index < group.size);
  RT_CHECK_EQ(rank, group.RankAt(index));
}

}  // namespace retrace

#endif  // RETRACE_REPLAY_COMM_CALL_H_
