// ReplicaSource: what an experiment's replicas are and how one is lived. Used by ensemble.cc.
//
// Two kinds: branches of one run, told apart by noise; and recipes from their first state, told
// apart by seeds. A replica is recorded as a run of its own that keeps records only, unless asked.
// Identity and Live are thread-safe; the others are called before or after.
#ifndef RETRACE_SURGERY_REPLICA_SOURCE_H_
#define RETRACE_SURGERY_REPLICA_SOURCE_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "surgery/branch.h"
#include "surgery/experiment_file.h"
#include "surgery/replica_log.h"

namespace retrace {

struct ReplicaSpec {
  const ExperimentArm* arm = nullptr;
  double sigma = 0;  // over one run
  int64_t seed = 0;
  std::string trunk;           // directory of the control's replica of that noise; "": none
  std::vector<int64_t> forks;  // positions at which other arms leave this replica
};

struct SourceOptions {
  JobOptions job;            // of a replica; tp = dp = 1
  bool keep_states = false;  // else records only
  bool evaluated = true;     // a recipe without evaluation batch is refused; else losses are those of
                             // the updates' batches where there is none
  bool noise_last = false;   // behind the surgery, which may replace what noise changed; else before
};

using Tick = std::function<void()>;  // after each update

class ReplicaSource {
 public:
  virtual ~ReplicaSource() = default;

  // All that a replica's bits depend on, in text.
  virtual Result<std::string> Identity(const ReplicaSpec& spec) const = 0;
  // Lives it and records it in `dir`. `dir` of the result is left to the caller.
  virtual Result<Replica> Live(const ReplicaSpec& spec, const std::string& dir,
                               const Tick& tick) = 0;
  // What stands for the control's proof, in text; equal texts need no second proof.
  virtual std::string ProofIdentity(const Replica& control) const = 0;
  virtual int64_t ProofUpdates() const = 0;
  // Lives the control again as recorded. nullopt: every bit is equal. `dir`: the control's first
  // replica.
  virtual Result<std::optional<ReplayedUpdate>> Prove(const std::string& dir, const Tick& tick) = 0;
  // Position at which an arm leaves the control's replica of the same noise; the last: never.
  virtual int64_t ForkOf(const ExperimentArm& arm) const = 0;
  // Removes the states that a replica has kept for others to begin at.
  virtual Status DropForks(const std::string& dir) const = 0;
};

// Errors: kUsage for a plan that does not fit, before anything runs.
Result<std::unique_ptr<ReplicaSource>> MakeBranchReplicas(const RunReader& run,
                                                          const ExperimentPlan& plan,
                                                          const SourceOptions& options);
Result<std::unique_ptr<ReplicaSource>> MakeSeedReplicas(const ExperimentPlan& plan,
                                                        const SourceOptions& options);

// For a source's Live: puts what an update gave into the replica. It and `tick` outlive the result.
std::function<void(const UpdateRecord&, const Digest&)> Observe(Replica* replica, const Tick& tick);
// Training halted on what is not finite: as a loss that is infinite.
void Halt(Replica* replica);

}  // namespace retrace

#endif  // RETRACE_SURGERY_REPLICA_SOURCE_H_
