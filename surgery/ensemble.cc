#include "surgery/ensemble.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "core/nearest_name.h"
#include "surgery/replica_source.h"
#include "surgery/statistics.h"

namespace retrace {
namespace {

// One replica to have.
struct Task {
  ReplicaSpec spec;
  Digest key;
  Replica* out = nullptr;
};

// Arms to run, with their replicas.
struct Ensemble {
  const ExperimentArm* arm = nullptr;
  double sigma = 0;
  std::vector<Replica> replicas;  // one a seed of the arm
  int64_t finished = 0;
};

class Runner {
 public:
  Runner(const ExperimentPlan& plan, const ExperimentOptions& options, ReplicaSource& source,
         ReplicaLog& log, std::vector<const ExperimentArm*> others)
      : plan_(plan), options_(options), source_(source), log_(log), others_(std::move(others)) {}

  // Has every replica of the ensembles, lived or found. `control`: whose replicas they may share.
  Status RunAll(const std::string& stage, const Ensemble* control,
                const std::vector<Ensemble*>& ensembles);
  // The control without noise or, over seeds, its first replica once more.
  Result<std::optional<ReplayedUpdate>> ProveControl(const Replica& control);
  // Climbs the ladder until the control's spread changes by less than 2x on the next rung.
  Status ClimbLadder(Ensemble* control, ExperimentResult* result);
  Status DropForks(const Ensemble& control);

  int64_t replicas_run() const { return run_; }
  int64_t replicas_found() const { return found_; }

 private:
  Result<std::vector<Task>> TasksOf(const Ensemble* control, Ensemble* ensemble);
  std::vector<int64_t> ForksOf(int64_t seed) const;
  Status Work(const std::vector<Task>& tasks, const std::vector<Ensemble*>& ensembles);
  Status RunOne(const Task& task, Ensemble* ensemble);
  void Show(const Ensemble& ensemble, int64_t moved, const Replica* finished);

  const ExperimentPlan& plan_;
  const ExperimentOptions& options_;
  ReplicaSource& source_;
  ReplicaLog& log_;
  const std::vector<const ExperimentArm*> others_;  // that run, without the control
  std::atomic<size_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // what follows, and calls of progress
  ExperimentProgress shown_;
  int64_t run_ = 0, found_ = 0;
};

int64_t UpdatesOf(const ExperimentPlan& plan) { return plan.horizon - plan.first + 1; }

// Of letters and digits, for a directory's name.
std::string Slug(const std::string& name) {
  std::string slug;
  for (const char c : name.substr(0, 40)) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte < 128 && std::isalnum(byte))
      slug += static_cast<char>(std::tolower(byte));
    else if (!slug.empty() && slug.back() != '-')
      slug += '-';
  }
  return slug;
}

// Positions at which other arms of the same noise leave the control's replica.
std::vector<int64_t> Runner::ForksOf(int64_t seed) const {
  std::set<int64_t> forks;
  for (const ExperimentArm* arm : others_) {
    const int64_t fork = source_.ForkOf(*arm);
    const bool has = std::find(arm->seeds.begin(), arm->seeds.end(), seed) != arm->seeds.end();
    if (has && fork >= plan_.first && fork < plan_.horizon) forks.insert(fork);
  }
  return {forks.begin(), forks.end()};
}

// The replicas that are not in the log yet; the others are filled in.
Result<std::vector<Task>> Runner::TasksOf(const Ensemble* control, Ensemble* ensemble) {
  std::vector<Task> missing;
  ensemble->replicas.assign(ensemble->arm->seeds.size(), {});
  ensemble->finished = 0;
  for (size_t i = 0; i < ensemble->arm->seeds.size(); ++i) {
    Task task;
    task.spec = {.arm = ensemble->arm,
                 .sigma = ensemble->sigma,
                 .seed = ensemble->arm->seeds[i],
                 .trunk = {},
                 .forks = {}};
    task.out = &ensemble->replicas[i];
    RT_ASSIGN_OR_RETURN(const std::string identity, source_.Identity(task.spec));
    task.key = DigestOf(identity + (options_.keep_states ? "\nwith states" : ""));
    if (std::optional<Replica> found = log_.Find(task.key)) {
      *task.out = *std::move(found);
      ++ensemble->finished;
      ++found_;
      continue;
    }
    if (control == nullptr) {
      task.spec.forks = ForksOf(task.spec.seed);
    } else {
      const std::vector<int64_t>& seeds = control->arm->seeds;
      const auto same = std::find(seeds.begin(), seeds.end(), task.spec.seed);
      if (same != seeds.end()) {
        task.spec.trunk = log_.dir() + "/" + control->replicas[same - seeds.begin()].dir;
      }
    }
    missing.push_back(std::move(task));
  }
  return missing;
}

Status Runner::RunAll(const std::string& stage, const Ensemble* control,
                      const std::vector<Ensemble*>& ensembles) {
  std::vector<Task> tasks, twins;  // twins: of arms that say the same as an earlier one
  std::vector<Ensemble*> owners;
  std::set<Digest> keys;
  for (Ensemble* ensemble : ensembles) {
    RT_ASSIGN_OR_RETURN(std::vector<Task> missing, TasksOf(control, ensemble));
    for (Task& task : missing) {
      if (!keys.insert(task.key).second) {
        twins.push_back(std::move(task));
        continue;
      }
      tasks.push_back(std::move(task));
      owners.push_back(ensemble);
    }
  }
  shown_ = {.stage = stage,
            .updates = 0,
            .all = std::ssize(tasks) * UpdatesOf(plan_),
            .arm = {},
            .finished = 0,
            .replicas = 0};
  if (options_.progress && !tasks.empty()) options_.progress(shown_);
  next_ = 0;
  const size_t count = std::min<size_t>(options_.jobs, tasks.size());
  std::vector<Status> statuses(count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      statuses[i] = Work(tasks, owners);
      if (!statuses[i].ok()) failed_ = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) RT_RETURN_IF_ERROR(status);
  for (const Task& twin : twins) *twin.out = *log_.Find(twin.key);
  return {};
}

// One of the threads: takes replicas until none is left.
Status Runner::Work(const std::vector<Task>& tasks, const std::vector<Ensemble*>& owners) {
  for (size_t i; !failed_ && (i = next_++) < tasks.size();) {
    const ReplicaSpec& spec = tasks[i].spec;
    RT_RETURN_IF_ERROR(
        RunOne(tasks[i], owners[i])
            .Within(fmt::format("arm '{}', replica of seed {}", spec.arm->name, spec.seed)));
  }
  return {};
}

Status Runner::RunOne(const Task& task, Ensemble* ensemble) {
  const ReplicaSpec& spec = task.spec;
  const std::string name = fmt::format("replicas/{}-{}-{}", Slug(spec.arm->name), spec.seed,
                                       task.key.Hex().substr(0, 8));
  const std::string dir = log_.dir() + "/" + name;
  std::error_code error;
  std::filesystem::remove_all(dir, error);  // a replica that was killed: no line names it
  std::filesystem::create_directories(log_.dir() + "/replicas", error);
  int64_t moved = 0;
  RT_ASSIGN_OR_RETURN(Replica replica, source_.Live(spec, dir, [&] {
    ++moved;
    Show(*ensemble, 1, nullptr);
  }));
  replica.dir = name;
  const std::string what =
      spec.sigma > 0 ? fmt::format("{}, sigma {}, seed {}", spec.arm->name, spec.sigma, spec.seed)
                     : fmt::format("{}, seed {}", spec.arm->name, spec.seed);
  RT_RETURN_IF_ERROR(log_.Append(task.key, what, replica));
  *task.out = replica;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++run_;
    ++ensemble->finished;
  }
  Show(*ensemble, UpdatesOf(plan_) - moved, &replica);
  return {};
}

void Runner::Show(const Ensemble& ensemble, int64_t moved, const Replica* finished) {
  const std::lock_guard<std::mutex> lock(mutex_);
  shown_.updates += moved;
  shown_.arm = ensemble.arm->name;
  shown_.finished = ensemble.finished;
  shown_.replicas = std::ssize(ensemble.arm->seeds);
  shown_.replica = finished;
  if (options_.progress) options_.progress(shown_);
}

Result<std::optional<ReplayedUpdate>> Runner::ProveControl(const Replica& control) {
  const Digest key = DigestOf(source_.ProofIdentity(control));
  if (log_.Find(key)) return std::optional<ReplayedUpdate>();
  shown_ = {.stage = "control proof",
            .updates = 0,
            .all = source_.ProofUpdates(),
            .arm = {},
            .finished = 0,
            .replicas = 0};
  if (options_.progress) options_.progress(shown_);
  RT_ASSIGN_OR_RETURN(const std::optional<ReplayedUpdate> differs,
                      source_.Prove(log_.dir() + "/" + control.dir, [&] {
                        ++shown_.updates;
                        if (options_.progress) options_.progress(shown_);
                      }));
  if (differs) return differs;
  RT_RETURN_IF_ERROR(log_.Append(key, "proof: the control equals its recording", {}));
  return std::optional<ReplayedUpdate>();
}

Status Runner::ClimbLadder(Ensemble* control, ExperimentResult* result) {
  Ensemble before;
  for (const double sigma : kSigmaLadder) {
    Ensemble here = {.arm = control->arm, .sigma = sigma, .replicas = {}, .finished = 0};
    RT_RETURN_IF_ERROR(RunAll(fmt::format("noise {:.2e}", sigma), nullptr, {&here}));
    std::vector<double> jumps;
    for (const Replica& replica : here.replicas) {
      jumps.push_back(JumpOf(replica.losses, plan_.threshold).nats);
    }
    const double spread = QuartileRange(jumps);
    if (!result->ladder.empty()) {
      const double last = result->ladder.back().spread;
      result->saturated = spread < 2 * last && last < 2 * spread;
    }
    result->ladder.push_back({sigma, spread});
    if (result->saturated) {  // the rung before already was
      RT_RETURN_IF_ERROR(DropForks(here));
      break;
    }
    RT_RETURN_IF_ERROR(DropForks(before));
    before = std::move(here);
  }
  *control = std::move(before);
  return {};
}

Status Runner::DropForks(const Ensemble& control) {
  for (size_t i = 0; i < control.replicas.size(); ++i) {
    if (ForksOf(control.arm->seeds[i]).empty() || control.replicas[i].dir.empty()) continue;
    const std::string dir = log_.dir() + "/" + control.replicas[i].dir;
    if (std::filesystem::exists(dir)) RT_RETURN_IF_ERROR(source_.DropForks(dir));
  }
  return {};
}

// ---- The whole ----

Result<std::vector<const ExperimentArm*>> OtherArms(const ExperimentPlan& plan,
                                                    const std::vector<std::string>& only) {
  std::vector<std::string> names;
  for (const ExperimentArm& arm : plan.arms) names.push_back(arm.name);
  for (const std::string& name : only) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    return UsageError("--only: there is no arm '" + name + "'; the nearest is '" +
                      NearestName(name, names) + "'");
  }
  std::vector<const ExperimentArm*> chosen;
  for (size_t i = 1; i < plan.arms.size(); ++i) {
    const bool named = std::find(only.begin(), only.end(), plan.arms[i].name) != only.end();
    if (only.empty() || named) chosen.push_back(&plan.arms[i]);
  }
  return chosen;
}

std::vector<std::string> ChangesOf(const ExperimentPlan& plan, const ExperimentArm& arm) {
  std::vector<std::string> changes;
  for (const Intervention& one : arm.interventions) changes.push_back(one.Text());
  const size_t shared = plan.arms.front().overrides.size();
  const size_t first = arm.name == kControlName ? 0 : shared;
  changes.insert(changes.end(), arm.overrides.begin() + static_cast<std::ptrdiff_t>(first),
                 arm.overrides.end());
  return changes;
}

ArmResult ResultOf(const ExperimentPlan& plan, Ensemble ensemble) {
  ArmResult arm;
  arm.name = ensemble.arm->name;
  arm.hypothesis = ensemble.arm->hypothesis;
  arm.changes = ChangesOf(plan, *ensemble.arm);
  arm.seeds = ensemble.arm->seeds;
  arm.replicas = std::move(ensemble.replicas);
  return arm;
}

Result<std::unique_ptr<ReplicaSource>> SourceOf(const RunReader* run, const ExperimentPlan& plan,
                                                const SourceOptions& options) {
  RT_CHECK(plan.over_seeds() == (run == nullptr));
  if (plan.over_seeds()) return MakeSeedReplicas(plan, options);
  return MakeBranchReplicas(*run, plan, options);
}

}  // namespace

const char* ScopeOf(const ExperimentPlan& plan, const ExperimentResult& result) {
  if (plan.over_seeds()) return "this recipe";
  return result.saturated ? "this run" : "this exact trajectory";
}

Result<ExperimentResult> RunExperiment(const RunReader* run, const ExperimentPlan& plan,
                                       const ExperimentOptions& options) {
  RT_CHECK(options.job.tp == 1 && options.job.dp == 1 && options.jobs >= 1);
  RT_ASSIGN_OR_RETURN(const std::vector<const ExperimentArm*> others,
                      OtherArms(plan, options.only));
  RT_ASSIGN_OR_RETURN(
      const std::unique_ptr<ReplicaSource> source,
      SourceOf(run, plan, {.job = options.job, .keep_states = options.keep_states}));
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<ReplicaLog> log, ReplicaLog::Open(options.out));
  Runner runner(plan, options, *source, *log, others);
  ExperimentResult result;
  Ensemble control = {
      .arm = &plan.arms.front(), .sigma = plan.sigma.value_or(0), .replicas = {}, .finished = 0};
  if (plan.over_seeds()) {  // the recording is made first
    RT_RETURN_IF_ERROR(runner.RunAll("control", nullptr, {&control}));
    RT_ASSIGN_OR_RETURN(result.control_differs, runner.ProveControl(control.replicas.front()));
  } else {
    RT_ASSIGN_OR_RETURN(result.control_differs, runner.ProveControl({}));
  }
  if (result.control_differs) return result;
  if (!plan.over_seeds() && plan.sigma) {
    RT_RETURN_IF_ERROR(runner.RunAll("control", nullptr, {&control}));
  } else if (!plan.over_seeds()) {
    RT_RETURN_IF_ERROR(runner.ClimbLadder(&control, &result));
  }
  result.sigma = control.sigma;
  std::vector<Ensemble> arms;
  for (const ExperimentArm* arm : others) {
    arms.push_back({.arm = arm, .sigma = control.sigma, .replicas = {}, .finished = 0});
  }
  std::vector<Ensemble*> pointers;
  for (Ensemble& arm : arms) pointers.push_back(&arm);
  RT_RETURN_IF_ERROR(runner.RunAll("arms", &control, pointers));
  RT_RETURN_IF_ERROR(runner.DropForks(control));
  result.replicas_run = runner.replicas_run();
  result.replicas_found = runner.replicas_found();
  result.arms.push_back(ResultOf(plan, std::move(control)));
  for (Ensemble& arm : arms) result.arms.push_back(ResultOf(plan, std::move(arm)));
  Judge({.first_position = plan.first - 1,
         .threshold = plan.threshold,
         .other_arms = plan.other_arms()},
        &result.arms);
  return result;
}

Result<ExperimentForecast> Forecast(const RunReader* run, const ExperimentPlan& plan,
                                    const std::vector<std::string>& only) {
  RT_ASSIGN_OR_RETURN(std::vector<const ExperimentArm*> arms, OtherArms(plan, only));
  RT_RETURN_IF_ERROR(SourceOf(run, plan, {}).status());
  arms.insert(arms.begin(), &plan.arms.front());
  ExperimentForecast forecast;
  forecast.updates = plan.over_seeds() ? plan.horizon : plan.last - plan.first + 1;
  const bool ladder = !plan.over_seeds() && !plan.sigma;
  for (const ExperimentArm* arm : arms) {
    const int64_t rungs = ladder && arm == arms.front() ? std::ssize(kSigmaLadder) : 1;
    forecast.arms.push_back({arm->name, ChangesOf(plan, *arm), std::ssize(arm->seeds)});
    forecast.updates += rungs * std::ssize(arm->seeds) * UpdatesOf(plan);
  }
  return forecast;
}

}  // namespace retrace
