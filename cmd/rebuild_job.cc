#include "cmd/rebuild_job.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "core/recipe_toml.h"

namespace retrace {
namespace {

std::vector<int64_t> Positions(const RebuildPlan& plan, Keep keep) {
  std::vector<int64_t> positions;
  for (const RebuildStep& step : plan.steps) {
    if (step.keep == keep) positions.push_back(step.position);
  }
  return positions;
}

// Rank 0's writer, nullptr elsewhere. Collective.
Result<std::unique_ptr<RunWriter>> OpenWriter(Job& job, const RunReader& run,
                                              const std::optional<KeepLine>& hold) {
  std::unique_ptr<RunWriter> writer;
  Status status;
  if (job.is_rank0()) {
    status = FileOps().MakeDir(run.dir() + "/" + kStepsName);  // it may be what was lost
    if (status.ok()) {
      Result<std::unique_ptr<RunWriter>> opened = RunWriter::Open(
          run.dir(), job.layout(), FileOps(), OpenFor::kGoingOn, job.machine().numerics);
      status = opened.status();
      if (opened.ok()) writer = std::move(opened).value();
    }
    if (status.ok() && hold) status = writer->Hold(*hold);
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), status));
  return writer;
}

}  // namespace

std::string RebuildPlanText(const RebuildPlan& plan) {
  std::string text;
  const std::vector<int64_t> keyframes = Positions(plan, Keep::kKeyframe);
  const std::vector<int64_t> journals = Positions(plan, Keep::kJournal);
  if (!keyframes.empty()) text += "keyframes  " + RangesText(keyframes) + "\n";
  if (!journals.empty()) text += "journals   " + RangesText(journals) + "\n";
  return text + fmt::format("cost       {} updates to live again, about {} on disk\n", plan.updates,
                            ByteText(static_cast<double>(plan.bytes)));
}

std::string RebuildPlanJson(const RebuildPlan& plan) {
  const nlohmann::ordered_json json = {{"keyframes", Positions(plan, Keep::kKeyframe)},
                                       {"journals", Positions(plan, Keep::kJournal)},
                                       {"updates", plan.updates},
                                       {"bytes_estimate", plan.bytes}};
  return json.dump();
}

Status RunRebuild(const ResolvedJob& job, const OutputFlags& output, const std::string& what,
                  const RunReader& run, const RebuildPlan& plan,
                  const std::optional<KeepLine>& hold) {
  RT_ASSIGN_OR_RETURN(const Recipe recipe,
                      ParseRecipe(run.recipe_text(), run.dir() + "/" + kRecipeName));
  std::unique_ptr<Progress> progress;
  const auto show = [&](int64_t updates) {
    if (!progress) progress = std::make_unique<Progress>(output, what, 0, plan.updates);
    progress->Show(std::min(updates, plan.updates), "");
  };
  const auto note = [&](const std::string& line) {
    if (!output.quiet) SayError(line);
  };
  return RunJob(job, note, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank, Job::Make(recipe, comm, job.options));
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<RunWriter> writer, OpenWriter(*rank, run, hold));
    return Rebuild(run, *rank, writer.get(), plan, show);
  });
}

}  // namespace retrace
