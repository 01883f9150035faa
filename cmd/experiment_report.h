// How an experiment's result is shown: the table with a mark for each replica, JSON, CSV. Used by
// `retrace experiment`.
#ifndef RETRACE_CMD_EXPERIMENT_REPORT_H_
#define RETRACE_CMD_EXPERIMENT_REPORT_H_

#include <string>

#include "cmd/console.h"
#include "surgery/ensemble.h"

namespace retrace {

// What the reports say besides the result.
struct ExperimentNames {
  std::string file, run, out;  // run: "" over seeds
};

std::string ExperimentTable(const OutputFlags& output, const ExperimentNames& names,
                            const ExperimentPlan& plan, const ExperimentResult& result);
std::string ExperimentJson(const ExperimentNames& names, const ExperimentPlan& plan,
                           const ExperimentResult& result);
// One line a replica.
std::string ExperimentCsv(const ExperimentPlan& plan, const ExperimentResult& result);

// One mark a replica on a scale from 0 to `scale` nats; replicas in one cell are counted, and jumps
// that are not finite stand behind the scale's end.
std::string JumpStrip(const std::vector<double>& jumps, double scale, int cells);

}  // namespace retrace

#endif  // RETRACE_CMD_EXPERIMENT_REPORT_H_
