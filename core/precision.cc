#include "core/precision.h"

#include "core/check.h"
#include "core/nearest_name.h"

namespace retrace {
namespace {

struct PointRow {
  Point point;
  const char* name;
  const char* meaning;
};

constexpr PointRow kPoints[kNumPoints] = {
    {Point::kWeights, "weights", "compute copy of every parameter; gradient: the finished dW"},
    {Point::kEmbedding, "embedding", "scaled looked-up rows"},
    {Point::kInputNorm, "input_norm", "input_layernorm"},
    {Point::kQkv, "qkv", "q, k and v projections"},
    {Point::kQkNorm, "qk_norm", "q_norm and k_norm"},
    {Point::kVNorm, "v_norm", "weightless value norm"},
    {Point::kRope, "rope", "rotated q and k: cos, sin, both products and their sum"},
    {Point::kScores, "scores", "q k^T times the attention scale"},
    {Point::kSoftmax, "softmax", "attention probabilities"},
    {Point::kAttention, "attention", "probabilities times values"},
    {Point::kOProj, "o_proj", "attention output projection, after the tree over shards"},
    {Point::kPostAttentionNorm, "post_attention_norm", "post_attention_layernorm"},
    {Point::kResidual, "residual", "both residual additions"},
    {Point::kPreMlpNorm, "pre_mlp_norm", "pre_feedforward_layernorm"},
    {Point::kGateUp, "gate_up", "gate and up projections"},
    {Point::kGelu, "gelu", "gelu(gate)"},
    {Point::kGateTimesUp, "gate_times_up", "gelu(gate) times up"},
    {Point::kDown, "down", "down projection, after the tree over shards"},
    {Point::kPostMlpNorm, "post_mlp_norm", "post_feedforward_layernorm"},
    {Point::kLayerScalar, "layer_scalar", "residual stream times layer_scalar"},
    {Point::kFinalNorm, "final_norm", "the norm before the head"},
    {Point::kLogits, "logits", "head product"},
    {Point::kSoftcap, "softcap", "z/c, tanh, times c"},
    {Point::kCrossEntropy, "cross_entropy", "per-token loss"},
};

constexpr bool RowsAreInOrder() {
  for (int i = 0; i < kNumPoints; ++i) {
    if (static_cast<int>(kPoints[i].point) != i) return false;
  }
  return true;
}
static_assert(RowsAreInOrder());

constexpr Format kFormats[] = {Format::kBf16, Format::kFp32, Format::kFp64};
constexpr std::string_view kGradSuffix = ".grad";
constexpr std::string_view kPartials = "partials";

// Kept in FP32 by the preset bf16-sensitive-fp32.
constexpr Point kSensitive[] = {
    Point::kInputNorm,
    Point::kQkNorm,
    Point::kVNorm,
    Point::kRope,
    Point::kScores,
    Point::kSoftmax,
    Point::kPostAttentionNorm,
    Point::kResidual,
    Point::kPreMlpNorm,
    Point::kPostMlpNorm,
    Point::kLayerScalar,
    Point::kFinalNorm,
    Point::kLogits,
    Point::kSoftcap,
    Point::kCrossEntropy,
};

PrecisionPolicy Uniform(Format format) {
  PrecisionPolicy policy;
  policy.forward.fill(format);
  policy.gradient.fill(format);
  policy.partials = format == Format::kFp64 ? Format::kFp64 : Format::kFp32;
  return policy;
}

void SetBoth(Point point, Format format, PrecisionPolicy* policy) {
  policy->forward[static_cast<int>(point)] = format;
  policy->gradient[static_cast<int>(point)] = format;
}

std::string Quoted(std::string_view word) {
  return "\"" + std::string(word.substr(0, 60)) + (word.size() > 60 ? "..." : "") + "\"";
}

// The format that `key` names, or nullptr.
Format* FindPoint(std::string_view key, PrecisionPolicy* policy) {
  if (key == kPartials) return &policy->partials;
  const bool grad = key.ends_with(kGradSuffix);
  if (grad) key.remove_suffix(kGradSuffix.size());
  for (const PointRow& row : kPoints) {
    if (key != row.name) continue;
    if (grad && row.point == Point::kCrossEntropy) return nullptr;
    const int i = static_cast<int>(row.point);
    return grad ? &policy->gradient[i] : &policy->forward[i];
  }
  return nullptr;
}

}  // namespace

const char* FormatName(Format format) {
  switch (format) {
    case Format::kBf16:
      return "bf16";
    case Format::kFp32:
      return "fp32";
    case Format::kFp64:
      return "fp64";
  }
  RT_CHECK(!"a format");
  return "";
}

const char* PointName(Point point) { return kPoints[static_cast<int>(point)].name; }
const char* PointMeaning(Point point) { return kPoints[static_cast<int>(point)].meaning; }

bool PrecisionPolicy::AnyFp64() const {
  for (const auto& [key, format] : DescribePrecision(*this)) {
    if (format == FormatName(Format::kFp64)) return true;
  }
  return false;
}

std::vector<std::string> PrecisionPresets() {
  return {"bf16", "bf16-sensitive-fp32", "fp32", "fp64"};
}

Result<PrecisionPolicy> PrecisionPreset(std::string_view name) {
  if (name == "fp32") return Uniform(Format::kFp32);
  if (name == "fp64") return Uniform(Format::kFp64);
  PrecisionPolicy policy = Uniform(Format::kBf16);
  SetBoth(Point::kCrossEntropy, Format::kFp32, &policy);
  if (name == "bf16") return policy;
  if (name == "bf16-sensitive-fp32") {
    for (Point point : kSensitive) SetBoth(point, Format::kFp32, &policy);
    return policy;
  }
  return UsageError("precision preset: expected bf16, bf16-sensitive-fp32, fp32 or fp64, got " +
                    Quoted(name) + "; the nearest is " + NearestName(name, PrecisionPresets()));
}

Status SetPrecision(std::string_view key, std::string_view format, PrecisionPolicy* policy) {
  Format* const target = FindPoint(key, policy);
  if (target == nullptr) {
    std::vector<std::string> names;
    for (const auto& [name, unused] : DescribePrecision(*policy)) names.push_back(name);
    return UsageError("precision: no rounding point " + Quoted(key) + "; the nearest is " +
                      NearestName(key, names));
  }
  for (Format candidate : kFormats) {
    if (format != FormatName(candidate)) continue;
    *target = candidate;
    // Unused, but a policy is equal to another where its description is.
    if (key == PointName(Point::kCrossEntropy)) SetBoth(Point::kCrossEntropy, candidate, policy);
    return {};
  }
  return UsageError("precision." + std::string(key) + ": expected bf16, fp32 or fp64, got " +
                    Quoted(format) + "; the nearest is " +
                    NearestName(format, {"bf16", "fp32", "fp64"}));
}

std::vector<std::pair<std::string, std::string>> DescribePrecision(const PrecisionPolicy& policy) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const PointRow& row : kPoints) {
    rows.emplace_back(row.name, FormatName(policy.Forward(row.point)));
    if (row.point == Point::kCrossEntropy) continue;
    rows.emplace_back(std::string(row.name) + std::string(kGradSuffix),
                      FormatName(policy.Gradient(row.point)));
  }
  rows.emplace_back(kPartials, FormatName(policy.partials));
  return rows;
}

Status CheckPrecision(const PrecisionPolicy& policy) {
  std::string fp64, other;
  for (const auto& [key, format] : DescribePrecision(policy)) {
    std::string& example = format == FormatName(Format::kFp64) ? fp64 : other;
    if (example.empty()) example = "precision." + key + " = " + format;
  }
  if (fp64.empty() || other.empty()) return {};
  return UsageError("precision: fp64 is all or nothing, got " + fp64 + " and " + other +
                    "; use precision.preset = \"fp64\" or no fp64 at all");
}

}  // namespace retrace
