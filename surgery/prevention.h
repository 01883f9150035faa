// Prevention: does an intervention prevent a spike? Decided on an ensemble of noise replicas, with
// sequential stopping. Used by the searches for a point of no return and for a cause.
//
// A replica is a branch of the recording at RUN@(k-1): the interventions, then seeded noise on all
// parameters (last, for a transplant would replace it), lived to the horizon. It spikes where the predicate holds at some update of the
// range's records before k and its own after. The answer is *yes* where at least 80 % of the
// replicas show no spike, *no* where fewer than 40 % do, *undecided* between.
//
// Noise: sigma climbs 2^-23, 2^-16, 2^-10 until the spread (quartile range) of the jumps of replicas
// without the interventions, from the same k, changes by less than 2x on the next rung: saturated.
// What is not saturated says nothing beyond this exact trajectory, and is marked.
//
// Sequential stopping, in the order of seeds: (1) as soon as no outcome of the replicas left can
// change the answer; (2) from `least` replicas on by Wald's sequential probability ratio test of
// 80 % against 40 %, at 5 % each: with s replicas without a spike of n,
//   s ln(0.8/0.4) + (n-s) ln(0.2/0.6) >= ln 19: yes,  <= -ln 19: no
// where the share that was seen says the same. So an intervention that prevents in 80 % of all
// replicas is called "no", and one that does in 40 % is called "yes", in at most about 5 % of
// searches (Wald 1945, Ann. Math. Stat. 16).
//
// Every replica is a run of its own under OUT/replicas, with a line in OUT/replicas.jsonl under the
// digest of all that its bits depend on: a killed search repeats none of them. Not thread-safe.
#ifndef RETRACE_SURGERY_PREVENTION_H_
#define RETRACE_SURGERY_PREVENTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/update_range.h"
#include "surgery/predicate.h"
#include "surgery/replica_source.h"

namespace retrace {

enum class Prevents { kNo, kUndecided, kYes };
const char* PreventsName(Prevents answer);  // "no", "undecided", "yes"

inline constexpr double kPreventedShare = 0.8, kNotPreventedShare = 0.4;

struct SequentialRule {
  int64_t least = 6, most = 12;  // replicas
};

// The answer after `replicas`, of which `without` show no spike; nullopt: go on. Pure.
std::optional<Prevents> DecideSequentially(int64_t without, int64_t replicas,
                                           const SequentialRule& rule);

// One question answered.
struct Prevention {
  Prevents answer = Prevents::kUndecided;
  int64_t without = 0, replicas = 0;  // no spike; all that count
  double sigma = 0;
  bool saturated = false;
  bool laddered = false;                              // else sigma was given
  int64_t control_without = 0, control_replicas = 0;  // without the interventions; 0: not lived
};

struct PreventionProgress {
  std::string what;                          // "control 1.19e-07", "update 6"
  int64_t updates = 0;                       // lived so far, in all, those of the proof too
  int64_t without = 0, replicas = 0;         // of what is under way
};

struct PreventionOptions {
  UpdateRange range;              // A..H: records from A on count, replicas go to H
  std::optional<SpikePredicate> predicate;
  SequentialRule rule;
  std::optional<double> sigma;    // nullopt: the ladder
  int64_t budget = 0;             // updates to live; 0: no bound
  std::string out;                // directory of replicas and their log
  int jobs = 1;                   // replicas side by side
  JobOptions job;                 // of each; tp = dp = 1
  std::function<void(const PreventionProgress&)> progress;  // one call at a time
};

class PreventionTrials {
 public:
  // `run` outlives it. Errors: kUsage for a range that the run has not, or a predicate that does not
  // fit; those of the log.
  static Result<std::unique_ptr<PreventionTrials>> Make(const RunReader& run,
                                                        const PreventionOptions& options);

  // The control's proof: nullopt where replaying the range gives the recording bit for bit. Done once
  // for all searches in `out`.
  Result<std::optional<ReplayedUpdate>> Prove();

  // The first update of the range at which the recording itself satisfies the predicate.
  std::optional<int64_t> RecordedSpike() const;
  const std::vector<UpdateRecord>& records() const { return records_; }
  const Recipe& recipe() const { return recipe_; }
  const Layout& layout() const { return *layout_; }

  // Interventions as of update k; those without a date get it. `seed`: of the first replica.
  // nullopt: the budget is spent. Errors: kUsage for interventions that do not fit.
  Result<std::optional<Prevention>> Decide(int64_t update,
                                           const std::vector<Intervention>& interventions,
                                           int64_t seed = 1);
  // Whether interventions fit, before anything is lived.
  Status Check(int64_t update, const std::vector<Intervention>& interventions);

  int64_t updates_lived() const { return lived_; }
  int64_t replicas_found() const { return found_; }  // finished by an earlier call
  // At the most, of so many questions at an update, if nothing is found.
  int64_t UpdatesAtMost(int64_t update, int64_t questions) const;

 private:
  struct Member {  // of an ensemble
    Replica replica;
    bool spiked = false;
  };
  struct Noise {
    double sigma = 0;
    bool saturated = false;
    int64_t without = 0, replicas = 0;
  };
  struct Ensemble;  // of one update and its interventions

  PreventionTrials(const RunReader& run, const PreventionOptions& options)
      : run_(run), options_(options) {}
  Status Prepare();
  Result<std::unique_ptr<Ensemble>> MakeEnsemble(int64_t update,
                                                 const std::vector<Intervention>& interventions);
  // Members of seeds first .. first + count - 1; nullopt: the budget is spent.
  Result<std::optional<std::vector<Member>>> Live(Ensemble& ensemble, const std::string& what,
                                                  double sigma, int64_t first, int64_t count);
  Result<Member> LiveOne(Ensemble& ensemble, const ReplicaSpec& spec, const Digest& key);
  Result<std::optional<Member>> FindMember(const Ensemble& ensemble, const Digest& key) const;
  Result<bool> Spiked(const Ensemble& ensemble, const Replica& replica) const;
  Result<std::optional<Noise>> NoiseAt(int64_t update);
  void Tell();

  const RunReader& run_;
  const PreventionOptions options_;
  Recipe recipe_;
  std::unique_ptr<Layout> layout_;
  std::vector<UpdateRecord> records_;  // of the range
  std::unique_ptr<ReplicaLog> log_;
  std::map<int64_t, Noise> noise_;  // by update
  std::mutex mutex_;                // what follows, and calls of progress
  PreventionProgress shown_;
  int64_t lived_ = 0, found_ = 0, proven_ = 0;
};

}  // namespace retrace

#endif  // RETRACE_SURGERY_PREVENTION_H_
