// ExperimentPlan: what an experiment file (TOML) says: its arms, and how they are judged. Used by
// `retrace experiment`. A value. Reading is strict: unknown keys are refused, every intervention
// and every recipe is parsed.
//
// Over one run: arms are branches of it, and claims hold for "this run".
//   run = "runs/demo"        # unless the command line names one
//   steps = "4..24"          # updates that the control has to replay bit for bit
//   horizon = 20             # replicas go to this update; default: the last of steps
//   threshold = 0.5          # nats: a rise of the evaluation loss above it is a spike
//   sigma = "auto"           # or a number: relative noise of replicas
//   control_replicas = 12    # at least 12
//   replicas = 6             # of every other arm, at least 6
//   seed = 1                 # noise of replica i of every arm has seed + i
//   [[arm]]
//   name = "clip off"
//   hypothesis = "clipping starves the late layers"
//   do = ["clip:none"]
//   seed = 1                 # noise of this arm, where it shall not be the control's
//
// Over seeds: arms are recipes, and claims hold for "this recipe".
//   recipe = "demo.toml"     # beside this file; the control
//   set = ["steps=30"]       # overrides of it
//   steps = "1..20"          # from the beginning to the horizon
//   threshold = 0.5
//   seeds = [1, 2, 3, 4, 5]  # at least 5; each is init.seed and data.seed of a replica
//   [[arm]]
//   name = "residual-scaled"
//   set = ["init.scheme=residual-scaled"]
#ifndef RETRACE_SURGERY_EXPERIMENT_FILE_H_
#define RETRACE_SURGERY_EXPERIMENT_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "surgery/intervention.h"

namespace retrace {

struct ExperimentArm {
  std::string name, hypothesis;
  std::string where;                        // FILE:LINE:COLUMN
  std::vector<Intervention> interventions;  // over one run
  std::vector<std::string> overrides;       // over seeds: of the recipe, with the control's
  std::vector<int64_t> seeds;               // one a replica
};

inline constexpr char kControlName[] = "control";
inline constexpr int64_t kLeastControlReplicas = 12, kLeastReplicas = 6, kLeastSeeds = 5;

struct ExperimentPlan {
  std::string run;                  // over one run; "": the command line names it
  std::string recipe;               // over seeds
  int64_t first = 0, last = 0;      // updates
  int64_t horizon = 0;              // first < horizon <= last
  double threshold = 0.5;           // nats
  std::optional<double> sigma;      // over one run; nullopt: the ladder
  std::vector<ExperimentArm> arms;  // the control first

  bool over_seeds() const { return !recipe.empty(); }
  int64_t other_arms() const { return std::ssize(arms) - 1; }
};

// Errors: kUsage with FILE:LINE:COLUMN, the key, what was expected, what came.
Result<ExperimentPlan> ParseExperiment(std::string_view toml, const std::string& file);
Result<ExperimentPlan> LoadExperiment(const std::string& path);

}  // namespace retrace

#endif  // RETRACE_SURGERY_EXPERIMENT_FILE_H_
