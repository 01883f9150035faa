// PrecisionPolicy: where the step rounds, and to what (clause 4 of NUMERICS.md). Part of the recipe.
// A point names a tensor of the step by the op that makes it; `forward` is the format of the tensor,
// `gradient` that of the loss's gradient with respect to it. Values rounded to BF16 are kept as FP32
// (or FP64) numbers that BF16 can represent, so the format of a point never changes a shape.
#ifndef RETRACE_CORE_PRECISION_H_
#define RETRACE_CORE_PRECISION_H_

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.h"

namespace retrace {

enum class Format : unsigned char { kBf16, kFp32, kFp64 };

const char* FormatName(Format format);  // "bf16", "fp32", "fp64"

enum class Point : int {
  kWeights,            // the compute copy of every parameter; gradient: the finished dW
  kEmbedding,          // scaled looked-up rows
  kInputNorm,          // input_layernorm
  kQkv,                // q, k and v projections
  kQkNorm,             // q_norm and k_norm
  kVNorm,              // weightless value norm
  kRope,               // rotated q and k (cos, sin, both products and their sum)
  kScores,             // q k^T * scale
  kSoftmax,            // attention probabilities
  kAttention,          // probabilities times values
  kOProj,              // attention output projection, after the tree over shards
  kPostAttentionNorm,  // post_attention_layernorm
  kResidual,           // both residual additions
  kPreMlpNorm,         // pre_feedforward_layernorm
  kGateUp,             // gate and up projections
  kGelu,               // gelu(gate)
  kGateTimesUp,        // gelu(gate) * up
  kDown,               // down projection, after the tree over shards
  kPostMlpNorm,        // post_feedforward_layernorm
  kLayerScalar,        // residual stream times layer_scalar
  kFinalNorm,          // norm
  kLogits,             // head product
  kSoftcap,            // z/c, tanh, times c
  kCrossEntropy,       // per-token loss; gradient: unused
};
inline constexpr int kNumPoints = static_cast<int>(Point::kCrossEntropy) + 1;

const char* PointName(Point point);     // "weights", "embedding", "input_norm", ...
const char* PointMeaning(Point point);  // one line for docs

struct PrecisionPolicy {
  std::array<Format, kNumPoints> forward;
  std::array<Format, kNumPoints> gradient;
  Format partials;  // shard partials before the tree of clause 7: kFp32, or kBf16 as Megatron

  bool operator==(const PrecisionPolicy&) const = default;
  Format Forward(Point point) const { return forward[static_cast<int>(point)]; }
  Format Gradient(Point point) const { return gradient[static_cast<int>(point)]; }
  bool AnyFp64() const;
};

// Presets: what each point gets, forward and gradient alike.
//   fp32, fp64           every point, and the partials.
//   bf16                 every point BF16, as the public implementation rounds in eager mode; the
//                        cross entropy is FP32. Partials FP32.
//   bf16-sensitive-fp32  bf16 with the operations that frameworks keep in FP32 for stability in FP32:
//                        every norm (hidden, q, k, v, final), RoPE, scores, softmax, the residual
//                        stream (so also layer_scalar, which multiplies it), logits, softcap, cross
//                        entropy. What remains BF16: the weights' compute copy, the embedding, and
//                        the outputs of the projections, of attention and inside the MLP.
std::vector<std::string> PrecisionPresets();  // "bf16", "bf16-sensitive-fp32", "fp32", "fp64"

// Errors: kUsage where there is no such preset (names the nearest).
Result<PrecisionPolicy> PrecisionPreset(std::string_view name);

// Sets one point: key is "NAME", "NAME.grad" or "partials". There is no "cross_entropy.grad": the
// loss's gradient with respect to itself is 1.
// Errors: kUsage for an unknown key or format (names the nearest).
Status SetPrecision(std::string_view key, std::string_view format, PrecisionPolicy* policy);

// All points as "key = format" in order; what SetPrecision takes.
std::vector<std::pair<std::string, std::string>> DescribePrecision(const PrecisionPolicy& policy);

// FP64 is all or nothing in this version: a policy that mixes it with other formats is refused.
// Errors: kUsage, naming one point of each kind.
Status CheckPrecision(const PrecisionPolicy& policy);

}  // namespace retrace

#endif  // RETRACE_CORE_PRECISION_H_
