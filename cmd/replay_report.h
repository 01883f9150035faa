// How a replay that proves a recording is shown. Used by `retrace replay` and `retrace verify`.
#ifndef RETRACE_CMD_REPLAY_REPORT_H_
#define RETRACE_CMD_REPLAY_REPORT_H_

#include <string>

#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "core/update_range.h"
#include "surgery/branch.h"

namespace retrace {

struct ReplayProof {
  bool identical = false;
  int64_t same = 0;     // updates
  std::string updates;  // JSON list; for --json
};

// Lives the updates again as recorded, in every rank, printing each as it is done (not with
// --json).
Result<ReplayProof> ProveReplay(const ResolvedJob& job, const OutputFlags& output,
                                const RunReader& run, const UpdateRange& range);

}  // namespace retrace

#endif  // RETRACE_CMD_REPLAY_REPORT_H_
