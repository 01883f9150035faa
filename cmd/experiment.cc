#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/experiment_report.h"
#include "cmd/job_flags.h"
#include "cmd/text_table.h"
#include "surgery/ensemble.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace experiment examples/five_hypotheses.toml runs/demo --dry-run    # what it would run
  retrace experiment examples/five_hypotheses.toml runs/demo --jobs 2
  retrace experiment FILE.toml runs/demo --only "clip off" --csv arms.csv
  retrace experiment examples/seed_report.toml                            # recipes over seeds
The control is replayed first and has to equal the recording bit for bit. Every arm is then run as an
ensemble and compared with the control's. Killed, the same command goes on where it was. What a file
says: docs/architecture.md, "Experiments".
Exit code 1: the control differs from its recording, so there is no verdict.)";

struct ExperimentFlags {
  std::string file, run, out, csv;
  std::vector<std::string> only;
  std::string keep = "records";
  int jobs = 0, threads = 0;
  std::string isa = "best";
  bool dry_run = false;
  OutputFlags output;
};

std::string DefaultOut(const ExperimentFlags& flags) {
  std::string run = flags.run;
  while (run.size() > 1 && run.back() == '/') run.pop_back();
  const std::string stem = std::filesystem::path(flags.file).stem().string();
  return run.empty() ? stem : run + "-" + stem;
}

ExperimentOptions OptionsOf(const ExperimentFlags& flags) {
  const SideBySide replicas =
      OrFail(ResolveSideBySide("experiment", flags.jobs, flags.threads, flags.isa));
  ExperimentOptions options;
  options.job = replicas.job;
  options.jobs = replicas.jobs;
  options.only = flags.only;
  options.out = flags.out;
  options.keep_states = flags.keep == "states";
  return options;
}

// The progress of each stage, and a line for each arm that is done.
class StageProgress {
 public:
  explicit StageProgress(const OutputFlags& output) : output_(output) {}

  void Show(const ExperimentProgress& at) {
    if (progress_ == nullptr || at.stage != stage_) {
      progress_ = std::make_unique<Progress>(output_, at.stage, 0, at.all);
      stage_ = at.stage;
      updates_ = -1;
    }
    if (at.updates != updates_) {
      progress_->Show(at.updates, at.arm.empty()
                                      ? ""
                                      : fmt::format("{} {}/{}", at.arm, at.finished, at.replicas));
    }
    updates_ = at.updates;
    if (at.replica != nullptr && at.finished == at.replicas) {
      progress_->Say(fmt::format("{}: {}: {} replicas", stage_, at.arm, at.replicas));
    }
  }

 private:
  const OutputFlags& output_;
  std::string stage_;
  int64_t updates_ = -1;
  std::unique_ptr<Progress> progress_;
};

void PrintForecast(const ExperimentFlags& flags, const ExperimentPlan& plan,
                   const ExperimentForecast& forecast) {
  if (flags.output.json) {
    Json json = {
        {"out", flags.out}, {"updates_at_most", forecast.updates}, {"arms", Json::array()}};
    for (const ExperimentForecast::Arm& arm : forecast.arms) {
      json["arms"].push_back(
          {{"name", arm.name}, {"changes", arm.changes}, {"replicas", arm.replicas}});
    }
    PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
    return;
  }
  TextTable table({{"arm", true}, {"replicas"}, {"changes", true}});
  for (const ExperimentForecast::Arm& arm : forecast.arms) {
    table.AddRow(
        {arm.name, std::to_string(arm.replicas),
         arm.changes.empty() ? "nothing" : fmt::format("{}", fmt::join(arm.changes, " "))});
  }
  std::string text = table.Text(flags.output);
  text += fmt::format(
      "Updates {}..{}; at the most {} updates of replicas and of the control's "
      "proof. Replicas go to {}.\n",
      plan.first, plan.horizon, Grouped(forecast.updates), flags.out);
  PrintReport(text);
}

[[noreturn]] void RefuseVerdict(const ExperimentFlags& flags, const ExperimentPlan& plan,
                                const ExperimentNames& names, const ExperimentResult& result) {
  const ReplayedUpdate& u = *result.control_differs;
  if (flags.output.json) PrintReport(ExperimentJson(names, plan, result));
  SayError(fmt::format(
      "retrace: no verdict: the control, lived again as recorded, differs at update {}: expected "
      "state {}, got {}{}. {}",
      u.update, u.expected.Hex(), u.got.Hex(), u.same_state ? " (the record differs)" : "",
      plan.over_seeds() ? "'retrace selftest' looks for what is not repeatable on this machine"
                        : fmt::format("'retrace replay {} --steps {}..{}' shows it", flags.run,
                                      plan.first, plan.last)));
  Exit(1);
}

// `append`: only to see beforehand that the file can be written.
void WriteCsv(const std::string& path, const std::string& text, bool append = false) {
  std::ofstream out(path, append ? std::ios::binary | std::ios::app : std::ios::binary);
  out << text;
  out.close();
  if (!out) Fail(FailedError(path + ": can not be written"));
}

void RunExperimentCommand(ExperimentFlags flags) {
  const ExperimentPlan plan = OrFail(LoadExperiment(flags.file));
  if (plan.over_seeds() && !flags.run.empty()) {
    Fail(UsageError(flags.file +
                    ": has 'recipe', so it is an experiment over seeds and takes no "
                    "RUN, got '" +
                    flags.run + "'"));
  }
  if (flags.run.empty()) flags.run = plan.run;
  if (flags.run.empty() && !plan.over_seeds()) {
    Fail(UsageError(flags.file + ": expected RUN on the command line, or 'run' in the file"));
  }
  if (flags.out.empty()) flags.out = DefaultOut(flags);
  std::optional<RunReader> run;
  if (!plan.over_seeds()) run = OrFail(RunReader::Open(flags.run));
  const RunReader* parent = run ? &*run : nullptr;
  if (flags.dry_run) {
    PrintForecast(flags, plan, OrFail(Forecast(parent, plan, flags.only)));
    return;
  }
  if (!flags.csv.empty()) WriteCsv(flags.csv, "", /*append=*/true);
  ExperimentOptions options = OptionsOf(flags);
  std::optional<StageProgress> progress(std::in_place, flags.output);
  options.progress = [&](const ExperimentProgress& at) { progress->Show(at); };
  const Result<ExperimentResult> ran = RunExperiment(parent, plan, options);
  progress.reset();
  const ExperimentResult result = OrFail(ran);
  const ExperimentNames names = {.file = flags.file, .run = flags.run, .out = flags.out};
  if (result.control_differs) RefuseVerdict(flags, plan, names, result);
  if (!flags.csv.empty()) WriteCsv(flags.csv, ExperimentCsv(plan, result));
  PrintReport(flags.output.json ? ExperimentJson(names, plan, result)
                                : ExperimentTable(flags.output, names, plan, result));
}

}  // namespace

void AddExperimentCommand(CLI::App& app) {
  CLI::App* experiment = app.add_subcommand(
      "experiment", "Judge arms against a control, each by an ensemble of replicas");
  auto flags = std::make_shared<ExperimentFlags>();
  experiment->add_option("file", flags->file, "The experiment (TOML)")->required();
  experiment->add_option("run", flags->run,
                         "The recording, unless the file names it or is over seeds");
  experiment->add_option("--only", flags->only, "This arm and the control alone; may be repeated")
      ->allow_extra_args(false);
  experiment->add_option("-o,--out", flags->out,
                         "Directory of the replicas; RUN-FILE, or FILE over seeds, by default");
  experiment->add_flag("--dry-run", flags->dry_run, "Check everything and say what would be run");
  experiment->add_option("--keep", flags->keep, "What replicas keep: records, or states too")
      ->check(CLI::IsMember({"records", "states"}))
      ->capture_default_str();
  CLI::Option* jobs =
      experiment->add_option("--jobs", flags->jobs, "Replicas side by side; 0: one a processor");
  WholeIn(jobs, 0, 1024)->capture_default_str();
  CLI::Option* threads = experiment->add_option(
      "--threads", flags->threads, "Of each replica; 0: the processors divided by --jobs");
  WholeIn(threads, 0, 1024)->capture_default_str();
  AddIsaFlag(experiment, &flags->isa);
  experiment->add_option("--csv", flags->csv, "Also write a line a replica to this file");
  AddOutputFlags(experiment, &flags->output, true);
  experiment->footer(kExamples);
  experiment->callback([flags] { RunExperimentCommand(*flags); });
}

}  // namespace retrace
