// Running a Rebuild in the ranks of a job, and showing its plan. Used by `retrace densify` and
// `repair`.
#ifndef RETRACE_CMD_REBUILD_JOB_H_
#define RETRACE_CMD_REBUILD_JOB_H_

#include <optional>
#include <string>

#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "surgery/rebuild.h"

namespace retrace {

// "states 3..7, 9 as journals" and what it costs, a line each.
std::string RebuildPlanText(const RebuildPlan& plan);
// An object with positions, updates and bytes.
std::string RebuildPlanJson(const RebuildPlan& plan);

// Opens the run for write, in rank 0, and stores what the plan says. `hold`: a line that makes the
// states stay.
Status RunRebuild(const ResolvedJob& job, const OutputFlags& output, const std::string& what,
                  const RunReader& run, const RebuildPlan& plan,
                  const std::optional<KeepLine>& hold);

}  // namespace retrace

#endif  // RETRACE_CMD_REBUILD_JOB_H_
