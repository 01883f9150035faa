// The digests of a state that this process holds, by all threads of an engine. Used by exchange.h,
// timeline.h and verify.h. The same digests as core/state.h has; not thread-safe (one engine).
#ifndef RETRACE_REPLAY_STATE_DIGEST_H_
#define RETRACE_REPLAY_STATE_DIGEST_H_

#include <vector>

#include "core/layout.h"
#include "core/state.h"
#include "kernels/engine.h"

namespace retrace {

// Of each of its shards.
std::vector<ShardDigests> DigestShards(Engine& engine, const Layout& layout, const State& state);

// Of a state that has all shards.
Digest StateDigest(Engine& engine, const Layout& layout, const State& state);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STATE_DIGEST_H_
