// Comm: how ranks speak. It moves bytes and never adds (clause 10): additions are the project's own
// kernels' (replay/shard_tree.h). Implementations: SoloComm (one rank), ShmComm (ranks of one host,
// shared memory), c10d (Gloo, NCCL) through libretrace_torch.so. One contract test for all.
//
// Every rank of a group makes the same calls in the same order. Not thread-safe: one thread per
// rank. Errors: kFailed when a rank died, a call disagrees, or the time limit passed; the message
// names the rank, the call, and the phase last set. After an error the Comm is unusable, and every
// other rank of the job gets an error too within the time limit: never a hang.
#ifndef RETRACE_REPLAY_COMM_H_
#define RETRACE_REPLAY_COMM_H_

#include <cstddef>
#include <string>

#include "core/status.h"

namespace retrace {

// Ranks first, first + stride, ..., (size of them). Contains the calling rank.
struct RankGroup {
  int first = 0;
  int stride = 1;
  int size = 1;

  int IndexOf(int rank) const { return (rank - first) / stride; }
  int RankAt(int index) const { return first + index * stride; }
};

class Comm {
 public:
  virtual ~Comm() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // send: group.size blocks of block_bytes, block i for member i; recv: likewise, block i from
  // member i. send and recv do not overlap.
  virtual Status AllToAll(const RankGroup& group, const void* send, void* recv,
                          size_t block_bytes) = 0;

  // all: group.size blocks of `bytes`, block i from member i. mine may be all's own block.
  virtual Status AllGather(const RankGroup& group, const void* mine, void* all, size_t bytes) = 0;

  // From member 0 of the group to all others.
  virtual Status Broadcast(const RankGroup& group, void* data, size_t bytes) = 0;

  virtual Status Barrier(const RankGroup& group) = 0;

  // This rank gives up: every rank's present and later calls return kFailed with `why` in the
  // message, as far as the transport can tell them; at the latest by the time limit.
  virtual void Abort(const Status& why) { (void)why; }

  RankGroup World() const { return {0, 1, size()}; }

  // Where the job is ("update 17, layer 3, o_proj"): for messages only.
  void set_phase(std::string phase) { phase_ = std::move(phase); }
  const std::string& phase() const { return phase_; }

 private:
  std::string phase_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_COMM_H_
