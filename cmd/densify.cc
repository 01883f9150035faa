#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/rebuild_job.h"
#include "cmd/replay_report.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace densify runs/demo --steps 30..50 --dry-run    # what would be made, and what it costs
  retrace densify runs/demo --steps 30..50 --tp 2
Lives updates again from the nearest kept state and stores the states before and after each of updates
A..B that the run does not keep. Every state on the way must have the digest that the ledger has. They
stay: later pruning keeps them unless told otherwise. Killed, it goes on where it ended.)";

struct DensifyFlags {
  std::string run, steps;
  bool dry_run = false;
  JobFlags job;
  OutputFlags output;
};

void Print(const DensifyFlags& flags, const RebuildPlan& plan) {
  const std::string done = flags.dry_run ? "planned" : "stored";
  if (flags.output.json) {
    Json json = {{"run", flags.run}, {"steps", flags.steps}, {"dry_run", flags.dry_run}};
    json.update(Json::parse(RebuildPlanJson(plan)));
    return PrintReport(json.dump(2) + "\n");
  }
  std::string text;
  if (plan.empty()) {
    text = fmt::format("{}: every state of updates {} is kept already\n", flags.run, flags.steps);
  } else {
    text = RebuildPlanText(plan);
    text += fmt::format("{}: {} states {}\n", flags.run, plan.steps.size(),
                        Tinted(flags.output, Tint::kGreen, done));
  }
  PrintReport(text);
}

void RunDensify(DensifyFlags flags) {
  const UpdateRange range = OrFail(ParseUpdateRange(flags.steps, "--steps"));
  const RunReader run = OrFail(RunReader::Open(flags.run));
  const Recipe recipe = OrFail(ParseRecipe(run.recipe_text(), flags.run + "/" + kRecipeName));
  const Layout layout = OrFail(Layout::Make(recipe.model, recipe.topology.virtual_shards));
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!job.speaks()) flags.output.quiet = true;
  const RebuildPlan plan =
      OrFail(PlanDensify(run, layout, range.first - 1, range.last, recipe.store.keyframe_every));
  if (!flags.dry_run && !plan.empty()) {
    const KeepLine hold = {range.first - 1, range.last, run.history().last_position(),
                           kDensifyTrigger, "retrace densify --steps " + flags.steps};
    OrFail(RunRebuild(job, flags.output, "densify", run, plan, hold));
  }
  if (job.speaks()) Print(flags, plan);
}

}  // namespace

void AddDensifyCommand(CLI::App& app) {
  CLI::App* densify = app.add_subcommand(
      "densify", "Make every state of a range again by replay, proven by digest, and keep it");
  auto flags = std::make_shared<DensifyFlags>();
  densify->add_option("run", flags->run, "The recording")->required();
  densify->add_option("--steps", flags->steps, "Updates A..B")->required();
  densify->add_flag("--dry-run", flags->dry_run, "Only say what would be made");
  AddJobFlags(densify, &flags->job);
  AddOutputFlags(densify, &flags->output, true);
  densify->footer(kExamples);
  densify->callback([flags] { RunDensify(*flags); });
}

}  // namespace retrace
