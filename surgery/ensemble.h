// Ensemble: an experiment's replicas, run side by side and judged. Used by `retrace experiment`.
//
// No verdict without a control replay that equals the recording bit for bit; no claim without
// noise. A replica is a run of its own (replica_source.h) in the experiment's directory; when it is
// finished, the replica log says so, and no later call lives it again. Over one run, all arms have
// the same noise, so an arm that changes nothing has the control's digests.
#ifndef RETRACE_SURGERY_ENSEMBLE_H_
#define RETRACE_SURGERY_ENSEMBLE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "surgery/branch.h"
#include "surgery/experiment_file.h"
#include "surgery/verdict.h"

namespace retrace {

inline constexpr double kSigmaLadder[] = {0x1p-23, 0x1p-16, 0x1p-10};

struct ExperimentResult {
  // Where the control parts from the recording; nothing is judged then.
  std::optional<ReplayedUpdate> control_differs;
  // Over one run: sigma and the control's spread (quartile range of its jumps), as far as was
  // climbed.
  struct Rung {
    double sigma = 0, spread = 0;
  };
  std::vector<Rung> ladder;
  double sigma = 0;
  bool saturated = false;
  int64_t replicas_run = 0, replicas_found = 0;  // found: finished by an earlier call
  std::vector<ArmResult> arms;                   // the control first
};

// What claims hold for: "this recipe", "this run", or "this exact trajectory" where the noise is
// not known to be saturated.
const char* ScopeOf(const ExperimentPlan& plan, const ExperimentResult& result);

struct ExperimentProgress {
  std::string stage;                   // "control proof", "noise 1.19e-07", "arms"
  int64_t updates = 0, all = 0;        // of the stage
  std::string arm;                     // of the replica that moved
  int64_t finished = 0, replicas = 0;  // of the arm
  const Replica* replica = nullptr;    // one that has just been finished
};

struct ExperimentOptions {
  std::string out;                // directory of the replicas and their log
  std::vector<std::string> only;  // arms' names; empty: all
  int jobs = 1;                   // replicas side by side
  JobOptions job;                 // of each; tp = dp = 1
  bool keep_states = false;       // of replicas; else records only
  std::function<void(const ExperimentProgress&)> progress;  // one call at a time
};

// `run`: the parent; nullptr for an experiment over seeds. Errors: kUsage for a plan that does not
// fit or an unknown `only`, before anything runs; those of the store.
Result<ExperimentResult> RunExperiment(const RunReader* run, const ExperimentPlan& plan,
                                       const ExperimentOptions& options);

// What RunExperiment would do.
struct ExperimentForecast {
  struct Arm {
    std::string name;
    std::vector<std::string> changes;
    int64_t replicas = 0;
  };
  std::vector<Arm> arms;
  int64_t updates = 0;  // at the most, of all replicas and the proof
};
Result<ExperimentForecast> Forecast(const RunReader* run, const ExperimentPlan& plan,
                                    const std::vector<std::string>& only);

}  // namespace retrace

#endif  // RETRACE_SURGERY_ENSEMBLE_H_
