// Packing a step anew: all its slabs in one rank file, compressed with more effort. Used by
// `retrace pack`. What the step says stays the same, byte for byte of every tensor.
#ifndef RETRACE_FORMATS_RUN_PACK_H_
#define RETRACE_FORMATS_RUN_PACK_H_

#include <cstdint>

#include "core/layout.h"
#include "core/status.h"
#include "formats/run_dir.h"

namespace retrace {

struct PackedStep {
  int64_t before_bytes = 0, after_bytes = 0;  // of its rank files
  bool smaller = false;                       // else the step stays as it is
};

// Reads the step, verified, and encodes it; where that is at least 1 % smaller it takes the place
// of what is there, by a commit of its own. writer: nullptr only measures. level: of zstd. Errors:
// kDamaged, located; kFailed.
Result<PackedStep> PackStep(const RunReader& run, const Layout& layout, int64_t position, int level,
                            int threads, RunWriter* writer, FileOps ops = FileOps());

}  // namespace retrace

#endif  // RETRACE_FORMATS_RUN_PACK_H_
