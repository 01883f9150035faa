// Timeline: RUN@k of a recording, rebuilt from the nearest keyframe and the journals between, by
// AdamW alone: no forward, no backward, no dataset, no recipe. Used by replay, diff, show, resume.
//
// Law of the walk: walk(RUN@(k-1), journal k) has the digest of RUN@k. Not thread-safe.
#ifndef RETRACE_REPLAY_TIMELINE_H_
#define RETRACE_REPLAY_TIMELINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/state.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"

namespace retrace {

// How a position is reached, before anything is read.
struct SeekPlan {
  int64_t keyframe = 0;
  int64_t journals = 0;  // updates to walk
  int64_t bytes = 0;     // of FP32 read and decoded
};

class Timeline {
 public:
  // Arguments outlive the timeline.
  Timeline(const RunReader& run, const Layout& layout, Engine& engine)
      : run_(run), layout_(layout), engine_(engine) {}

  // Errors: kUsage where the run does not keep what RUN@k needs; the message names the nearest
  // positions that it does.
  Result<SeekPlan> Plan(int64_t position) const;

  // RUN@k's shards [first_shard, first_shard + shard_count). With all shards of the run, the result
  // is proven by the digest in the ledger; a caller that asks for some combines digests itself.
  Result<State> Seek(int64_t position, int first_shard, int shard_count) const;
  Result<State> Seek(int64_t position) const { return Seek(position, 0, layout_.shards()); }

  // RUN@(k-1) -> RUN@k.
  Status Walk(State* state) const;

  // The last position at or before `position` that Plan can reach; -1: none.
  int64_t LastReachable(int64_t position) const;

 private:
  const RunReader& run_;
  const Layout& layout_;
  Engine& engine_;
};

// "RUN", "RUN@k" or "RUN@k:GLOB#component".
struct StateAddress {
  std::string run;
  std::optional<int64_t> position;
  std::string glob;       // "": all tensors
  std::string component;  // "", "m", "v", "g"
};

// Errors: kUsage.
Result<StateAddress> ParseStateAddress(const std::string& text);

}  // namespace retrace

#endif  // RETRACE_REPLAY_TIMELINE_H_
