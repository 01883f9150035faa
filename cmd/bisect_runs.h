// BisectRuns: `retrace bisect RUN_A RUN_B`, where two runs part: update, op, element. Used by bisect.
#ifndef RETRACE_CMD_BISECT_RUNS_H_
#define RETRACE_CMD_BISECT_RUNS_H_

#include <string>

#include "cmd/console.h"
#include "cmd/job_flags.h"

namespace retrace {

struct BisectRunsFlags {
  std::string a, b;
  JobFlags job;
  OutputFlags output;
};

// Ends with 0 where the runs are the same, else 1.
[[noreturn]] void BisectRuns(const BisectRunsFlags& flags);

}  // namespace retrace

#endif  // RETRACE_CMD_BISECT_RUNS_H_
