// StepPass: from a state and a step's micro-batches to its losses and FP32 gradient, in the order of
// clause 8. Hides whether the policy computes in FP32 or FP64. Used by the update.
// Not thread-safe; one per rank. Every rank of the job calls the same methods in the same order.
#ifndef RETRACE_REPLAY_STEP_PASS_H_
#define RETRACE_REPLAY_STEP_PASS_H_

#include <memory>
#include <utility>
#include <vector>

#include "core/recipe.h"
#include "replay/batch_source.h"
#include "replay/probe.h"
#include "replay/rank_place.h"
#include "replay/rank_state.h"

namespace retrace {

// What a rank works with, owned by its job.
struct RankContext {
  const RankPlace& place;
  Engine& engine;
  Comm& comm;
};

class StepPass {
 public:
  virtual ~StepPass() = default;

  virtual void set_probe(Probe* probe) = 0;
  virtual Probe* probe() const = 0;

  // Mean cross-entropy of a batch, in nats. Changes nothing.
  virtual Result<double> Loss(const RankState& state, const TokenBatch& batch,
                              const std::string& name) = 0;

  // Gradients of the step whose micro-batch i is batches[i] (only this rank's lanes need be there).
  // Result: the step's loss. Afterwards gradient(slab) holds the whole step's gradient, the same on
  // all data-parallel ranks.
  virtual Result<double> Gradients(const RankState& state,
                                   const std::vector<TokenBatch>& batches) = 0;

  // FP32, before clipping; slabs of the ParameterMap.
  virtual const ComputeVector<float>& gradient(int slab) const = 0;
};

// `map` and `context` outlive the pass.
std::unique_ptr<StepPass> MakeStepPass(const Recipe& recipe, const ParameterMap& map,
                                       RankContext context);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STEP_PASS_H_
