// Replicas over seeds: recipes from their first state, each with every seed of the experiment as
// init.seed and data.seed.
#include <fmt/format.h>

#include <map>

#include "core/recipe_toml.h"
#include "core/version.h"
#include "replay/solo_comm.h"
#include "surgery/replica_source.h"

namespace retrace {
namespace {

class SeedReplicas : public ReplicaSource {
 public:
  SeedReplicas(const ExperimentPlan& plan, const SourceOptions& options)
      : plan_(plan), options_(options) {}

  Status Prepare();
  Result<std::string> Identity(const ReplicaSpec& spec) const override;
  Result<Replica> Live(const ReplicaSpec& spec, const std::string& dir, const Tick& tick) override;
  std::string ProofIdentity(const Replica& control) const override;
  int64_t ProofUpdates() const override { return plan_.horizon; }
  Result<std::optional<ReplayedUpdate>> Prove(const std::string& dir, const Tick& tick) override;
  int64_t ForkOf(const ExperimentArm&) const override { return 0; }
  Status DropForks(const std::string&) const override { return {}; }

 private:
  Recipe RecipeOf(const ExperimentArm& arm, int64_t seed) const;

  const ExperimentPlan& plan_;
  const SourceOptions options_;
  std::map<std::string, Recipe> recipes_;   // by arm
  std::map<std::string, Digest> datasets_;  // by path
};

Status SeedReplicas::Prepare() {
  for (const ExperimentArm& arm : plan_.arms) {
    const std::string where = arm.where + ": arm '" + arm.name + "'";
    Result<Recipe> recipe = LoadRecipe(plan_.recipe, arm.overrides);
    if (!recipe.ok()) return recipe.status().Within(where);
    if (recipe->data.evaluation_samples == 0) {
      return UsageError(where +
                        ": an experiment compares the loss of the recipe's evaluation "
                        "batch, but data.evaluation_samples = 0");
    }
    if (plan_.horizon > recipe->steps) {
      return UsageError(fmt::format("{}: steps = \"1..{}\": the recipe has {} updates", where,
                                    plan_.horizon, recipe->steps));
    }
    // Opened for every arm: sizes and splits decide whether the dataset serves.
    const Result<std::unique_ptr<BatchSource>> batches = OpenBatchSource(*recipe);
    if (!batches.ok()) return batches.status().Within(where);
    datasets_[recipe->data.path] = (*batches)->identity();
    recipes_[arm.name] = *std::move(recipe);
  }
  return {};
}

Recipe SeedReplicas::RecipeOf(const ExperimentArm& arm, int64_t seed) const {
  Recipe recipe = recipes_.at(arm.name);
  recipe.init.seed = static_cast<uint64_t>(seed);
  recipe.data.seed = static_cast<uint32_t>(seed);
  return recipe;
}

Result<std::string> SeedReplicas::Identity(const ReplicaSpec& spec) const {
  const Recipe recipe = RecipeOf(*spec.arm, spec.seed);
  return fmt::format("{}\n{}\n{}\n1..{}",
                     ThisMachine(recipe.numerics, options_.job.isa, "").numerics, RecipeDigest(recipe).Hex(),
                     datasets_.at(recipe.data.path).Hex(), plan_.horizon);
}

std::string SeedReplicas::ProofIdentity(const Replica& control) const {
  return "the control again\n" + control.dir + "\n" + control.state.Hex();
}

Result<std::optional<ReplayedUpdate>> SeedReplicas::Prove(const std::string& dir,
                                                          const Tick& tick) {
  RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(dir));
  RT_ASSIGN_OR_RETURN(const Recipe recipe, ParseRecipe(run.recipe_text(), dir));
  SoloComm comm;
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(recipe, comm, options_.job));
  RT_RETURN_IF_ERROR(job->StartFresh());
  const int64_t end = run.history().last_position();  // before the horizon where it halted
  if (end == 0) return std::optional<ReplayedUpdate>();
  ReplayedUpdate last;
  RT_ASSIGN_OR_RETURN(const bool same, ReplayHere(run, *job, end, [&](const ReplayedUpdate& u) {
                        last = u;
                        tick();
                      }));
  return same ? std::nullopt : std::optional<ReplayedUpdate>(last);
}

Result<Replica> SeedReplicas::Live(const ReplicaSpec& spec, const std::string& dir,
                                   const Tick& tick) {
  const Recipe recipe = RecipeOf(*spec.arm, spec.seed);
  SoloComm comm;
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(recipe, comm, options_.job));
  RT_RETURN_IF_ERROR(job->StartFresh());
  RT_ASSIGN_OR_RETURN(const Digest first, job->StateDigestNow());
  RunPlan plan;
  plan.recipe_text = PrintRecipe(recipe);
  Stamp(job->machine(), &plan);
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<RunWriter> writer,
                      RunWriter::Create(dir, job->layout(), plan));
  Replica replica;
  replica.state = first;
  Status halted;
  RT_RETURN_IF_ERROR(RecordBranch(*job, writer.get(), dir, plan_.horizon,
                                  {.states = options_.keep_states, .keyframes = {}}, nullptr,
                                  Observe(&replica, tick), &halted));
  if (!halted.ok()) Halt(&replica);
  return replica;
}

}  // namespace

Result<std::unique_ptr<ReplicaSource>> MakeSeedReplicas(const ExperimentPlan& plan,
                                                        const SourceOptions& options) {
  auto source = std::make_unique<SeedReplicas>(plan, options);
  RT_RETURN_IF_ERROR(source->Prepare());
  return std::unique_ptr<ReplicaSource>(std::move(source));
}

}  // namespace retrace
