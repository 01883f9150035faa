// LoggedRun: the records of a run, and what is read off its curves. Used by log and report.
// Values; not thread-safe (OpenedRun).
#ifndef RETRACE_CMD_LOGGED_RUN_H_
#define RETRACE_CMD_LOGGED_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cmd/opened_run.h"
#include "core/update_range.h"
#include "replay/record.h"

namespace retrace {

// The updates of one run that are in view.
struct LoggedRun {
  std::unique_ptr<OpenedRun> run;
  std::vector<UpdateRecord> records;
  std::vector<const PositionEntry*> entries;  // of each record
};

Result<LoggedRun> ReadLog(const std::string& dir, const UpdateRange& view);

// Whether every record in view has an evaluation loss.
bool AllEvaluated(const std::vector<LoggedRun>& runs);

using Curve = std::vector<std::pair<int64_t, double>>;  // update, value

Curve LossCurve(const LoggedRun& run, bool evaluation);
Curve NormCurve(const LoggedRun& run);

inline constexpr double kSpikeNats = 0.5;  // a smaller rise is no spike

// What is read off a curve; values that are not finite are passed over.
struct CurveFacts {
  std::optional<std::pair<int64_t, double>> low, high;
  // The largest rise above the least value before it, from where to where.
  double rise = 0, rise_low = 0;
  int64_t rise_from = 0, rise_to = 0;
};

CurveFacts FactsOf(const Curve& curve);

// What runs are called beside each other: the ends of their paths, as long as it takes to tell them
// apart; the same directory twice keeps one name.
std::vector<std::string> DistinctNames(const std::vector<std::string>& dirs);

// A field of CSV, quoted where it has to be.
std::string CsvField(const std::string& text);

}  // namespace retrace

#endif  // RETRACE_CMD_LOGGED_RUN_H_
