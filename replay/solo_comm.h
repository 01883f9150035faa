// SoloComm: the Comm of a job of one rank. Used by replay, by tests, and by every job that asks for
// no ranks. It copies the caller's own block and never fails.
#ifndef RETRACE_REPLAY_SOLO_COMM_H_
#define RETRACE_REPLAY_SOLO_COMM_H_

#include <cstring>

#include "replay/comm.h"
#include "replay/comm_call.h"

namespace retrace {

class SoloComm final : public Comm {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

  Status AllToAll(const RankGroup& group, const void* send, void* recv,
                  size_t block_bytes) override {
    CheckGroup(group, 0, 1);
    if (block_bytes > 0) std::memcpy(recv, send, block_bytes);
    return {};
  }

  Status AllGather(const RankGroup& group, const void* mine, void* all, size_t bytes) override {
    CheckGroup(group, 0, 1);
    if (bytes > 0 && mine != all) std::memcpy(all, mine, bytes);
    return {};
  }

  Status Broadcast(const RankGroup& group, void*, size_t) override {
    CheckGroup(group, 0, 1);
    return {};
  }

  Status Barrier(const RankGroup& group) override {
    CheckGroup(group, 0, 1);
    return {};
  }
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_SOLO_COMM_H_
