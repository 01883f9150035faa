// TraceRecorded: an update of a recording lived again with a tracer. Used by trace and bisect.
// Collective.
#ifndef RETRACE_SURGERY_TRACED_UPDATE_H_
#define RETRACE_SURGERY_TRACED_UPDATE_H_

#include <optional>
#include <string>

#include "formats/run_dir.h"
#include "replay/update_tracer.h"

namespace retrace {

struct TracedUpdate {
  int64_t update = 0;
  Digest begin;               // the state that it starts at, after surgery that is dated there
  Recipe recipe;              // in force
  Job::Step step;
  bool recorded = false;      // the run has this update
  bool same_state = false, same_record = false;  // as the recording, where there is one
  std::optional<UpdateRecord> record;            // the recording's

  bool identical() const { return recorded && same_state && same_record; }
};

// Takes the job to RUN@(update-1), edits the state as the run's lineage says, and makes the update
// with the tracer, which belongs to the job. The update may be the one after the run's last.
// Errors: those of GoBefore and Job::Advance.
Result<TracedUpdate> TraceRecorded(const RunReader& run, Job& job, int64_t update,
                                   UpdateTracer& tracer);

// What a trace's file says of it. `run`: as the user called it.
TraceHeader HeaderOf(const TracedUpdate& traced, const std::string& run);

}  // namespace retrace

#endif  // RETRACE_SURGERY_TRACED_UPDATE_H_
