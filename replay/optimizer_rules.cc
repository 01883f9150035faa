#include "replay/optimizer_rules.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "core/glob.h"
#include "core/scalar_math.h"

namespace retrace {
namespace {

// Names of what a clip rule remembers.
constexpr char kUpdates[] = "clip.updates";    // one number
constexpr char kMean[] = "clip.mean";          // of the clipped norms, one per group
constexpr char kVariance[] = "clip.variance";  // of them, likewise

constexpr int kByRows = -1;

// The group of each tensor, numbered in the order of their first tensors.
std::vector<int> GroupsOf(const Recipe& recipe, const std::vector<TensorSpec>& tensors) {
  const ClipScope scope = recipe.optimizer.clip_scope;
  std::vector<int> groups;
  std::map<int64_t, int> of_layer;
  int count = 0;
  for (const TensorSpec& spec : tensors) {
    if (scope == ClipScope::kTensor || (scope == ClipScope::kLayer && spec.layer < 0)) {
      groups.push_back(count++);
    } else if (scope == ClipScope::kLayer) {
      const auto [at, added] = of_layer.emplace(spec.layer, count);
      count += added ? 1 : 0;
      groups.push_back(at->second);
    } else {
      groups.push_back(IsClippedByRows(recipe, spec) ? kByRows : 0);
    }
  }
  return groups;
}

float FactorOf(double threshold, double norm) {
  const double coefficient = threshold / (norm + 1e-6);
  return threshold > 0 && coefficient < 1.0 ? static_cast<float>(coefficient) : 1.0f;
}

// What a rule remembers, for one update of it.
class ClipMemory {
 public:
  ClipMemory(const OptimizerRecipe& optimizer, size_t groups, const RuleMemory& memory)
      : optimizer_(optimizer), mean_(groups, 0.0), variance_(groups, 0.0) {
    const auto updates = memory.find(kUpdates), mean = memory.find(kMean),
               variance = memory.find(kVariance);
    // Another rule's, or other groups': this rule begins.
    if (updates == memory.end() || updates->second.size() != 1) return;
    if (Averages() && (mean == memory.end() || mean->second.size() != groups)) return;
    if (HasVariance() && (variance == memory.end() || variance->second.size() != groups)) return;
    updates_ = updates->second[0];
    if (Averages()) mean_ = mean->second;
    if (HasVariance()) variance_ = variance->second;
  }

  // The threshold for a norm; 0: it is not clipped.
  double Threshold(size_t group, double norm) const {
    if (updates_ < static_cast<double>(optimizer_.clip_warmup)) return optimizer_.clip_warmup_norm;
    if (!Averages()) return optimizer_.clip;
    if (updates_ == 0) return 0;
    if (optimizer_.clip_rule == ClipRule::kEma) return optimizer_.clip_factor * mean_[group];
    const double deviation = math::Sqrt(variance_[group]);
    const double z = (norm - mean_[group]) / deviation;
    if (!(deviation > 0) || !(z > optimizer_.clip_z)) return 0;
    return mean_[group] + (optimizer_.clip_z * optimizer_.clip_z / z) * deviation;
  }

  // `norm` as clipped. One that is not finite teaches nothing.
  void Learn(size_t group, double norm) {
    if (!std::isfinite(norm)) return;
    if (updates_ == 0) {
      mean_[group] = norm;
      return;
    }
    const double keep = optimizer_.clip_decay, take = 1.0 - keep;
    mean_[group] = keep * mean_[group] + take * norm;
    const double apart = norm - mean_[group];
    variance_[group] = keep * variance_[group] + take * (apart * apart);
  }

  RuleMemory Finish() const {
    RuleMemory memory;
    if (!Averages() && optimizer_.clip_warmup == 0) return memory;
    memory[kUpdates] = {updates_ + 1};
    if (Averages()) memory[kMean] = mean_;
    if (HasVariance()) memory[kVariance] = variance_;
    return memory;
  }

 private:
  bool Averages() const { return optimizer_.clip_rule != ClipRule::kFixed; }
  bool HasVariance() const { return optimizer_.clip_rule == ClipRule::kZScore; }

  const OptimizerRecipe& optimizer_;
  double updates_ = 0;  // of this rule so far
  std::vector<double> mean_, variance_;
};

// The last two arguments: row factors of one tensor.
std::vector<float> RowFactors(const std::vector<double>& squares, double threshold) {
  std::vector<float> factors;
  for (double square : squares) factors.push_back(FactorOf(threshold, math::Sqrt(square)));
  return factors;
}

}  // namespace

bool IsClippedByRows(const Recipe& recipe, const TensorSpec& spec) {
  return recipe.optimizer.clip_scope == ClipScope::kEmbeddingRows && spec.layer < 0 &&
         !spec.vector;
}

const FreezeRule* FreezeRuleOf(const OptimizerRecipe& optimizer, const TensorSpec& spec) {
  const FreezeRule* found = nullptr;
  for (const FreezeRule& rule : optimizer.freeze) {
    if (GlobMatches(rule.only, spec.name)) found = &rule;
  }
  return found;
}

Clips ClipGradient(const Recipe& recipe, const std::vector<TensorSpec>& tensors,
                   const GradientSquares& squares, const RuleMemory& memory) {
  const std::vector<int> groups = GroupsOf(recipe, tensors);
  const size_t count = 1 + std::max(0, *std::max_element(groups.begin(), groups.end()));
  std::vector<double> sums(count, 0.0);
  double all = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const FreezeRule* frozen = FreezeRuleOf(recipe.optimizer, tensors[t]);
    if (frozen != nullptr && !frozen->counted) continue;
    all = all + squares.tensors[t];
    if (groups[t] != kByRows) sums[groups[t]] = sums[groups[t]] + squares.tensors[t];
  }
  ClipMemory rule(recipe.optimizer, count, memory);
  std::vector<float> factors;
  for (size_t g = 0; g < count; ++g) {
    const double norm = math::Sqrt(sums[g]);
    factors.push_back(FactorOf(rule.Threshold(g, norm), norm));
    rule.Learn(g, factors[g] < 1.0f ? static_cast<double>(factors[g]) * norm : norm);
  }
  Clips clips;
  clips.gradient_norm = math::Sqrt(all);
  clips.memory = rule.Finish();
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (groups[t] != kByRows) {
      clips.tensors.push_back(factors[groups[t]]);
    } else {
      clips.rows.resize(tensors.size());
      clips.rows[t] = RowFactors(squares.rows[t], rule.Threshold(0, 0));
      clips.tensors.push_back(*std::min_element(clips.rows[t].begin(), clips.rows[t].end()));
    }
    clips.smallest = std::min(clips.smallest, clips.tensors[t]);
  }
  return clips;
}

OptimizerBlock MakeOptimizerBlock(const Recipe& recipe, const std::vector<TensorSpec>& tensors,
                                  const Counters& counters, const Clips& clips,
                                  const UpdateScalars& scalars) {
  const OptimizerRecipe& opt = recipe.optimizer;
  const bool corrects_m =
      opt.bias_correction == BiasCorrection::kBoth || opt.bias_correction == BiasCorrection::kM;
  const bool corrects_v =
      opt.bias_correction == BiasCorrection::kBoth || opt.bias_correction == BiasCorrection::kV;
  OptimizerBlock block;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const FreezeRule* frozen = FreezeRuleOf(opt, tensors[t]);
    const bool stays = IsBypassed(recipe.model, tensors[t]) ||
                       (frozen != nullptr && !frozen->moments_move);
    OptimizerRow row;
    if (frozen != nullptr) row.action = TensorAction::kFrozen;
    if (stays || scalars.skip) row.action = TensorAction::kSkip;
    const bool counts = scalars.skip ? scalars.skipped_t_moves && !stays : !stays;
    row.t = counters.adam_t[t] + (counts ? 1 : 0);
    const bool decays = (opt.decay_on == DecayOn::kAll || !tensors[t].vector) &&
                        GlobMatches(opt.decay_only, tensors[t].name);
    row.lr = static_cast<float>(scalars.lr);
    row.beta1 = static_cast<float>(opt.beta1);
    row.one_minus_beta1 = static_cast<float>(1.0 - opt.beta1);
    row.beta2 = static_cast<float>(opt.beta2);
    row.one_minus_beta2 = static_cast<float>(1.0 - opt.beta2);
    if (corrects_m) {
      row.bias_correction1 = static_cast<float>(1.0 - math::PowInt(opt.beta1, row.t));
    }
    if (corrects_v) {
      row.bias_correction2 = static_cast<float>(1.0 - math::PowInt(opt.beta2, row.t));
    }
    row.eps = static_cast<float>(opt.eps);
    row.weight_decay = static_cast<float>(decays ? opt.weight_decay : 0.0);
    row.clip = clips.tensors[t];
    block.rows.push_back(row);
  }
  block.row_clips = clips.rows;
  return block;
}

}  // namespace retrace
