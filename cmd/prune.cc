#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "cmd/prune_flags.h"
#include "cmd/text_table.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace prune runs/demo --dry-run                         # what the recipe's policy does not keep
  retrace prune runs/demo --window 4..16 --every 20         # keep these states and no others
  retrace prune runs/demo --keep-last 8 --release-held
Files go where no state that the policy keeps is reached over them: never the only way back to one. The
first and the last state always stay, and so does what the flight recorder or densify made stay, unless
--release-held. A branch that keeps records only is replayed from its parent's state: keep that one.)";

struct Flags {
  std::string run;
  bool dry_run = false;
  PruneFlags prune;
  OutputFlags output;
};

void Print(const Flags& flags, const Pruned& pruned) {
  if (flags.output.json) {
    const Json json = {{"run", flags.run},
                       {"dry_run", flags.dry_run},
                       {"positions", pruned.positions},
                       {"bytes", pruned.bytes}};
    return PrintReport(json.dump(2) + "\n");
  }
  if (pruned.positions.empty()) {
    return PrintReport(flags.run +
                       ": nothing to prune; all that is kept leads to a state that the "
                       "policy keeps\n");
  }
  PrintReport(fmt::format("{}: {} the files of positions {}, {}\n", flags.run,
                          flags.dry_run ? "would remove" : "removed", RangesText(pruned.positions),
                          ByteText(pruned.bytes)));
}

void RunPrune(const Flags& flags) {
  const auto run = OrFail(OpenedRun::Open(flags.run));
  const PrunePolicy policy = OrFail(PrunePolicyOf(flags.prune, *run));
  const DiskUse use = OrFail(MeasureDiskUse(run->reader(), run->layout()));
  std::vector<PositionRange> ranges = PlanPrune(run->history(), policy);
  if (!flags.dry_run && !ranges.empty()) {
    const auto writer =
        OrFail(RunWriter::Open(flags.run, run->layout(), FileOps(), OpenFor::kUpkeep));
    // Of what the run has now that it is ours.
    ranges = PlanPrune(writer->history(), policy);
    OrFail(Prune(writer.get(), ranges));
  }
  Print(flags, PrunedOf(ranges, use));
}

}  // namespace

void AddPruneCommand(CLI::App& app) {
  CLI::App* prune =
      app.add_subcommand("prune", "Remove the files of states that are not to be kept");
  auto flags = std::make_shared<Flags>();
  prune->add_option("run", flags->run, "The recording")->required();
  AddPruneFlags(prune, &flags->prune);
  prune->add_flag("--dry-run", flags->dry_run, "Only say what would go");
  AddOutputFlags(prune, &flags->output, true);
  prune->footer(kExamples);
  prune->callback([flags] { RunPrune(*flags); });
}

}  // namespace retrace
