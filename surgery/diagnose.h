// Diagnose: what the passes of recorded updates look like, by living them again. Used by stats and
// report. Each replayed update is proven: its state and record are the recording's.
#ifndef RETRACE_SURGERY_DIAGNOSE_H_
#define RETRACE_SURGERY_DIAGNOSE_H_

#include <functional>

#include "core/update_range.h"
#include "formats/run_dir.h"
#include "replay/job.h"
#include "replay/pass_diagnostics.h"

namespace retrace {

// Of updates range.first..last, in order. The job has one rank. Errors: kUsage where the run has no
// such updates; kFailed where a replayed update is not the recorded one.
Status Diagnose(const RunReader& run, Job& job, const UpdateRange& range,
                const std::function<void(int64_t update, const PassDiagnostics&)>& took);

}  // namespace retrace

#endif  // RETRACE_SURGERY_DIAGNOSE_H_
