#include "surgery/branch.h"

#include <fmt/format.h>

#include <limits>
#include <sstream>

#include "core/recipe_toml.h"
#include "surgery/remake.h"

namespace retrace {
namespace {

Status CheckRange(const RunReader& run, int64_t first, int64_t last, bool recorded) {
  const RunHistory& history = run.history();
  const int64_t from = history.first_position() + 1, to = history.last_position();
  if (first >= from && first <= to + 1 && last >= first && (!recorded || last <= to)) return {};
  return UsageError(fmt::format("--steps {}..{}: {} has updates {}..{}", first, last, run.dir(),
                                from, to));
}

// One update of a recording again, with the surgery that is dated there.
Result<Job::Step> LiveAgain(const RunReader& run, Job& job, InterventionScript* script) {
  // The first state of a branch is after surgery already.
  if (job.position() > run.history().first_position()) {
    RT_RETURN_IF_ERROR(job.Edit(script).status());
  }
  return job.Advance(script);
}

}  // namespace

Result<std::vector<Intervention>> InheritedInterventions(const RunReader& run, int64_t first) {
  std::vector<Intervention> inherited;
  const std::optional<Lineage>& lineage = run.history().header.lineage;
  if (!lineage) return inherited;
  std::istringstream lines(lineage->interventions);
  for (std::string line; std::getline(lines, line);) {
    Result<Intervention> parsed = ParseIntervention(line);
    if (!parsed.ok()) {
      return DamagedError(run.dir() + ": lineage: " + parsed.status().message());
    }
    if (parsed->last && *parsed->last < first) continue;
    parsed->inherited = true;
    inherited.push_back(std::move(parsed).value());
  }
  return inherited;
}

Result<InterventionScript> RecordedScript(const RunReader& run) {
  const int64_t begin = run.history().first_position() + 1;
  RT_ASSIGN_OR_RETURN(std::vector<Intervention> all, InheritedInterventions(run, begin));
  return InterventionScript::Make(std::move(all), begin, std::numeric_limits<int64_t>::max());
}

Status GoBefore(const RunReader& run, Job& job, int64_t first) {
  RT_RETURN_IF_ERROR(CheckRange(run, first, first, false));
  RT_ASSIGN_OR_RETURN(InterventionScript script, RecordedScript(run));
  const Timeline timeline(run, job.layout(), job.engine());
  const int64_t from = timeline.LastReachable(first - 1);
  if (from < 0) return UsageError(run.dir() + ": no state is kept at or before " +
                                  std::to_string(first - 1));
  RT_RETURN_IF_ERROR(job.Seek(run, from));
  while (job.position() < first - 1) {
    RT_ASSIGN_OR_RETURN(const Job::Step step, LiveAgain(run, job, &script));
    const Digest expected = run.history().Find(job.position())->digest;
    if (step.digest != expected) {
      return DamagedError(fmt::format(
          "{}@{} is not kept, and replay towards it parts from the recording: expected state {}, "
          "got {}",
          run.dir(), job.position(), expected.Hex(), step.digest.Hex()));
    }
  }
  return {};
}

Result<InterventionScript> BranchScript(const RunReader& run, const Job& job, int64_t first,
                                        int64_t last,
                                        const std::vector<Intervention>& interventions) {
  RT_ASSIGN_OR_RETURN(const std::vector<Intervention> inherited,
                      InheritedInterventions(run, first));
  std::vector<Intervention> all;
  for (Intervention intervention : inherited) {
    // The first state of a branch is after the surgery that its own lineage dates there.
    const bool done = intervention.kind->edit_state && *intervention.first == first &&
                      first - 1 == run.history().first_position();
    if (done || *intervention.first > last) continue;
    // What an update does may depend on where it stands within the dates, so those stay.
    if (intervention.kind->edit_update == nullptr) {
      intervention.first = std::max(*intervention.first, first);
      intervention.last = std::min(*intervention.last, last);
    }
    all.push_back(std::move(intervention));
  }
  for (Intervention intervention : interventions) {
    if (intervention.kind->resolve) {
      RT_RETURN_IF_ERROR(intervention.kind->resolve(&intervention.arguments)
                             .Within("'" + intervention.Text() + "'"));
    }
    all.push_back(std::move(intervention));
  }
  RT_ASSIGN_OR_RETURN(InterventionScript script,
                      InterventionScript::Make(std::move(all), first, last));
  RT_ASSIGN_OR_RETURN(const std::optional<Recipe> remade, RemadeRecipe(job, interventions, first));
  const PositionEntry* before = run.history().Find(first - 1);
  if (before == nullptr) return CheckRange(run, first, last, false);
  RT_RETURN_IF_ERROR(
      script.Check(remade.value_or(job.recipe()), before->counters.data_cursor));
  return script;
}

Result<bool> ReplayAsRecorded(const RunReader& run, Job& job, int64_t first, int64_t last,
                              const std::function<void(const ReplayedUpdate&)>& visit) {
  RT_RETURN_IF_ERROR(CheckRange(run, first, last, true));
  RT_RETURN_IF_ERROR(GoBefore(run, job, first));
  return ReplayHere(run, job, last, visit);
}

Result<bool> ReplayHere(const RunReader& run, Job& job, int64_t last,
                        const std::function<void(const ReplayedUpdate&)>& visit) {
  RT_RETURN_IF_ERROR(CheckRange(run, job.position() + 1, last, true));
  RT_ASSIGN_OR_RETURN(InterventionScript script, RecordedScript(run));
  while (job.position() < last) {
    RT_ASSIGN_OR_RETURN(const Job::Step step, LiveAgain(run, job, &script));
    ReplayedUpdate update;
    update.update = step.result.record.update;
    const PositionEntry& entry = *run.history().Find(update.update);
    update.expected = entry.digest;
    update.got = step.digest;
    update.same_state = update.expected == update.got;
    update.replayed = step.result.record;
    RT_ASSIGN_OR_RETURN(update.recorded, ParseRecord(entry.record));
    update.same_record = update.recorded.Same(update.replayed);
    if (job.is_rank0() && visit) visit(update);
    if (!update.identical()) return false;
  }
  return true;
}

Status MakeBranch(const RunReader& run, Job& job, const BranchPlan& plan,
                  const std::function<void(const UpdateRecord&, const Digest&)>& updated) {
  RT_RETURN_IF_ERROR(CheckRange(run, plan.first, plan.last, false));
  RT_RETURN_IF_ERROR(
      BranchScript(run, job, plan.first, plan.last, plan.interventions).status());
  RT_RETURN_IF_ERROR(GoBefore(run, job, plan.first));
  return MakeBranchHere(run, job, plan, updated);
}

Status MakeBranchHere(const RunReader& run, Job& job, const BranchPlan& plan,
                      const std::function<void(const UpdateRecord&, const Digest&)>& updated,
                      Status* halted) {
  RT_RETURN_IF_ERROR(CheckRange(run, plan.first, plan.last, false));
  RT_ASSIGN_OR_RETURN(InterventionScript script,
                      BranchScript(run, job, plan.first, plan.last, plan.interventions));
  RT_ASSIGN_OR_RETURN(const Digest here, job.StateDigestNow());
  const Digest parent = run.history().Find(plan.first - 1)->digest;
  if (here != parent) {
    return FailedError(fmt::format("a branch of {}@{} has to begin at state {}, the job is at {}",
                                   run.dir(), plan.first - 1, parent.Hex(), here.Hex()));
  }
  RT_ASSIGN_OR_RETURN(const std::optional<Recipe> recipe,
                      RemadeRecipe(job, plan.interventions, plan.first));
  std::unique_ptr<Job> remade;
  if (recipe) {
    RT_ASSIGN_OR_RETURN(remade, RemadeJob(job, *recipe));
  }
  Job& lives = remade ? *remade : job;
  std::unique_ptr<RunWriter> writer;
  Status created;
  if (job.is_rank0()) {
    RunPlan branch;
    branch.recipe_text = recipe ? PrintRecipe(*recipe) : run.recipe_text();
    Stamp(lives.machine(), &branch);
    branch.first_position = plan.first - 1;
    branch.lineage =
        Lineage{run.dir(), run.history().run, plan.first - 1, parent, script.Text()};
    Result<std::unique_ptr<RunWriter>> result = RunWriter::Create(plan.out, lives.layout(), branch);
    created = result.status();
    if (result.ok()) writer = std::move(result).value();
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), created));
  return RecordBranch(lives, writer.get(), plan.out, plan.last, plan.kept, &script, updated,
                      halted);
}

}  // namespace retrace
