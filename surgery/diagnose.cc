#include "surgery/diagnose.h"

#include <fmt/format.h>

#include "surgery/branch.h"

namespace retrace {

Status Diagnose(const RunReader& run, Job& job, const UpdateRange& range,
                const std::function<void(int64_t update, const PassDiagnostics&)>& took) {
  RT_CHECK_EQ(1, job.comm().size());
  RT_ASSIGN_OR_RETURN(InterventionScript script, RecordedScript(run));
  RT_RETURN_IF_ERROR(GoBefore(run, job, range.first));
  DiagnosticProbe probe(job.layout().shards(), job.recipe().data.sequence_length, [&] {
    const Result<Recipe> recipe = script.RecipeFor(job.position() + 1, job.recipe());
    return recipe.ok() ? recipe->model : job.recipe().model;  // the job has reported the error
  });
  job.set_probe(&probe);
  int64_t differs = 0;
  const Result<bool> same =
      ReplayHere(run, job, range.last, [&](const ReplayedUpdate& update) {
        if (update.identical()) took(update.update, probe.Diagnostics());
        else differs = update.update;
      });
  job.set_probe(nullptr);
  RT_RETURN_IF_ERROR(same.status());
  if (*same) return {};
  return FailedError(fmt::format("{}: replayed update {} is not the recorded one; run 'retrace "
                                 "replay {} --steps {}..{}'",
                                 run.dir(), differs, run.dir(), differs, differs));
}

}  // namespace retrace
