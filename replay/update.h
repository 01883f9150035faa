// Updater: one application of the pure function (recipe, state) -> (state, record). Used by train,
// replay and everything that re-lives updates. Reads no clock, environment or global, and no file
// but the dataset that the recipe names. Not thread-safe; one per rank, all ranks in step.
#ifndef RETRACE_REPLAY_UPDATE_H_
#define RETRACE_REPLAY_UPDATE_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/optimizer_block.h"
#include "kernels/adamw.h"
#include "replay/optimizer_rules.h"
#include "replay/record.h"
#include "replay/step_pass.h"

namespace retrace {

// What became of an update.
enum class UpdateAction {
  kApplied,
  kSkipped,  // non-finite under policy `skip`, or told to: parameters and moments stay
  kHalted,   // non-finite under policy `halt`: nothing changed, the job must stop
};

// What one update does that its recipe does not say: which samples it consumes, and whether it is
// applied. Interventions change it (surgery/).
struct UpdateDirective {
  std::vector<int64_t> samples;  // indices that it consumes, in order; as many as the recipe says
  int64_t cursor = 0;            // the data cursor afterwards
  bool skip = false;             // p, m and v stay
  bool t_moves = true, schedule_moves = true;  // whether these counters advance all the same

  // The samples from the cursor on.
  static UpdateDirective Default(const Recipe& recipe, const Counters& counters);
};

struct UpdateResult {
  UpdateAction action = UpdateAction::kApplied;
  UpdateRecord record;
  OptimizerBlock block;
  std::string reason;  // of kSkipped and kHalted: the first non-finite tensor
};

// Of one tensor, or a part of it: sums of squares in FP64 and counts, over blocks of
// 4096 elements in order, then over shards in order: the same on any number of threads and ranks.
struct UpdateSums {
  double p = 0;         // before the update
  double change = 0;    // of p by the update
  double m = 0, v = 0;  // after it
  OddNumbers odd_g, odd_p, odd_m, odd_v;  // after it

  UpdateSums& operator+=(const UpdateSums& other);
};

class Updater {
 public:
  // All arguments outlive the updater.
  Updater(const Recipe& recipe, const ParameterMap& map, RankContext context,
          const BatchSource& batches);

  // Runs update k = position + 1. Errors: those of the Comm and of the dataset; the state is then
  // unchanged. Afterwards gradient(slab) is that of the update, FP32, before clipping.
  Result<UpdateResult> Run(RankState* state, const UpdateDirective& directive);
  Result<UpdateResult> Run(RankState* state) {
    return Run(state, UpdateDirective::Default(recipe_, state->state.counters));
  }

  // The gradient that Run would have, and how it would be clipped. Changes no state.
  Result<Clips> Gradient(const RankState& state, const UpdateDirective& directive);

  const ComputeVector<float>& gradient(int slab) const { return pass_->gradient(slab); }
  StepPass& pass() { return *pass_; }  // its probe sees the optimizer too

  // Mean loss of the recipe's evaluation batch at a state; nullopt where it names none.
  Result<std::optional<double>> EvaluationLoss(const RankState& state);

 private:
  Result<std::vector<TokenBatch>> ReadStep(const std::vector<int64_t>& samples) const;
  Result<GradientSquares> Squares() const;
  // Per tensor, the sum of what `block_sum` says of each of its blocks: clause 11.
  Result<std::vector<double>> TensorSums(
      const std::function<double(int slab, const Piece& piece, int64_t first, int64_t count)>&
          block_sum) const;
  Result<std::vector<double>> TensorSquares() const;
  Result<std::vector<double>> RowSquares(int tensor) const;
  Result<double> UpdateRms(const RankState& state, const OptimizerBlock& block) const;
  Status Measure(const RankState& state, const UpdateDirective& directive, UpdateRecord* record);
  UpdateAction Decide(const UpdateDirective& directive, UpdateResult* result) const;
  Status ClipUpdates(const RankState& state, OptimizerBlock* block) const;
  Result<TensorNorms> Apply(const OptimizerBlock& block, RankState* state);
  void EmitPieces(const std::string& suffix,
                  const std::function<const float*(int slab)>& elements) const;
  void EmitGradient() const;
  void EmitOptimizer(const UpdateRecord& record, const OptimizerBlock& block,
                     const RankState& state) const;
  std::string FirstNonFinite(const UpdateRecord& record) const;
  Status DigestTokens(const std::vector<int64_t>& samples, UpdateRecord* record) const;

  const Recipe& recipe_;
  const ParameterMap& map_;
  RankContext context_;
  const BatchSource& batches_;
  std::unique_ptr<StepPass> pass_;
  std::optional<TokenBatch> evaluation_;
};

// Applies one optimizer block to a rank's slabs: the whole of an update but for its gradient, and
// one step of the walk of a journal. Counters: every t that the block names, position + 1; schedule
// and cursor are the caller's. `sums`, where it is given, has an entry for each tensor of the layout;
// those of the pieces are added.
void ApplyBlock(Engine& engine, const Layout& layout, const OptimizerBlock& block,
                const std::vector<Piece>& pieces, const float* gradient, ShardState* slab,
                UpdateSums* sums = nullptr);

}  // namespace retrace

#endif  // RETRACE_REPLAY_UPDATE_H_
