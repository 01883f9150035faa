// What the optimizer does to each tensor of an update, from the norms of its gradient: clip factors,
// what stays as it is, and the scalars of AdamW. Used by the update. Pure: what a rule remembers is
// an argument and a result.
// Clauses 11 and 12 of NUMERICS.md.
#ifndef RETRACE_REPLAY_OPTIMIZER_RULES_H_
#define RETRACE_REPLAY_OPTIMIZER_RULES_H_

#include <vector>

#include "core/layout.h"
#include "core/optimizer_block.h"
#include "core/recipe.h"
#include "core/state.h"

namespace retrace {

struct GradientSquares {
  std::vector<double> tensors;            // sum of g^2, one per tensor in canonical order
  std::vector<std::vector<double>> rows;  // of tensors that are clipped by rows; else empty
};

// The embedding and an untied head: what clip_scope = embedding-rows clips by rows.
bool IsClippedByRows(const Recipe& recipe, const TensorSpec& spec);

// The rule that freezes a tensor; nullptr: none.
const FreezeRule* FreezeRuleOf(const OptimizerRecipe& optimizer, const TensorSpec& spec);

struct Clips {
  double gradient_norm = 0;                // of all that counts
  std::vector<float> tensors;              // factor of each; where by rows, the smallest
  std::vector<std::vector<float>> rows;    // empty, or one list per tensor: empty or by rows
  float smallest = 1;
  RuleMemory memory;                       // afterwards, of the rule in force alone
};

// Computes   factor = threshold / (norm + 1e-6) of each group of clip_scope, where below 1
// Shapes     one group for each norm; threshold by clip_rule from what the rule remembers
// Order      a group's squares are added in canonical order of its tensors, from +0
// Guarantee  FP64, the factor rounded once
// Clause     11
// Source     global: Pascanu et al. 2013, arXiv 1211.5063; ema: AdaGC, arXiv 2502.11034; z-score:
//            ZClip, arXiv 2504.02507
Clips ClipGradient(const Recipe& recipe, const std::vector<TensorSpec>& tensors,
                   const GradientSquares& squares, const RuleMemory& memory);

// The block of an update. `skip`: p, m, v of every tensor stay; t goes on where `skipped_t_moves`.
struct UpdateScalars {
  double lr = 0;
  bool skip = false, skipped_t_moves = false;
};
OptimizerBlock MakeOptimizerBlock(const Recipe& recipe, const std::vector<TensorSpec>& tensors,
                                  const Counters& counters, const Clips& clips,
                                  const UpdateScalars& scalars);

}  // namespace retrace

#endif  // RETRACE_REPLAY_OPTIMIZER_RULES_H_
