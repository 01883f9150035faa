// Recipe: the frozen, fully resolved configuration of a run. Together with the dataset and the
// numerics id it determines every bit of every state. A plain value; recipe_toml.h reads and writes
// it. Sections `store` and `execution` never change a bit and are outside of RecipeDigest.
#ifndef RETRACE_CORE_RECIPE_H_
#define RETRACE_CORE_RECIPE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/digest.h"
#include "core/precision.h"
#include "core/status.h"

namespace retrace {

enum class LayerKind { kSliding, kFull };
enum class AttentionKind { kMaterialised, kBlockwise };
enum class EmbedScaleRounding { kNone, kBf16 };
enum class InitScheme { kHf, kResidualScaled };
enum class DecayOn { kAll, kMatrices };
enum class LrIndexing { kStep, kStepMinusOne };  // update n applies lr(n) or lr(n-1)
enum class LrShape { kConstant, kCosine };
enum class LossDivision { kStepTokens, kPerMicroBatch };
enum class NonFinitePolicy { kHalt, kSkip, kRecord };
// What a clip takes the norm of: the whole gradient; each layer's, and each tensor's outside of
// them; each tensor's; each row's of the embedding and an untied head, and that of all the rest.
enum class ClipScope { kGlobal, kLayer, kTensor, kEmbeddingRows };
enum class ClipRule { kFixed, kEma, kZScore };  // where the threshold comes from
enum class BiasCorrection { kBoth, kM, kV, kNone };
enum class QkNormGradient { kAllShards, kFirstShard };

// Gemma 4's text decoder; every switch is a possible intervention. Sizes in elements.
struct ModelRecipe {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t layers = 0;
  int64_t query_heads = 0;
  int64_t kv_heads = 0;                // sliding layers (and full ones without attention_k_eq_v)
  int64_t global_kv_heads = 0;         // full layers
  int64_t head_dim = 0;                // sliding layers
  int64_t global_head_dim = 0;         // full layers
  bool attention_k_eq_v = true;        // full layers have no v_proj: v is the raw k
  std::vector<LayerKind> layer_types;  // one per layer; recipes may give a pattern, LayerPattern
  int64_t sliding_window = 0;          // keys that a query sees, itself included
  double sliding_rope_theta = 1e4;
  double full_rope_theta = 1e6;
  double full_partial_rotary_factor = 0.25;
  bool rope_angle_fp32 = false;  // angle = fp32(position) * fp32(inv_freq), as the public code
  double rms_norm_eps = 1e-6;
  double final_logit_softcapping = 30.0;  // 0: off
  bool tie_word_embeddings = true;
  bool embed_scale = true;  // times sqrt(hidden_size)
  EmbedScaleRounding embed_scale_rounding = EmbedScaleRounding::kNone;
  double attention_scale = 1.0;
  bool qk_norm = true, v_norm = true, pre_norm = true, post_norm = true;
  std::vector<double> layer_scalar;  // one per layer
  AttentionKind attention = AttentionKind::kMaterialised;
  int64_t pad_token_id = 0;         // -1: none
  bool pad_lookup_gradient = true;  // false: the lookup gradient of the pad row is dropped

  // What surgery may change in the midst of a run: the tensors stay as they are.
  bool bypass_qk_norm = false, bypass_pre_norm = false, bypass_post_norm = false;
  double qk_norm_gain = 1.0;   // factor on the outputs of q_norm and k_norm
  QkNormGradient qk_norm_gradient = QkNormGradient::kAllShards;
  bool ignore_window = false;  // sliding layers see all keys before, as full ones
  double z_loss = 0;           // factor on the square of logsumexp, in the objective

  bool AppliesQkNorm() const { return qk_norm && !bypass_qk_norm; }
  bool AppliesPreNorm() const { return pre_norm && !bypass_pre_norm; }
  bool AppliesPostNorm() const { return post_norm && !bypass_post_norm; }

  bool IsFull(int64_t layer) const { return layer_types[layer] == LayerKind::kFull; }
  int64_t HeadDim(int64_t layer) const { return IsFull(layer) ? global_head_dim : head_dim; }
  int64_t KvHeads(int64_t layer) const {  // as transformers: the global count goes with k = v
    return IsFull(layer) && attention_k_eq_v ? global_kv_heads : kv_heads;
  }
  bool HasValueProjection(int64_t layer) const { return !(IsFull(layer) && attention_k_eq_v); }
};

// Layer l is full iff (l + 1) % full_every == 0 (0: none), and the last one where `last_full`.
std::vector<LayerKind> LayerPattern(int64_t layers, int64_t full_every, bool last_full);

struct InitRecipe {
  InitScheme scheme = InitScheme::kHf;
  double std = 0.02;
  double embedding_std = 0.02;
  bool zero_pad_row = false;
  uint64_t seed = 1234;
};

struct DataRecipe {
  std::string path;              // prefix of .bin and .idx
  std::string identity;          // digest that the dataset has to have; "": any
  std::string split = "99,1,0";  // train, validation, test
  int64_t sequence_length = 0;
  uint32_t seed = 1234;
  int64_t micro_batch_size = 1;    // sequences
  int64_t micro_batches = 1;       // per step; a step is micro_batch_size * micro_batches sequences
  int64_t evaluation_samples = 0;  // of the validation split, scored at every update; 0: none

  int64_t SamplesPerStep() const { return micro_batch_size * micro_batches; }
};

// Tensors whose parameters stay as they are.
struct FreezeRule {
  std::string only;           // glob over their names
  bool counted = true;        // in the gradient norm
  bool moments_move = false;  // m, v and t go on as if they were updated

  bool operator==(const FreezeRule&) const = default;
};

struct OptimizerRecipe {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;
  DecayOn decay_on = DecayOn::kAll;
  std::string decay_only = "*";  // glob over the names of tensors that decay
  double clip = 1.0;  // largest norm; 0: none
  ClipScope clip_scope = ClipScope::kGlobal;
  ClipRule clip_rule = ClipRule::kFixed;
  double clip_factor = 1.05;  // kEma: the threshold is this times the mean of past norms
  double clip_z = 2.5;        // kZScore: standard deviations above that mean
  double clip_decay = 0.98;   // of the means
  int64_t clip_warmup = 0;    // updates of the rule during which clip_warmup_norm is the threshold
  double clip_warmup_norm = 0;
  double update_clip = 0;  // largest RMS of g / sqrt(v) of a tensor; 0: none
  BiasCorrection bias_correction = BiasCorrection::kBoth;
  std::vector<FreezeRule> freeze;
  LossDivision loss_division = LossDivision::kStepTokens;
  NonFinitePolicy non_finite = NonFinitePolicy::kHalt;
};

// lr(k): warm-up from `initial` to `peak` over warmup_steps, then `shape` to `minimum` at
// total_steps, constant afterwards (gemma4.md section 6).
struct ScheduleRecipe {
  LrShape shape = LrShape::kCosine;
  double initial = 0.0, peak = 3e-4, minimum = 3e-5;
  int64_t warmup_steps = 40, total_steps = 100;
  int64_t hold = 0;  // updates after this one apply its learning rate; 0: off
  LrIndexing indexing = LrIndexing::kStepMinusOne;
};

// Clauses 7 and 8. Powers of two.
struct TopologyRecipe {
  int64_t virtual_shards = 1;  // V
  int64_t lanes = 1;           // G
};

// A ring of the last states, which stays when a trigger fires, with what follows. A file `fire` in the
// run directory, SIGUSR1 and values that are not finite always are triggers.
struct FlightRecipe {
  int64_t steps = 0;         // positions in the ring; 0: no flight recorder
  int64_t bytes = 0;         // of the ring's files; 0: no bound
  int64_t after = 16;        // positions after a firing that stay too
  int64_t firings_max = 16;  // then the ring goes on, but nothing more stays
  double loss_mads = 6;      // loss > running minimum + max(this * MAD, 0.5 nat); 0: off
  double norm_collapse = 30;  // |g| falls by this factor within norm_steps updates; 0: off
  int64_t norm_steps = 4;
  double update_rms = 0;  // RMS of Adam's update above this; 0: off
};

// What is kept (DESIGN.md, "Policies"); the parts combine. Steps are positions; a window keeps
// [first, last].
struct StoreRecipe {
  int64_t window_first = 0, window_last = -1;  // empty by default
  int64_t every = 0;                           // 0: off
  int64_t keep_last = 0;                       // 0: off
  int64_t keyframe_every = 16;
  FlightRecipe flight;

  // Whether every position is recorded, and older ones are removed as the run goes on.
  bool HasRing() const { return keep_last > 0 || flight.steps > 0; }
};

struct ExecutionRecipe {
  bool recompute_activations = false;
};

// NUMERICS.md, "Levels": whose arithmetic forward and backward pass are.
enum class NumericsLevel { kPortable, kNative };

struct NumericsRecipe {
  NumericsLevel level = NumericsLevel::kPortable;
  int64_t native_threads = 1;  // of each rank's library calls; bits of level native depend on it
};

struct Recipe {
  std::string name;
  int64_t steps = 0;
  ModelRecipe model;
  InitRecipe init;
  DataRecipe data;
  OptimizerRecipe optimizer;
  ScheduleRecipe schedule;
  TopologyRecipe topology;
  PrecisionPolicy precision;
  StoreRecipe store;
  ExecutionRecipe execution;
  NumericsRecipe numerics;
};

}  // namespace retrace

#endif  // RETRACE_CORE_RECIPE_H_
