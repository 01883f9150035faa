#include "surgery/prevention.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <thread>

#include "core/recipe_toml.h"
#include "surgery/ensemble.h"
#include "surgery/statistics.h"

namespace retrace {
namespace {

Prevents Classify(double share) {
  if (share >= kPreventedShare) return Prevents::kYes;
  return share < kNotPreventedShare ? Prevents::kNo : Prevents::kUndecided;
}

double Share(int64_t part, int64_t all) {
  return static_cast<double>(part) / static_cast<double>(all);
}

}  // namespace

const char* PreventsName(Prevents answer) {
  return answer == Prevents::kYes ? "yes" : answer == Prevents::kNo ? "no" : "undecided";
}

std::optional<Prevents> DecideSequentially(int64_t without, int64_t replicas,
                                           const SequentialRule& rule) {
  if (replicas >= rule.most) return Classify(Share(without, replicas));
  const int64_t left = rule.most - replicas;
  const Prevents worst = Classify(Share(without, rule.most));
  if (worst == Classify(Share(without + left, rule.most))) return worst;
  if (replicas < rule.least) return std::nullopt;
  const double ratio =
      static_cast<double>(without) * std::log(kPreventedShare / kNotPreventedShare) +
      static_cast<double>(replicas - without) *
          std::log((1 - kPreventedShare) / (1 - kNotPreventedShare));
  const double bound = std::log((1 - kLevel) / kLevel);
  const Prevents seen = Classify(Share(without, replicas));
  if (ratio >= bound && seen == Prevents::kYes) return seen;
  if (ratio <= -bound && seen == Prevents::kNo) return seen;
  return std::nullopt;
}

struct PreventionTrials::Ensemble {
  int64_t update = 0;
  ExperimentPlan plan;  // the control, and the interventions
  std::unique_ptr<ReplicaSource> source;

  int64_t cost() const { return plan.horizon - plan.first + 1; }
};

// ---- What is recorded ----

Result<std::unique_ptr<PreventionTrials>> PreventionTrials::Make(
    const RunReader& run, const PreventionOptions& options) {
  std::unique_ptr<PreventionTrials> trials(new PreventionTrials(run, options));
  RT_RETURN_IF_ERROR(trials->Prepare());
  return trials;
}

Status PreventionTrials::Prepare() {
  RT_CHECK(options_.predicate.has_value());
  RT_CHECK(options_.job.tp == 1 && options_.job.dp == 1 && options_.jobs >= 1);
  const RunHistory& history = run_.history();
  const UpdateRange& range = options_.range;
  if (range.first <= history.first_position() || range.last > history.last_position() ||
      range.first > range.last) {
    return UsageError(fmt::format("--steps {}..{}: {} has updates {}..{}", range.first, range.last,
                                  run_.dir(), history.first_position() + 1,
                                  history.last_position()));
  }
  RT_ASSIGN_OR_RETURN(recipe_, ParseRecipe(run_.recipe_text(), run_.dir() + "/" + kRecipeName));
  RT_ASSIGN_OR_RETURN(Layout layout,
                      Layout::Make(recipe_.model, recipe_.topology.virtual_shards));
  layout_ = std::make_unique<Layout>(std::move(layout));
  for (int64_t k = range.first; k <= range.last; ++k) {
    RT_ASSIGN_OR_RETURN(UpdateRecord record, ParseRecord(history.Find(k)->record));
    records_.push_back(std::move(record));
  }
  RT_RETURN_IF_ERROR(options_.predicate->Check(records_.front()));
  RT_ASSIGN_OR_RETURN(log_, ReplicaLog::Open(options_.out));
  return {};
}

std::optional<int64_t> PreventionTrials::RecordedSpike() const {
  return options_.predicate->FirstSpike(records_);
}

int64_t PreventionTrials::UpdatesAtMost(int64_t update, int64_t questions) const {
  const int64_t rungs = options_.sigma ? 1 : std::ssize(kSigmaLadder);
  const int64_t replicas = rungs * options_.rule.least + questions * options_.rule.most;
  return replicas * (options_.range.last - update + 1);
}

Result<std::optional<ReplayedUpdate>> PreventionTrials::Prove() {
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Ensemble> ensemble,
                      MakeEnsemble(options_.range.first, {}));
  const Digest key = DigestOf(ensemble->source->ProofIdentity({}));
  if (log_->Find(key)) return std::optional<ReplayedUpdate>();
  shown_ = {"control proof", 0, 0, 0};
  RT_ASSIGN_OR_RETURN(const std::optional<ReplayedUpdate> differs,
                      ensemble->source->Prove("", [this] {
                        ++proven_;
                        Tell();
                      }));
  if (differs) return differs;
  RT_RETURN_IF_ERROR(log_->Append(key, "proof: the control equals its recording", {}));
  return std::optional<ReplayedUpdate>();
}

// ---- Replicas ----

Result<std::unique_ptr<PreventionTrials::Ensemble>> PreventionTrials::MakeEnsemble(
    int64_t update, const std::vector<Intervention>& interventions) {
  auto ensemble = std::make_unique<Ensemble>();
  ensemble->update = update;
  ensemble->plan.first = update;
  ensemble->plan.last = ensemble->plan.horizon = options_.range.last;
  ensemble->plan.arms.resize(2);
  ensemble->plan.arms[0].name = kControlName;
  ensemble->plan.arms[1].name = fmt::format("do-{}", update);
  ensemble->plan.arms[1].interventions = interventions;
  for (ExperimentArm& arm : ensemble->plan.arms) arm.where = fmt::format("update {}", update);
  RT_ASSIGN_OR_RETURN(ensemble->source,
                      MakeBranchReplicas(run_, ensemble->plan,
                                         {.job = options_.job, .evaluated = false, .noise_last = true}));
  return ensemble;
}

Status PreventionTrials::Check(int64_t update, const std::vector<Intervention>& interventions) {
  return MakeEnsemble(update, interventions).status();
}

Result<bool> PreventionTrials::Spiked(const Ensemble& ensemble, const Replica& replica) const {
  std::vector<UpdateRecord> records(records_.begin(),
                                    records_.begin() + (ensemble.update - options_.range.first));
  RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(log_->dir() + "/" + replica.dir));
  for (int64_t k = ensemble.update; k <= run.history().last_position(); ++k) {
    RT_ASSIGN_OR_RETURN(UpdateRecord record, ParseRecord(run.history().Find(k)->record));
    records.push_back(std::move(record));
  }
  if (replica.halted) {
    const bool evaluated = recipe_.data.evaluation_samples > 0;
    records.push_back(HaltedRecord(run.history().last_position() + 1, evaluated));
  }
  return options_.predicate->FirstSpike(records).has_value();
}

// One that is finished, and whose records are still there.
Result<std::optional<PreventionTrials::Member>> PreventionTrials::FindMember(
    const Ensemble& ensemble, const Digest& key) const {
  const std::optional<Replica> found = log_->Find(key);
  if (!found || !std::filesystem::exists(log_->dir() + "/" + found->dir + "/" + kLedgerName)) {
    return std::optional<Member>();
  }
  RT_ASSIGN_OR_RETURN(const bool spiked, Spiked(ensemble, *found));
  return std::optional<Member>(Member{*found, spiked});
}

Result<PreventionTrials::Member> PreventionTrials::LiveOne(Ensemble& ensemble,
                                                           const ReplicaSpec& spec,
                                                           const Digest& key) {
  const std::string name =
      fmt::format("replicas/{}-{}-{}", spec.arm == ensemble.plan.arms.data()
                                           ? fmt::format("control-{}", ensemble.update)
                                           : spec.arm->name,
                  spec.seed, key.Hex().substr(0, 8));
  const std::string dir = log_->dir() + "/" + name;
  std::error_code error;
  std::filesystem::remove_all(dir, error);  // one that was killed: no line names it
  std::filesystem::create_directories(log_->dir() + "/replicas", error);
  RT_ASSIGN_OR_RETURN(Replica replica, ensemble.source->Live(spec, dir, [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++lived_;
    Tell();
  }));
  replica.dir = name;
  RT_RETURN_IF_ERROR(log_->Append(
      key, fmt::format("{}, sigma {}, seed {}", spec.arm->name, spec.sigma, spec.seed), replica));
  RT_ASSIGN_OR_RETURN(const bool spiked, Spiked(ensemble, replica));
  return Member{std::move(replica), spiked};
}

void PreventionTrials::Tell() {
  shown_.updates = proven_ + lived_;
  if (options_.progress) options_.progress(shown_);
}

Result<std::optional<std::vector<PreventionTrials::Member>>> PreventionTrials::Live(
    Ensemble& ensemble, const std::string& what, double sigma, int64_t first, int64_t count) {
  const bool control = what.starts_with("control");
  std::vector<Member> members(count);
  std::vector<std::pair<int64_t, Digest>> missing;  // index, key
  const auto spec = [&](int64_t i) {
    ReplicaSpec s;
    s.arm = &ensemble.plan.arms[control ? 0 : 1];
    s.sigma = sigma;
    s.seed = first + i;
    return s;
  };
  for (int64_t i = 0; i < count; ++i) {
    RT_ASSIGN_OR_RETURN(const std::string identity, ensemble.source->Identity(spec(i)));
    const Digest key = DigestOf(identity);
    RT_ASSIGN_OR_RETURN(const std::optional<Member> found, FindMember(ensemble, key));
    if (found) members[i] = *found;
    else missing.emplace_back(i, key);
  }
  const int64_t cost = std::ssize(missing) * ensemble.cost();
  if (options_.budget > 0 && lived_ + cost > options_.budget) {
    return std::optional<std::vector<Member>>();
  }
  found_ += count - std::ssize(missing);
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  const size_t workers = std::min<size_t>(options_.jobs, missing.size());
  std::vector<Status> statuses(workers);
  std::vector<std::thread> threads;
  for (size_t w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (size_t j; !failed && (j = next++) < missing.size();) {
        Result<Member> member = LiveOne(ensemble, spec(missing[j].first), missing[j].second);
        if (member.ok()) members[missing[j].first] = std::move(member).value();
        else failed = true, statuses[w] = member.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) RT_RETURN_IF_ERROR(status.Within(what));
  return std::optional<std::vector<Member>>(std::move(members));
}

// ---- Decisions ----

// What noise to add before an update: the ladder, climbed by the control from there.
Result<std::optional<PreventionTrials::Noise>> PreventionTrials::NoiseAt(int64_t update) {
  if (const auto known = noise_.find(update); known != noise_.end()) {
    return std::optional<Noise>(known->second);
  }
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Ensemble> ensemble, MakeEnsemble(update, {}));
  std::vector<double> ladder(std::begin(kSigmaLadder), std::end(kSigmaLadder));
  if (options_.sigma) ladder = {*options_.sigma};
  Noise noise;
  double spread_before = 0;
  for (size_t rung = 0; rung < ladder.size(); ++rung) {
    shown_ = {fmt::format("update {}: control, noise {:.2e}", update, ladder[rung]), lived_, 0, 0};
    RT_ASSIGN_OR_RETURN(const std::optional<std::vector<Member>> members,
                        Live(*ensemble, "control", ladder[rung], 1, options_.rule.least));
    if (!members) return std::optional<Noise>();
    std::vector<double> jumps;
    int64_t without = 0;
    for (const Member& member : *members) {
      jumps.push_back(JumpOf(member.replica.losses, 0).nats);
      without += member.spiked ? 0 : 1;
    }
    const double spread = QuartileRange(jumps);
    if (rung > 0 && spread < 2 * spread_before && spread_before < 2 * spread) {
      noise.saturated = true;  // the rung before already was
      break;
    }
    noise = {ladder[rung], false, without, std::ssize(*members)};
    spread_before = spread;
  }
  noise_[update] = noise;
  return std::optional<Noise>(noise);
}

Result<std::optional<Prevention>> PreventionTrials::Decide(
    int64_t update, const std::vector<Intervention>& interventions, int64_t seed) {
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Ensemble> ensemble,
                      MakeEnsemble(update, interventions));
  RT_ASSIGN_OR_RETURN(const std::optional<Noise> noise, NoiseAt(update));
  if (!noise) return std::optional<Prevention>();
  Prevention prevention = {.answer = Prevents::kUndecided,
                           .without = 0,
                           .replicas = 0,
                           .sigma = noise->sigma,
                           .saturated = noise->saturated,
                           .laddered = !options_.sigma,
                           .control_without = noise->without,
                           .control_replicas = noise->replicas};
  std::optional<Prevents> answer;
  for (int64_t lived = 0; !answer;) {
    const int64_t wave = std::min<int64_t>(options_.jobs, options_.rule.most - lived);
    shown_ = {fmt::format("update {}", update), lived_, prevention.without, prevention.replicas};
    RT_ASSIGN_OR_RETURN(const std::optional<std::vector<Member>> members,
                        Live(*ensemble, "replicas", noise->sigma, seed + lived, wave));
    if (!members) return std::optional<Prevention>();
    lived += wave;
    for (auto member = members->begin(); !answer && member != members->end(); ++member) {
      ++prevention.replicas;
      prevention.without += member->spiked ? 0 : 1;
      answer = DecideSequentially(prevention.without, prevention.replicas, options_.rule);
    }
  }
  prevention.answer = *answer;
  return std::optional<Prevention>(prevention);
}

}  // namespace retrace
