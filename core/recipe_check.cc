#include "core/recipe_check.h"

#include <charconv>
#include <cmath>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "core/glob.h"
#include "core/layout.h"
#include "core/nearest_name.h"
#include "core/recipe_keys.h"

namespace retrace {
namespace {

using Problem = std::optional<RecipeProblem>;

std::string Number(int64_t value) { return std::to_string(value); }

Problem CheckRanges(const Recipe& recipe) {
  for (const Key& key : AllKeys()) {
    if (key.input_only) continue;
    const Result<KeyValue> checked = CheckValue(key, key.get(recipe));
    if (!checked.ok()) return RecipeProblem{key.name, checked.status().message()};
  }
  return {};
}

Problem CheckDivides(const char* key, int64_t divisor, const char* what, int64_t value) {
  if (value % divisor == 0) return {};
  return RecipeProblem{key, "expected a divisor of " + std::string(what) + " = " + Number(value) +
                                ", got " + Number(divisor)};
}

Problem CheckPerLayer(const char* key, size_t entries, int64_t layers) {
  if (static_cast<int64_t>(entries) == layers) return {};
  return RecipeProblem{key, "expected one entry per layer, model.layers = " + Number(layers) +
                                ", got " + Number(static_cast<int64_t>(entries))};
}

Problem CheckHeads(const Recipe& recipe) {
  const ModelRecipe& model = recipe.model;
  if (model.head_dim % 2 != 0) {
    return RecipeProblem{"model.head_dim", "expected an even number (RoPE pairs elements), got " +
                                               Number(model.head_dim)};
  }
  if (model.global_head_dim % 2 != 0) {
    return RecipeProblem{
        "model.global_head_dim",
        "expected an even number (RoPE pairs elements), got " + Number(model.global_head_dim)};
  }
  Problem problem =
      CheckDivides("model.kv_heads", model.kv_heads, "model.query_heads", model.query_heads);
  if (problem) return problem;
  return CheckDivides("model.global_kv_heads", model.global_kv_heads, "model.query_heads",
                      model.query_heads);
}

Problem CheckLayerLists(const Recipe& recipe) {
  const ModelRecipe& model = recipe.model;
  Problem problem = CheckPerLayer("model.layer_types", model.layer_types.size(), model.layers);
  if (problem) return problem;
  return CheckPerLayer("model.layer_scalar", model.layer_scalar.size(), model.layers);
}

Problem CheckPad(const Recipe& recipe) {
  const ModelRecipe& model = recipe.model;
  if (model.pad_token_id >= model.vocab_size) {
    return RecipeProblem{"model.pad_token_id",
                         "expected less than model.vocab_size = " + Number(model.vocab_size) +
                             ", or -1, got " + Number(model.pad_token_id)};
  }
  if (model.pad_token_id >= 0) return {};
  const std::string none = "needs a pad token, but model.pad_token_id = -1";
  if (recipe.init.zero_pad_row) return RecipeProblem{"init.zero_pad_row", "true " + none};
  if (!model.pad_lookup_gradient) {
    return RecipeProblem{"model.pad_lookup_gradient", "false " + none};
  }
  return {};
}

// Products of sizes that the program forms later; each has to stay far from 2^63.
Problem CheckProduct(const char* key, const char* what, std::initializer_list<int64_t> factors) {
  constexpr int64_t kMax = int64_t{1} << 56;
  int64_t product = 1;
  for (int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product) || product > kMax) {
      return RecipeProblem{key,
                           std::string(what) + " exceed 2^56; make one of their factors smaller"};
    }
  }
  return {};
}

Problem CheckParameters(const Recipe& recipe) {
  const ModelRecipe& m = recipe.model;
  const int64_t heads = m.query_heads, dim = std::max(m.head_dim, m.global_head_dim);
  Problem problem = CheckProduct("model.hidden_size", "elements of the attention projections",
                                 {4, heads, dim, m.hidden_size, m.layers});
  if (problem) return problem;
  problem = CheckProduct("model.hidden_size", "elements of the MLPs",
                         {3, m.intermediate_size, m.hidden_size, m.layers});
  if (problem) return problem;
  return CheckProduct("model.vocab_size", "elements of the embedding",
                      {2, m.vocab_size, m.hidden_size});
}

Problem CheckData(const Recipe& recipe) {
  const DataRecipe& data = recipe.data;
  if (data.path.empty()) {
    return RecipeProblem{"data.path", "expected the prefix of a dataset's files, got \"\""};
  }
  if (!data.identity.empty() && !ParseDigest(data.identity).ok()) {
    return RecipeProblem{"data.identity", "expected 32 hexadecimal digits or \"\", got " +
                                              QuotedText(data.identity.substr(0, 60))};
  }
  Problem problem = CheckProduct(
      "steps", "tokens of the run",
      {recipe.steps, data.micro_batch_size, data.micro_batches, data.sequence_length + 1});
  if (problem) return problem;
  return CheckProduct("data.micro_batch_size", "logits of a micro-batch",
                      {data.micro_batch_size, data.sequence_length, recipe.model.vocab_size});
}

// "a,b,c": weights that are not negative, the first positive.
std::optional<std::vector<double>> SplitWeights(std::string_view split) {
  std::vector<double> weights;
  const char* at = split.data();
  const char* const end = at + split.size();
  for (int i = 0; i < 3; ++i) {
    double weight = 0;
    const auto [next, error] = std::from_chars(at, end, weight, std::chars_format::fixed);
    if (error != std::errc() || !std::isfinite(weight) || std::signbit(weight)) return {};
    weights.push_back(weight);
    at = next;
    if (i < 2 && (at == end || *at++ != ',')) return {};
  }
  if (at != end || weights[0] <= 0) return {};
  return weights;
}

Problem CheckSplit(const Recipe& recipe) {
  const auto weights = SplitWeights(recipe.data.split);
  if (!weights) {
    return RecipeProblem{"data.split",
                         "expected three weights \"TRAIN,VALIDATION,TEST\", none negative and the "
                         "first positive, such as \"99,1,0\", got " +
                             QuotedText(recipe.data.split.substr(0, 60))};
  }
  if (recipe.data.evaluation_samples > 0 && (*weights)[1] <= 0) {
    return RecipeProblem{"data.split",
                         "data.evaluation_samples = " + Number(recipe.data.evaluation_samples) +
                             " needs a validation part, got weight 0 in " +
                             QuotedText(recipe.data.split)};
  }
  return {};
}

Problem CheckSchedule(const Recipe& recipe) {
  const ScheduleRecipe& schedule = recipe.schedule;
  const auto real = [](double value) { return ValueText(value); };
  if (schedule.initial > schedule.peak) {
    return RecipeProblem{"schedule.initial",
                         "expected at most schedule.peak = " + real(schedule.peak) + ", got " +
                             real(schedule.initial)};
  }
  if (schedule.shape == LrShape::kConstant) return {};
  if (schedule.minimum > schedule.peak) {
    return RecipeProblem{"schedule.minimum",
                         "expected at most schedule.peak = " + real(schedule.peak) + ", got " +
                             real(schedule.minimum)};
  }
  if (schedule.warmup_steps >= schedule.total_steps) {
    return RecipeProblem{"schedule.warmup_steps", "expected less than schedule.total_steps = " +
                                                      Number(schedule.total_steps) + ", got " +
                                                      Number(schedule.warmup_steps)};
  }
  return {};
}

bool PowerOfTwo(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

Problem CheckTopology(const Recipe& recipe) {
  for (const char* name : {"topology.virtual_shards", "topology.lanes"}) {
    const int64_t value = std::get<int64_t>(FindKey(name)->get(recipe));
    if (PowerOfTwo(value)) continue;
    return RecipeProblem{name, "expected a power of two, got " + Number(value)};
  }
  Problem problem = CheckDivides("topology.lanes", recipe.topology.lanes, "data.micro_batches",
                                 recipe.data.micro_batches);
  if (problem) return problem;
  const Result<Layout> layout = Layout::Make(recipe.model, recipe.topology.virtual_shards);
  if (!layout.ok()) return RecipeProblem{"topology.virtual_shards", layout.status().message()};
  return {};
}

// A bypass of what the model does not have would do nothing.
Problem CheckBypasses(const Recipe& recipe) {
  const ModelRecipe& m = recipe.model;
  const auto needs = [](bool there, const char* key, const char* other) -> Problem {
    if (there) return {};
    return RecipeProblem{key, "needs " + std::string(other) + " = true: the model has no such norms"};
  };
  Problem problem;
  if (m.bypass_qk_norm) problem = needs(m.qk_norm, "model.bypass_qk_norm", "model.qk_norm");
  if (!problem && m.bypass_pre_norm) {
    problem = needs(m.pre_norm, "model.bypass_pre_norm", "model.pre_norm");
  }
  if (!problem && m.bypass_post_norm) {
    problem = needs(m.post_norm, "model.bypass_post_norm", "model.post_norm");
  }
  if (!problem && m.qk_norm_gain != 1) {
    problem = needs(m.qk_norm, "model.qk_norm_gain", "model.qk_norm");
  }
  return problem;
}

Problem CheckGlob(const char* key, const std::string& glob, const std::vector<TensorSpec>& tensors) {
  for (const TensorSpec& spec : tensors) {
    if (GlobMatches(glob, spec.name)) return {};
  }
  std::vector<std::string> names;
  for (const TensorSpec& spec : tensors) names.push_back(spec.name);
  return RecipeProblem{key, "no tensor matches " + QuotedText(glob.substr(0, 120)) +
                                "; the nearest is " + NearestName(glob, names)};
}

Problem CheckOptimizerRules(const Recipe& recipe) {
  const OptimizerRecipe& opt = recipe.optimizer;
  if (opt.clip_scope == ClipScope::kEmbeddingRows && opt.clip_rule != ClipRule::kFixed) {
    return RecipeProblem{"optimizer.clip_rule",
                         "expected fixed with optimizer.clip_scope = embedding-rows: the others "
                         "would remember a mean of every row"};
  }
  if (opt.freeze.empty() && opt.decay_only == "*") return {};
  const std::vector<TensorSpec> tensors = ModelTensors(recipe.model);
  for (const FreezeRule& rule : opt.freeze) {
    if (Problem problem = CheckGlob("optimizer.freeze", rule.only, tensors)) return problem;
  }
  return CheckGlob("optimizer.decay_only", opt.decay_only, tensors);
}

Problem CheckPolicy(const Recipe& recipe) {
  const Status status = CheckPrecision(recipe.precision);
  if (status.ok()) return {};
  return RecipeProblem{"precision.preset", status.message()};
}

}  // namespace

std::optional<RecipeProblem> FindProblem(const Recipe& recipe) {
  // Ranges first: the others may then divide and multiply.
  for (Problem (*check)(const Recipe&) :
       {CheckRanges, CheckHeads, CheckLayerLists, CheckPad, CheckParameters, CheckData, CheckSplit,
        CheckSchedule, CheckTopology, CheckPolicy, CheckBypasses, CheckOptimizerRules}) {
    if (Problem problem = check(recipe)) return problem;
  }
  return {};
}

Status CheckRecipe(const Recipe& recipe) {
  const Problem problem = FindProblem(recipe);
  return problem ? UsageError(problem->key + ": " + problem->message) : Status();
}

}  // namespace retrace
