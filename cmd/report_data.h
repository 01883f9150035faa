// ReportData: all that a report shows, as one JSON object. Used by report; cmd/report/page.js draws
// it. What stands in it: docs/architecture.md, "The report". Numbers of the ledger are as they
// stand there, to the last digit; those of heat maps have five.
#ifndef RETRACE_CMD_REPORT_DATA_H_
#define RETRACE_CMD_REPORT_DATA_H_

#include <functional>
#include <string>
#include <vector>

#include "cmd/logged_run.h"

namespace retrace {

// What `retrace experiment --json` has printed, reduced to what a report reads: validated JSON
// text. Errors: kUsage where the file can not be read; kDamaged, naming the field.
Result<std::string> ReadExperimentResult(const std::string& path);
// The parent that an experiment's result names; "" where it is over seeds.
std::string ExperimentRun(const std::string& experiment_json);

struct ReportSources {
  std::string title;  // "": made from the runs
  std::vector<LoggedRun> runs;
  std::string experiment;  // JSON of ReadExperimentResult; "": none
  bool states = true;      // walk keyframes and journals around the spike
  bool replay = false;     // live the updates around it again
  int threads = 1;         // of replay
  // Called before and while states are read or updates are lived.
  std::function<void(const std::string& run, int64_t update, int64_t first, int64_t last)> progress;
};

// Errors: those of reading states.
Result<std::string> ReportJson(ReportSources& sources);

}  // namespace retrace

#endif  // RETRACE_CMD_REPORT_DATA_H_
