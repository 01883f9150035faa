// The part of a report around the spike: which quantity moved first, and what heat maps show.
// Used by report_data.cc.
#ifndef RETRACE_CMD_REPORT_MOTION_H_
#define RETRACE_CMD_REPORT_MOTION_H_

#include <string>

#include "cmd/report_data.h"

namespace retrace {

// JSON; "" where no run has a record. Reads states where sources.states says so and they are kept.
Result<std::string> MotionJson(ReportSources& sources);

}  // namespace retrace

#endif  // RETRACE_CMD_REPORT_MOTION_H_
