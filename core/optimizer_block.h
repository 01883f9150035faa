// OptimizerBlock: with the gradient of update k it determines RUN@k from RUN@(k-1) by AdamW alone
// (clause 12). One row per tensor in canonical order; scalars stored as bits, never recomputed from
// the recipe, so a journal is valid on any machine and at any level. Used by replay and the store.
#ifndef RETRACE_CORE_OPTIMIZER_BLOCK_H_
#define RETRACE_CORE_OPTIMIZER_BLOCK_H_

#include <cstdint>
#include <vector>

namespace retrace {

enum class TensorAction : uint32_t {
  kUpdate = 0,
  kSkip = 1,    // p, m, v stay
  kFrozen = 2,  // m, v move, p stays
};

struct OptimizerRow {
  TensorAction action = TensorAction::kUpdate;
  uint32_t reserved = 0;
  int64_t t = 0;  // Adam's t of this update (after counting it)
  float lr = 0, beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float bias_correction1 = 1, bias_correction2 = 1;  // 1 - beta^t
  float eps = 0, weight_decay = 0;
  float clip = 1;         // factor on the gradient; 1: not applied
  float update_clip = 1;  // factor on the update u; 1: not applied

  bool operator==(const OptimizerRow&) const = default;
};
static_assert(sizeof(OptimizerRow) == 64);

struct OptimizerBlock {
  std::vector<OptimizerRow> rows;  // one per tensor
  // Factors per row of the whole tensor where a clip is per row, else empty; one entry per tensor.
  std::vector<std::vector<float>> row_clips;

  bool operator==(const OptimizerBlock&) const = default;
};

}  // namespace retrace

#endif  // RETRACE_CORE_OPTIMIZER_BLOCK_H_
