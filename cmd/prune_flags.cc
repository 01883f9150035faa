#include "cmd/prune_flags.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cmd/replay_report.h"

namespace retrace {

void AddPruneFlags(CLI::App* command, PruneFlags* flags) {
  const auto given = [flags](const std::string&) { flags->given = true; };
  command->add_option("--window", flags->window, "Keep all states of updates A..B")->each(given);
  CLI::Option* every =
      command->add_option("--every", flags->every, "Keep the state of every n-th position");
  WholeIn(every, 1)->each(given);
  CLI::Option* keep_last =
      command->add_option("--keep-last", flags->keep_last, "Keep the last n states");
  WholeIn(keep_last, 1)->each(given);
  command->add_flag("--release-held", flags->release_held,
                    "What the flight recorder or densify made stay may go, too");
}

Result<PrunePolicy> PrunePolicyOf(const PruneFlags& flags, const OpenedRun& run) {
  PrunePolicy policy{run.recipe().store, flags.release_held};
  if (!flags.given) {
    if (!run.history().header.lineage) return policy;
    policy.store.window_first = run.history().first_position();
    policy.store.window_last = run.history().last_position();
    return policy;
  }
  policy.store = StoreRecipe();
  policy.store.every = flags.every;
  policy.store.keep_last = flags.keep_last;
  if (flags.window.empty()) return policy;
  RT_ASSIGN_OR_RETURN(const UpdateRange window, ParseUpdateRange(flags.window, "--window"));
  policy.store.window_first = window.first - 1;  // the state that replay of A starts from
  policy.store.window_last = window.last;
  return policy;
}

Pruned PrunedOf(const std::vector<PositionRange>& ranges, const DiskUse& use) {
  Pruned pruned{ranges, {}, 0};
  for (const StepUse& step : use.steps) {
    for (const PositionRange& range : ranges) {
      if (step.position < range.first || step.position > range.last) continue;
      pruned.positions.push_back(step.position);
      pruned.bytes += step.total();
    }
  }
  return pruned;
}

}  // namespace retrace
