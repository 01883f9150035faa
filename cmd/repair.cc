#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/damage_report.h"
#include "cmd/job_flags.h"
#include "cmd/rebuild_job.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace repair runs/demo --dry-run     # what is damaged, and what can be made again
  retrace repair runs/demo --tp 2
Looks at every byte, then makes each damaged step again: a walk over good journals and replay of the
updates in between, proven by the digest that the ledger has. Damaged files go only when their successors
are durable. A damaged ledger, recipe.toml or manifest.json is nothing that can be made again: restore
them from a copy. Exit code 3: something damaged remains.)";

struct RepairFlags {
  std::string run;
  bool dry_run = false;
  JobFlags job;
  OutputFlags output;
};

constexpr int kDamagedCode = static_cast<int>(StatusCode::kDamaged);

FileReport Look(const RepairFlags& flags, const ResolvedJob& job) {
  std::unique_ptr<Progress> progress;
  const int threads = job.options.threads * (job.launched ? 1 : job.options.tp * job.options.dp);
  Result<FileReport> report =
      CheckRunFiles(flags.run, CheckDepth::kDeep, threads, [&](int64_t done, int64_t total) {
        if (!progress) progress = std::make_unique<Progress>(flags.output, "fsck", 0, total);
        progress->Show(done, "");
      });
  progress.reset();
  return OrFail(std::move(report));
}

void Print(const RepairFlags& flags, const FileReport& report, const RebuildPlan& plan,
           const std::string& outcome) {
  if (flags.output.json) {
    Json json = {{"run", flags.run},
                 {"dry_run", flags.dry_run},
                 {"outcome", outcome},
                 {"damage", Json::parse(DamageJson(report.damage))}};
    json.update(Json::parse(RebuildPlanJson(plan)));
    return PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  std::string text = DamageText(flags.output, report.damage, {});
  if (!plan.empty()) text += RebuildPlanText(plan);
  PrintReport(text + flags.run + ": " + outcome + "\n");
}

// The damaged steps; fails where what is damaged is no step.
std::vector<int64_t> DamagedSteps(const RepairFlags& flags, const FileReport& report, bool speaks) {
  std::set<int64_t> positions;
  for (const Damage& damage : report.damage) {
    if (damage.position >= 0) {
      positions.insert(damage.position);
      continue;
    }
    if (speaks) {
      Print(
          flags, report, {},
          "the ledger, recipe.toml or manifest.json is damaged and can not be made again; restore "
          "it from a copy");
    }
    Exit(kDamagedCode);
  }
  return {positions.begin(), positions.end()};
}

void RunRepair(RepairFlags flags) {
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!job.speaks()) flags.output.quiet = true;
  const FileReport report = Look(flags, job);
  const std::vector<int64_t> damaged = DamagedSteps(flags, report, job.speaks());
  if (damaged.empty()) {
    if (job.speaks()) Print(flags, report, {}, "nothing is damaged");
    return;
  }
  RunReader run = OrFail(RunReader::Open(flags.run));
  const RunHistory before = run.history();
  for (int64_t position : damaged) run.Forget(position);
  const Recipe recipe = OrFail(ParseRecipe(run.recipe_text(), flags.run + "/" + kRecipeName));
  const Layout layout = OrFail(Layout::Make(recipe.model, recipe.topology.virtual_shards));
  const RebuildPlan plan = OrFail(PlanRepair(run, before, layout, damaged));
  if (flags.dry_run) {
    if (job.speaks()) Print(flags, report, plan, "nothing was changed");
    Exit(kDamagedCode);
  }
  const Status status = RunRebuild(job, flags.output, "repair", run, plan, std::nullopt);
  if (!status.ok()) Fail(status);
  if (job.speaks()) {
    Print(flags, report, plan,
          fmt::format("{} step{} made again, proven by digest", plan.steps.size(),
                      plan.steps.size() == 1 ? "" : "s"));
  }
}

}  // namespace

void AddRepairCommand(CLI::App& app) {
  CLI::App* repair =
      app.add_subcommand("repair", "Make damaged steps again from their neighbours, by replay");
  auto flags = std::make_shared<RepairFlags>();
  repair->add_option("run", flags->run, "The recording")->required();
  repair->add_flag("--dry-run", flags->dry_run, "Only say what would be made again");
  AddJobFlags(repair, &flags->job);
  AddOutputFlags(repair, &flags->output, true);
  repair->footer(kExamples);
  repair->callback([flags] { RunRepair(*flags); });
}

}  // namespace retrace
