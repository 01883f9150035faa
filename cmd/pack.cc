#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "cmd/prune_flags.h"
#include "cmd/text_table.h"
#include "formats/run_pack.h"
#include "kernels/thread_pool.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace pack runs/demo --dry-run           # measures, changes nothing
  retrace pack runs/demo --level 19
  retrace pack runs/demo --window 4..16      # and drop what this policy does not keep, as prune does
Encodes every step anew: all ranks' slabs in one file, with more effort. A step is replaced only where it
becomes at least 1 % smaller, by a commit of its own, so that a killed pack loses nothing. What is stored
stays the same, bit for bit.)";

struct Flags {
  std::string run;
  int level = 9, threads = 0;
  bool dry_run = false;
  PruneFlags prune;
  OutputFlags output;
};

struct Totals {
  int64_t steps = 0, replaced = 0;
  int64_t before_bytes = 0, after_bytes = 0;  // of all steps' rank files
};

Totals PackSteps(const Flags& flags, const OpenedRun& run, RunWriter* writer,
                 const std::vector<PositionRange>& pruned) {
  const int threads = flags.threads > 0 ? flags.threads : AvailableCpus();
  std::vector<int64_t> positions;
  for (const auto& [position, step] : KeptStepsOf(run.history())) {
    bool goes = false;
    for (const PositionRange& range : pruned) {
      goes = goes || (position >= range.first && position <= range.last);
    }
    if (!goes) positions.push_back(position);
  }
  Totals totals;
  Progress progress(flags.output, "pack", 0, std::ssize(positions));
  for (int64_t position : positions) {
    const PackedStep step =
        OrFail(PackStep(run.reader(), run.layout(), position, flags.level, threads, writer));
    ++totals.steps;
    totals.replaced += step.smaller ? 1 : 0;
    totals.before_bytes += step.before_bytes;
    totals.after_bytes += step.smaller ? step.after_bytes : step.before_bytes;
    progress.Show(totals.steps, "");
  }
  return totals;
}

void Print(const Flags& flags, const Pruned& pruned, const Totals& totals) {
  if (flags.output.json) {
    const Json json = {{"run", flags.run},
                       {"dry_run", flags.dry_run},
                       {"level", flags.level},
                       {"pruned", {{"positions", pruned.positions}, {"bytes", pruned.bytes}}},
                       {"steps", totals.steps},
                       {"replaced", totals.replaced},
                       {"before_bytes", totals.before_bytes},
                       {"after_bytes", totals.after_bytes}};
    return PrintReport(json.dump(2) + "\n");
  }
  const char* would = flags.dry_run ? "would " : "";
  std::string text;
  if (!pruned.positions.empty()) {
    text += fmt::format("{}drop positions {}, {}\n", would, RangesText(pruned.positions),
                        ByteText(pruned.bytes));
  }
  text +=
      fmt::format("{}: {}replace {} of {} steps; rank files {} -> {}\n", flags.run, would,
                  totals.replaced, totals.steps, ByteText(static_cast<double>(totals.before_bytes)),
                  ByteText(static_cast<double>(totals.after_bytes)));
  PrintReport(text);
}

void RunPack(const Flags& flags) {
  auto run = OrFail(OpenedRun::Open(flags.run));
  const PrunePolicy policy = OrFail(PrunePolicyOf(flags.prune, *run));
  const DiskUse use = OrFail(MeasureDiskUse(run->reader(), run->layout()));
  std::unique_ptr<RunWriter> writer;
  if (!flags.dry_run) {
    writer = OrFail(RunWriter::Open(flags.run, run->layout(), FileOps(), OpenFor::kUpkeep));
    run = OrFail(OpenedRun::Open(flags.run));  // as it is now that it is ours
  }
  const std::vector<PositionRange> ranges = PlanPrune(run->history(), policy);
  if (writer) OrFail(Prune(writer.get(), ranges));
  const Totals totals = PackSteps(flags, *run, writer.get(), ranges);
  Print(flags, PrunedOf(ranges, use), totals);
}

}  // namespace

void AddPackCommand(CLI::App& app) {
  CLI::App* pack = app.add_subcommand("pack", "Encode a run's steps anew, smaller, and prune it");
  auto flags = std::make_shared<Flags>();
  pack->add_option("run", flags->run, "The recording")->required();
  WholeIn(pack->add_option("--level", flags->level, "Of zstd"), 1, 19)->capture_default_str();
  CLI::Option* threads =
      pack->add_option("--threads", flags->threads, "Threads; 0: one for each processor");
  WholeIn(threads, 0, 1024)->capture_default_str();
  AddPruneFlags(pack, &flags->prune);
  pack->add_flag("--dry-run", flags->dry_run, "Only measure");
  AddOutputFlags(pack, &flags->output, true);
  pack->footer(kExamples);
  pack->callback([flags] { RunPack(*flags); });
}

}  // namespace retrace
