#include "surgery/traced_update.h"

#include "core/recipe_toml.h"
#include "core/version.h"
#include "surgery/branch.h"

namespace retrace {

Result<TracedUpdate> TraceRecorded(const RunReader& run, Job& job, int64_t update,
                                   UpdateTracer& tracer) {
  RT_RETURN_IF_ERROR(GoBefore(run, job, update));
  RT_ASSIGN_OR_RETURN(InterventionScript script, RecordedScript(run));
  // The first state of a branch is after surgery already.
  if (job.position() > run.history().first_position()) {
    RT_RETURN_IF_ERROR(job.Edit(&script).status());
  }
  TracedUpdate traced;
  traced.update = update;
  RT_ASSIGN_OR_RETURN(traced.begin, job.StateDigestNow());
  RT_ASSIGN_OR_RETURN(traced.recipe, script.RecipeFor(update, job.recipe()));
  RT_ASSIGN_OR_RETURN(traced.step, tracer.Advance(&script));
  const PositionEntry* entry = run.history().Find(update);
  if (entry == nullptr) return traced;
  traced.recorded = true;
  traced.same_state = entry->digest == traced.step.digest;
  RT_ASSIGN_OR_RETURN(traced.record, ParseRecord(entry->record));
  traced.same_record = traced.record->Same(traced.step.result.record);
  return traced;
}

TraceHeader HeaderOf(const TracedUpdate& traced, const std::string& run) {
  return {.producer = std::string("retrace ") + kVersion,
          .run = run,
          .update = traced.update,
          .state = traced.begin.Hex(),
          .recipe = PrintRecipe(traced.recipe),
          .recorded = !traced.recorded      ? "no"
                      : traced.identical() ? "identical"
                                           : "differs"};
}

}  // namespace retrace
