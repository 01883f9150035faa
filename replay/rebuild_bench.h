// How fast a state is rebuilt from its predecessor and a journal, beside the machine's memcpy. Used
// by `retrace bench store`. Measures only. Thread-safety: none needed.
#ifndef RETRACE_REPLAY_REBUILD_BENCH_H_
#define RETRACE_REPLAY_REBUILD_BENCH_H_

#include <cstdint>

#include "core/layout.h"
#include "core/status.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"

namespace retrace {

// What a walk of one update moves at the least, in bytes an element: g, p, m, v read; p, m, v
// written.
inline constexpr int64_t kRebuildBytes = 28;

struct RebuildSpeed {
  int64_t keyframe = 0;     // where the walk starts
  int64_t steps = 0;        // walked at a time
  double step_seconds = 0;  // reading, verifying, decoding, AdamW, and the digest of the last state
                            // divided by the steps; page cache warm
  double copy_gigabytes = 0;  // memcpy, all threads, a second, read and written

  double RebuildGigabytes(int64_t parameters) const {
    return static_cast<double>(parameters * kRebuildBytes) / step_seconds / 1e9;
  }
};

// The run's longest walk from a keyframe (it has a journal), the fastest of several: a short one would
// count what a seek costs once, however long it is, as if each step cost it. Errors: those of reading.
Result<RebuildSpeed> MeasureRebuild(const RunReader& run, const Layout& layout, Engine& engine,
                                    double seconds);

}  // namespace retrace

#endif  // RETRACE_REPLAY_REBUILD_BENCH_H_
