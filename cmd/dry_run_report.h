// How the plan of a branch is shown. Used by `retrace replay --dry-run`.
#ifndef RETRACE_CMD_DRY_RUN_REPORT_H_
#define RETRACE_CMD_DRY_RUN_REPORT_H_

#include <string>
#include <vector>

#include "cmd/console.h"
#include "surgery/dry_run.h"

namespace retrace {

std::string DryRunText(const OutputFlags& output, const std::vector<PlannedIntervention>& planned);
std::string DryRunJson(const std::vector<PlannedIntervention>& planned);

}  // namespace retrace

#endif  // RETRACE_CMD_DRY_RUN_REPORT_H_
