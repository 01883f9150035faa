#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/report_data.h"
#include "cmd/report_page.h"
#include "cmd/text_table.h"
#include "cmd/written_file.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace report runs/demo                                      # report.html
  retrace report runs/demo runs/demo-clip -o clip.html          # a run and its branch, overlaid
  retrace experiment FILE.toml runs/demo --json > result.json
  retrace report runs/demo result.json                          # with verdicts and replica bands
  retrace report runs/demo --no-states                          # records alone: reads no states
  retrace report runs/demo --replay                             # with heat maps of the passes
One self-contained page: curves by update, verdicts, what moved first, heat maps of layers by
updates around the spike, lineage, recipes, environment. It loads nothing from anywhere. The first run
that has a spike is the one that is examined. Branches of one state that differ in the seed of their
noise alone, three or more, are drawn as a band.)";

struct ReportFlags {
  std::vector<std::string> inputs;
  std::string out = "report.html", steps, title;
  bool no_states = false, replay = false;
  JobFlags job;
  OutputFlags output;
};

// Directories are runs, one file is an experiment's result.
ReportSources SourcesOf(const ReportFlags& flags) {
  ReportSources sources;
  std::vector<std::string> runs;
  std::string experiment;
  std::error_code error;
  for (const std::string& input : flags.inputs) {
    if (!std::filesystem::is_regular_file(input, error)) {
      runs.push_back(input);
      continue;
    }
    if (!experiment.empty()) {
      Fail(UsageError(
          fmt::format("expected one experiment's result, got {} and {}", experiment, input)));
    }
    experiment = input;
    sources.experiment = OrFail(ReadExperimentResult(input));
  }
  UpdateRange view = kAllUpdates;
  if (!flags.steps.empty()) view = OrFail(ParseUpdateRange(flags.steps, "--steps"));
  if (runs.empty()) {
    const std::string parent = ExperimentRun(sources.experiment);
    if (!parent.empty()) runs.push_back(parent);
  }
  bool any = runs.empty();
  for (const std::string& run : runs) {
    sources.runs.push_back(OrFail(ReadLog(run, view)));
    any = any || !sources.runs.back().records.empty();
  }
  if (!any) {
    Fail(UsageError(flags.steps.empty() ? runs[0] + ": the run has no updates yet"
                                        : "--steps " + flags.steps + ": no run has such updates"));
  }
  sources.title = flags.title;
  sources.states = !flags.no_states;
  sources.replay = flags.replay;
  sources.threads = OrFail(ResolveJob(flags.job)).options.threads;
  return sources;
}

void RunReport(const ReportFlags& flags) {
  ReportSources sources = SourcesOf(flags);
  std::unique_ptr<Progress> progress;
  std::string shown;
  sources.progress = [&](const std::string& run, int64_t k, int64_t first, int64_t last) {
    if (run != shown) {
      progress =
          std::make_unique<Progress>(flags.output, "states of " + BaseName(run), first, last);
      shown = run;
    }
    progress->Show(k, "");
  };
  const std::string json = OrFail(ReportJson(sources));
  if (progress) progress->Finish();
  if (flags.output.json) return PrintReport(json + "\n");
  const std::string title = nlohmann::json::parse(json).at("title").get<std::string>();
  const std::string page = OrFail(ReportPage(title, json));
  OrFail(WriteWholeFile(flags.out, page));
  if (flags.output.quiet) return;
  size_t updates = 0;
  for (const LoggedRun& run : sources.runs) updates += run.records.size();
  PrintReport(fmt::format("{}: {} run{}, {} updates{}, {}\n", flags.out, sources.runs.size(),
                          sources.runs.size() == 1 ? "" : "s",
                          Grouped(static_cast<int64_t>(updates)),
                          sources.experiment.empty() ? "" : ", an experiment",
                          ByteText(static_cast<double>(page.size()))));
}

}  // namespace

void AddReportCommand(CLI::App& app) {
  CLI::App* report =
      app.add_subcommand("report", "A page of runs, branches and verdicts to look at");
  auto flags = std::make_shared<ReportFlags>();
  report
      ->add_option("input", flags->inputs,
                   "Run directories, and the JSON of one 'retrace experiment --json'")
      ->required();
  report
      ->add_option("-o,--out,--output", flags->out, "HTML file to write; replaced where it exists")
      ->capture_default_str();
  report->add_option("--steps", flags->steps, "Updates A..B; all by default");
  report->add_option("--title", flags->title, "Heading; the runs' names by default");
  report->add_flag("--no-states", flags->no_states,
                   "Read records alone, no keyframes and journals around the spike");
  CLI::Option* replay = report->add_flag(
      "--replay", flags->replay, "Live the updates around the spike again: attention, residuals");
  WholeIn(report->add_option("--threads", flags->job.threads,
                             "Threads of --replay; all processors by default"),
          1, 1024)
      ->needs(replay);
  AddOutputFlags(report, &flags->output, true);
  report->get_option("--json")->description("Print what the page shows as JSON, and write no page");
  report->footer(kExamples);
  report->callback([flags] { RunReport(*flags); });
}

}  // namespace retrace
