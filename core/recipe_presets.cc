#include "core/recipe_presets.h"

#include <string>

#include "core/check.h"

namespace retrace {
namespace {

KeyValue Word(const char* word) { return std::string(word); }

std::vector<PresetValue> AutoModel(const Recipe& draft) {
  const bool bf16 = draft.precision.Forward(Point::kWeights) == Format::kBf16;
  return {
      {"model.embed_scale_rounding", Word(bf16 ? "bf16" : "none"),
       "sqrt(hidden_size) is cast to the weights' type: bf16 where they are BF16"},
      {"model.rope_angle_fp32", true, "angles are FP32 products"},
      {"model.pad_token_id", int64_t{0}, "id of the pad token"},
      {"model.pad_lookup_gradient", false, "padding_idx drops the look-up gradient of the pad row"},
      {"init.scheme", Word("hf"), "one standard deviation for every matrix"},
      {"init.zero_pad_row", true, "the initialiser zeroes the pad row"},
      {"optimizer.weight_decay", 0.1, "the optimizer's own value"},
      {"optimizer.decay_on", Word("all"), "one parameter group: norm weights decay too"},
      {"optimizer.loss_division", Word("step-tokens"), "sum over the step's tokens, divided once"},
      {"schedule.initial", 0.1 * draft.schedule.peak, "init_lr is a tenth of the peak"},
      {"schedule.indexing", Word("step-minus-one"), "the scheduler steps after the optimizer"},
      {"data.split", Word("900,50,50"), "default of its dataset configuration"},
      {"precision.partials", Word(draft.precision.AnyFp64() ? "fp64" : "fp32"),
       "not imitated: its tensor parallelism was not measured"},
  };
}

std::vector<PresetValue> Megatron(const Recipe& draft) {
  const bool bf16 = draft.precision.Forward(Point::kOProj) == Format::kBf16;
  const char* const wide = draft.precision.AnyFp64() ? "fp64" : "fp32";
  return {
      {"model.embed_scale_rounding", Word("none"), "sqrt(hidden_size) is a Python number"},
      {"model.rope_angle_fp32", true, "angles are FP32 products"},
      {"model.pad_token_id", int64_t{0}, "id of the pad token"},
      {"model.pad_lookup_gradient", true, "the pad row is an ordinary row"},
      {"init.scheme", Word("residual-scaled"), "o_proj and down_proj by 1 / sqrt(2 layers)"},
      {"init.zero_pad_row", false, "the pad row is an ordinary row"},
      {"optimizer.weight_decay", 0.033,
       "the scheduler's start and end decay overwrite the optimizer's 0.1 in the stock recipe"},
      {"optimizer.decay_on", Word("matrices"), "parameters with one dimension do not decay"},
      {"optimizer.loss_division", Word("per-micro-batch"),
       "mean over micro-batches of their means"},
      {"schedule.initial", 0.0, "lr_warmup_init"},
      {"schedule.indexing", Word("step-minus-one"), "the scheduler steps after the optimizer"},
      {"data.split", Word("9999,8,2"), "default of its dataset configuration"},
      {"precision.partials", Word(bf16 ? "bf16" : wide),
       "row-parallel outputs are rounded before the all-reduce: bf16 where o_proj is BF16"},
  };
}

}  // namespace

std::vector<PresetValue> PresetValues(std::string_view preset, const Recipe& draft) {
  if (preset == "automodel") return AutoModel(draft);
  RT_CHECK(preset == "megatron");
  return Megatron(draft);
}

}  // namespace retrace
