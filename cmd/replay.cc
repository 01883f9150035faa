#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/dry_run_report.h"
#include "cmd/job_flags.h"
#include "cmd/replay_report.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"
#include "surgery/branch.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace replay runs/demo --steps 1..24                          # prove the recording
  retrace replay runs/demo --steps 4..24 --do clip:none           # a branch with one thing changed
  retrace replay runs/demo --steps 4..24 --do scale:0.5 --dry-run # what it would change
  retrace replay runs/demo --steps 4..24 --do reset-moments:v,t=keep@6 --do lr:scale=0.5@6..10
--steps A..B replays updates A..B from the state RUN@(A-1). @k dates an intervention: a change of state
happens just before update k, a change of recipe holds during updates k..l.
Exit code 1: a replayed update differs from its recording.)";

struct ReplayFlags {
  std::string run, steps, out;
  std::vector<std::string> interventions;
  std::string keep = "states";
  bool dry_run = false;
  JobFlags job;
  OutputFlags output;
};

// Proves the recording; the process's exit code is 1 where it does not hold.
void RunProof(const ReplayFlags& flags, const RunReader& run, const ResolvedJob& job,
              const UpdateRange& range) {
  const ReplayProof proof = OrFail(ProveReplay(job, flags.output, run, range));
  if (!job.speaks()) {
    if (!proof.identical) Exit(1);
    return;
  }
  if (flags.output.json) {
    const nlohmann::ordered_json json = {
        {"run", flags.run},
        {"identical", proof.identical},
        {"updates", nlohmann::ordered_json::parse(proof.updates)}};
    fmt::print("{}\n", json.dump(2));
  } else if (proof.identical) {
    fmt::print("{}: {} of {} updates {}\n", flags.run, proof.same, range.size(),
               Tinted(flags.output, Tint::kGreen, "identical"));
  }
  if (!proof.identical) Exit(1);
}

struct BranchRow {
  UpdateRecord record;
  Digest digest;
};

void PrintBranch(const ReplayFlags& flags, const RunReader& run, const BranchPlan& plan,
                 const std::vector<BranchRow>& rows) {
  if (flags.output.json) {
    nlohmann::ordered_json json = {{"parent", flags.run}, {"branch", plan.out}};
    for (const BranchRow& row : rows) {
      json["updates"].push_back({{"update", row.record.update},
                                 {"loss", row.record.loss},
                                 {"evaluation_loss", row.record.evaluation_loss.value_or(row.record.loss)},
                                 {"gradient_norm", row.record.gradient_norm},
                                 {"digest", row.digest.Hex()}});
    }
    fmt::print("{}\n", json.dump(2));
    return;
  }
  fmt::print("{:>7}  {:>12} {:>12}  {:>12} {:>12}\n", "update", "loss, parent", "branch",
             "|g|, parent", "branch");
  for (const BranchRow& row : rows) {
    const PositionEntry* entry = run.history().Find(row.record.update);
    std::string loss = "-", norm = "-";
    if (entry != nullptr) {
      if (const Result<UpdateRecord> parent = ParseRecord(entry->record); parent.ok()) {
        loss = fmt::format("{:.4f}", parent->evaluation_loss.value_or(parent->loss));
        norm = fmt::format("{:.4g}", parent->gradient_norm);
      }
    }
    fmt::print("{:>7}  {:>12} {:>12.4f}  {:>12} {:>12.4g}\n", row.record.update, loss,
               row.record.evaluation_loss.value_or(row.record.loss), norm,
               row.record.gradient_norm);
  }
  fmt::print("{} is a branch of {}@{}; see 'retrace diff {} {}'\n", plan.out, flags.run,
             plan.first - 1, flags.run, plan.out);
}

void RunDryRun(const ReplayFlags& flags, const RunReader& run, const Recipe& recipe,
               const ResolvedJob& job, const BranchPlan& plan) {
  std::vector<PlannedIntervention> planned;
  OrFail(RunJob(
      job, [](const std::string&) {},
      [&](Comm& comm) -> Status {
        RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank, Job::Make(recipe, comm, job.options));
        RT_ASSIGN_OR_RETURN(planned, PlanBranch(run, *rank, plan));
        return {};
      }));
  if (!job.speaks()) return;
  PrintReport(flags.output.json ? DryRunJson(planned) : DryRunText(flags.output, planned));
}

void RunBranch(const ReplayFlags& flags, const RunReader& run, const Recipe& recipe,
               const ResolvedJob& job, const UpdateRange& range) {
  BranchPlan plan;
  plan.first = range.first;
  plan.last = range.last;
  plan.kept.states = flags.keep == "states";
  for (const std::string& text : flags.interventions) {
    plan.interventions.push_back(OrFail(ParseIntervention(text)));
  }
  OrFail(InterventionScript::Make(plan.interventions, plan.first, plan.last).status());
  plan.out = flags.out;
  if (plan.out.empty()) {
    plan.out = flags.run;
    while (plan.out.size() > 1 && plan.out.back() == '/') plan.out.pop_back();
    const std::string name = std::filesystem::path(plan.out).filename();
    std::error_code ignored;  // the run has been opened: it is there
    if (name == "." || name == "..") plan.out = std::filesystem::canonical(plan.out, ignored);
    for (const Intervention& i : plan.interventions) plan.out += "-" + i.kind->name;
  }
  if (flags.dry_run) return RunDryRun(flags, run, recipe, job, plan);
  std::vector<BranchRow> rows;
  Progress progress(flags.output, "replay", range.first - 1, range.last);
  OrFail(RunJob(job, [&](const std::string& line) { progress.Say(line); },
                [&](Comm& comm) -> Status {
                  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank,
                                      Job::Make(recipe, comm, job.options));
                  return MakeBranch(run, *rank, plan,
                                    [&](const UpdateRecord& record, const Digest& digest) {
                                      rows.push_back({record, digest});
                                      progress.Show(record.update,
                                                    fmt::format("loss {:.4f}", record.loss));
                                    });
                }));
  progress.Finish();
  if (job.speaks()) PrintBranch(flags, run, plan, rows);
}

void RunReplay(ReplayFlags flags) {
  const RunReader run = OrFail(RunReader::Open(flags.run));
  const Recipe recipe = OrFail(ParseRecipe(run.recipe_text(), flags.run + "/recipe.toml"));
  UpdateRange range = {run.history().first_position() + 1, run.history().last_position()};
  if (!flags.steps.empty()) range = OrFail(ParseUpdateRange(flags.steps, "--steps"));
  if (range.size() <= 0) {
    Fail(UsageError(fmt::format("{}: the run has no updates yet; --steps A..B names those of a "
                                "branch, from {} on", flags.run, range.first)));
  }
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!job.speaks()) flags.output.quiet = true;
  if (flags.dry_run && flags.interventions.empty()) {
    Fail(UsageError("--dry-run: expected --do NAME:ARGS, whose changes it would show"));
  }
  if (flags.interventions.empty()) RunProof(flags, run, job, range);
  else RunBranch(flags, run, recipe, job, range);
}

}  // namespace

void AddReplayCommand(CLI::App& app) {
  CLI::App* replay = app.add_subcommand(
      "replay", "Live recorded updates again: as they were, or as a branch with interventions");
  auto flags = std::make_shared<ReplayFlags>();
  replay->add_option("run", flags->run, "The recording")->required();
  replay->add_option("--steps", flags->steps, "Updates A..B; all by default");
  CLI::Option* interventions =
      replay->add_option("--do", flags->interventions, "NAME:ARGS[@k[..l]]; may be repeated");
  interventions->allow_extra_args(false);
  replay->add_option("-o,--out", flags->out, "Directory of the branch; RUN-NAME by default")
      ->needs(interventions);
  replay->add_option("--keep", flags->keep, "What the branch keeps: states, or records only")
      ->check(CLI::IsMember({"states", "records"}))
      ->capture_default_str()
      ->needs(interventions);
  replay->add_flag("--dry-run", flags->dry_run,
                   "Show what the interventions would change, tensor by tensor; record nothing");
  AddJobFlags(replay, &flags->job);
  AddOutputFlags(replay, &flags->output, true);
  replay->footer(kExamples);
  replay->callback([flags] { RunReplay(*flags); });
}

}  // namespace retrace
