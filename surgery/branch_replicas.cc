// Replicas over one run: branches of it. Each begins with seeded noise on all parameters, then
// comes the arm's surgery. An arm that does nothing before some update shares the control's replica
// of the same noise up to there: it is a branch of that, and nothing before is lived or stored
// twice.
#include <fmt/format.h>

#include <mutex>

#include "core/recipe_toml.h"
#include "core/version.h"
#include "replay/solo_comm.h"
#include "surgery/replica_source.h"

namespace retrace {
namespace {

// Of the evaluation batch where there is one, in the records of updates first..last.
Result<std::vector<double>> LossesOf(const RunReader& run, int64_t first, int64_t last) {
  std::vector<double> losses;
  for (int64_t k = first; k <= last; ++k) {
    RT_ASSIGN_OR_RETURN(const UpdateRecord record, ParseRecord(run.history().Find(k)->record));
    losses.push_back(record.evaluation_loss.value_or(record.loss));
  }
  return losses;
}

class BranchReplicas : public ReplicaSource {
 public:
  BranchReplicas(const RunReader& run, const ExperimentPlan& plan, const SourceOptions& options)
      : run_(run), plan_(plan), options_(options) {}

  Status Prepare();
  Result<std::string> Identity(const ReplicaSpec& spec) const override;
  Result<Replica> Live(const ReplicaSpec& spec, const std::string& dir, const Tick& tick) override;
  std::string ProofIdentity(const Replica& control) const override;
  int64_t ProofUpdates() const override { return plan_.last - plan_.first + 1; }
  Result<std::optional<ReplayedUpdate>> Prove(const std::string& dir, const Tick& tick) override;
  int64_t ForkOf(const ExperimentArm& arm) const override;
  Status DropForks(const std::string& dir) const override;

 private:
  std::string KeyText(const std::string& what) const;
  Result<std::vector<Intervention>> Script(const ReplicaSpec& spec) const;
  Status GoToStart(Job& job);
  Result<Replica> LiveBranch(const RunReader& parent, Job& job, const BranchPlan& branch,
                             const Tick& tick) const;

  const RunReader& run_;
  const ExperimentPlan& plan_;
  const SourceOptions options_;
  SoloComm comm_;
  Recipe recipe_;
  std::shared_ptr<const BatchSource> batches_;
  std::unique_ptr<Job> job_;        // of the proof, and of what is asked for its layout
  std::mutex mutex_;                // start_
  std::optional<RankState> start_;  // RUN@(first-1)
};

Status BranchReplicas::Prepare() {
  RT_ASSIGN_OR_RETURN(recipe_, ParseRecipe(run_.recipe_text(), run_.dir() + "/" + kRecipeName));
  if (options_.evaluated && recipe_.data.evaluation_samples == 0) {
    return UsageError(run_.dir() +
                      ": an experiment compares the loss of the recipe's evaluation "
                      "batch, but data.evaluation_samples = 0");
  }
  const RunHistory& history = run_.history();
  if (plan_.first <= history.first_position() || plan_.last > history.last_position()) {
    return UsageError(fmt::format("steps = \"{}..{}\": {} has updates {}..{}", plan_.first,
                                  plan_.last, run_.dir(), history.first_position() + 1,
                                  history.last_position()));
  }
  RT_ASSIGN_OR_RETURN(batches_, OpenBatchSource(recipe_));
  RT_ASSIGN_OR_RETURN(job_, Job::Make(recipe_, comm_, options_.job, batches_));
  for (const ExperimentArm& arm : plan_.arms) {
    RT_RETURN_IF_ERROR(BranchScript(run_, *job_, plan_.first, plan_.horizon, arm.interventions)
                           .status()
                           .Within(arm.where + ": arm '" + arm.name + "'"));
  }
  return {};
}

std::string BranchReplicas::KeyText(const std::string& what) const {
  return fmt::format("{}\n{}\n{}\n{}\n{}..{}\n{}", job_->machine().numerics,
                     DigestOf(run_.recipe_text()).Hex(),
                     batches_->identity().Hex(), run_.history().Find(plan_.first - 1)->digest.Hex(),
                     plan_.first, plan_.horizon, what);
}

Result<std::vector<Intervention>> BranchReplicas::Script(const ReplicaSpec& spec) const {
  RT_ASSIGN_OR_RETURN(Intervention noise, ParseIntervention(fmt::format("perturb:sigma={},seed={}",
                                                                        spec.sigma, spec.seed)));
  std::vector<Intervention> all = spec.arm->interventions;
  all.insert(options_.noise_last ? all.end() : all.begin(), std::move(noise));
  return all;
}

Result<std::string> BranchReplicas::Identity(const ReplicaSpec& spec) const {
  RT_ASSIGN_OR_RETURN(const std::vector<Intervention> interventions, Script(spec));
  RT_ASSIGN_OR_RETURN(const InterventionScript script,
                      BranchScript(run_, *job_, plan_.first, plan_.horizon, interventions));
  return KeyText(script.Text());
}

std::string BranchReplicas::ProofIdentity(const Replica&) const {
  std::string recorded = "the control without noise\n";
  for (int64_t k = plan_.first; k <= plan_.last; ++k) {
    const PositionEntry& entry = *run_.history().Find(k);
    recorded += entry.digest.Hex() + entry.record + "\n";
  }
  return KeyText(recorded);
}

// Sought once, then copied: it may have to be replayed from a keyframe far before.
Status BranchReplicas::GoToStart(Job& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!start_) {
    RT_RETURN_IF_ERROR(GoBefore(run_, *job_, plan_.first));
    start_ = job_->state();
  }
  job.state() = *start_;
  return {};
}

Result<std::optional<ReplayedUpdate>> BranchReplicas::Prove(const std::string&, const Tick& tick) {
  RT_RETURN_IF_ERROR(GoToStart(*job_));
  ReplayedUpdate last;
  RT_ASSIGN_OR_RETURN(const bool same,
                      ReplayHere(run_, *job_, plan_.last, [&](const ReplayedUpdate& update) {
                        last = update;
                        tick();
                      }));
  return same ? std::nullopt : std::optional<ReplayedUpdate>(last);
}

int64_t BranchReplicas::ForkOf(const ExperimentArm& arm) const {
  int64_t first = plan_.horizon + 1;
  for (const Intervention& one : arm.interventions) {
    first = std::min(first, one.first.value_or(plan_.first));
  }
  return first - 1;
}

Result<Replica> BranchReplicas::LiveBranch(const RunReader& parent, Job& job,
                                           const BranchPlan& branch, const Tick& tick) const {
  Replica replica;  // with what it shares with the control's
  RT_ASSIGN_OR_RETURN(replica.losses, LossesOf(parent, plan_.first, branch.first - 1));
  replica.state = parent.history().Find(branch.first - 1)->digest;
  Status halted;
  RT_RETURN_IF_ERROR(MakeBranchHere(parent, job, branch, Observe(&replica, tick), &halted));
  if (!halted.ok()) Halt(&replica);
  return replica;
}

Result<Replica> BranchReplicas::Live(const ReplicaSpec& spec, const std::string& dir,
                                     const Tick& tick) {
  SoloComm comm;
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job,
                      Job::Make(recipe_, comm, options_.job, batches_));
  BranchPlan branch = {.first = plan_.first,
                       .last = plan_.horizon,
                       .interventions = {},
                       .out = dir,
                       .kept = {.states = options_.keep_states, .keyframes = spec.forks}};
  const int64_t fork = ForkOf(*spec.arm);
  if (!spec.trunk.empty() && fork >= plan_.first) {
    // Where the control's replica keeps no state there (any more), this one is lived whole.
    const Result<RunReader> trunk = RunReader::Open(spec.trunk);
    const PositionEntry* entry = trunk.ok() ? trunk->history().Find(fork) : nullptr;
    if (entry != nullptr && entry->HasKeyframe()) {
      for (int64_t k = plan_.first; k <= fork; ++k) tick();
      branch.first = fork + 1;
      branch.interventions = spec.arm->interventions;
      RT_RETURN_IF_ERROR(GoBefore(*trunk, *job, branch.first));
      return LiveBranch(*trunk, *job, branch, tick);
    }
  }
  RT_ASSIGN_OR_RETURN(branch.interventions, Script(spec));
  RT_RETURN_IF_ERROR(GoToStart(*job));
  return LiveBranch(run_, *job, branch, tick);
}

Status BranchReplicas::DropForks(const std::string& dir) const {
  if (options_.keep_states) return {};
  RT_ASSIGN_OR_RETURN(const RunReader reader, RunReader::Open(dir));
  bool any = false;
  for (const PositionEntry& entry : reader.history().positions) any |= entry.master.has_value();
  if (!any) return {};  // by an earlier call
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<RunWriter> writer,
                      RunWriter::Open(dir, job_->layout(), FileOps(), OpenFor::kGoingOn,
                                      job_->machine().numerics));
  return writer->Retire(plan_.first, plan_.horizon);
}

}  // namespace

Result<std::unique_ptr<ReplicaSource>> MakeBranchReplicas(const RunReader& run,
                                                          const ExperimentPlan& plan,
                                                          const SourceOptions& options) {
  auto source = std::make_unique<BranchReplicas>(run, plan, options);
  RT_RETURN_IF_ERROR(source->Prepare());
  return std::unique_ptr<ReplicaSource>(std::move(source));
}

}  // namespace retrace
