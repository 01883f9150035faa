// clip: what is clipped, at which threshold, and by which rule the threshold follows the run.
#include <fmt/format.h>

#include "surgery/registry.h"

namespace retrace {
namespace {

constexpr double kMost = 1e30;

bool Given(const Arguments& arguments, const char* name) {
  return arguments.at(name) != "recipe";
}

// A threshold: none, or a norm above 0.
Status SetNorm(const Arguments& arguments, const char* name, double* norm) {
  if (!Given(arguments, name)) return {};
  *norm = 0;
  if (arguments.at(name) == "none") return {};
  const Result<double> value = NumberArgumentIn(arguments, name, 0, kMost);
  if (!value.ok() || *value == 0) {
    return UsageError(std::string(name) + ": expected none or a norm above 0 and at most 1e+30, got '" +
                      arguments.at(name) + "'");
  }
  *norm = *value;
  return {};
}

Status SetNumber(const Arguments& arguments, const char* name, double high, double* value) {
  if (!Given(arguments, name)) return {};
  RT_ASSIGN_OR_RETURN(*value, NumberArgumentIn(arguments, name, 0, high));
  return {};
}

Status SetScopeAndRule(const Arguments& arguments, OptimizerRecipe* optimizer) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "scope",
                                    {"recipe", "global", "layer", "tensor", "embedding-rows"}));
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "rule", {"recipe", "fixed", "ema", "z-score"}));
  const std::string &scope = arguments.at("scope"), &rule = arguments.at("rule");
  if (scope == "global") optimizer->clip_scope = ClipScope::kGlobal;
  if (scope == "layer") optimizer->clip_scope = ClipScope::kLayer;
  if (scope == "tensor") optimizer->clip_scope = ClipScope::kTensor;
  if (scope == "embedding-rows") optimizer->clip_scope = ClipScope::kEmbeddingRows;
  // A threshold that nothing would read is not what is meant.
  if (rule == "fixed" || (rule == "recipe" && Given(arguments, "norm"))) {
    optimizer->clip_rule = ClipRule::kFixed;
  }
  if (rule == "ema") optimizer->clip_rule = ClipRule::kEma;
  if (rule == "z-score") optimizer->clip_rule = ClipRule::kZScore;
  return {};
}

Status Set(const Arguments& arguments, Recipe* recipe) {
  bool any = false;
  for (const auto& [name, value] : arguments) any = any || value != "recipe";
  if (!any) return UsageError("expected a norm, none, or another of its parameters");
  OptimizerRecipe& optimizer = recipe->optimizer;
  RT_RETURN_IF_ERROR(SetNorm(arguments, "norm", &optimizer.clip));
  RT_RETURN_IF_ERROR(SetScopeAndRule(arguments, &optimizer));
  RT_RETURN_IF_ERROR(SetNumber(arguments, "factor", kMost, &optimizer.clip_factor));
  RT_RETURN_IF_ERROR(SetNumber(arguments, "z", kMost, &optimizer.clip_z));
  RT_RETURN_IF_ERROR(SetNumber(arguments, "decay", 1, &optimizer.clip_decay));
  if (optimizer.clip_decay == 1) return UsageError("decay: expected a number below 1");
  RT_RETURN_IF_ERROR(SetNorm(arguments, "warmup_norm", &optimizer.clip_warmup_norm));
  if (Given(arguments, "warmup")) {
    RT_ASSIGN_OR_RETURN(const uint64_t updates, WholeArgument(arguments, "warmup"));
    optimizer.clip_warmup = static_cast<int64_t>(updates);
  } else if (Given(arguments, "norm")) {
    optimizer.clip_warmup = 0;
  }
  return {};
}

// The recipe in force may have the rule that reads a parameter, so this is not known from the text.
Status CheckRead(const Arguments& arguments, const OptimizerRecipe& optimizer) {
  const bool ema = optimizer.clip_rule == ClipRule::kEma;
  const bool z_score = optimizer.clip_rule == ClipRule::kZScore;
  const struct {
    const char *name, *reader;
    bool read;
  } parameters[] = {{"norm", "rule=fixed", !ema && !z_score},
                    {"factor", "rule=ema", ema},
                    {"z", "rule=z-score", z_score},
                    {"decay", "rule=ema or rule=z-score", ema || z_score},
                    {"warmup_norm", "a warmup", optimizer.clip_warmup > 0}};
  for (const auto& parameter : parameters) {
    if (!Given(arguments, parameter.name) || parameter.read) continue;
    return UsageError(fmt::format("{}: it is read with {} alone, so it would change nothing",
                                  parameter.name, parameter.reader));
  }
  return {};
}

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(Set(arguments, recipe));
  return CheckRead(arguments, recipe->optimizer);
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Set(arguments, &recipe);
}

}  // namespace

const InterventionKind kClip = {
    .name = "clip",
    .summary =
        "Clip the gradient at another threshold or not at all, by other norms, or by another rule",
    .touches = "recipe: optimizer.clip, optimizer.clip_...",
    .formula = "g = g * min(1, norm / (|g| + 1e-6))",
    .example = "clip:none",
    .reference =
        "Pascanu et al. 2013, arXiv 1211.5063 (norm); Wang et al. 2025, arXiv 2502.11034 (AdaGC: "
        "ema); "
        "Kumar et al. 2025, arXiv 2504.02507 (ZClip: z-score)",
    .parameters =
        {{"norm",
          "none, or the largest norm that is not scaled down, which implies rule=fixed; or recipe",
          "recipe"},
         {"scope", "whose norm: global, layer, tensor, embedding-rows, or recipe", "recipe"},
         {"rule", "of the threshold: fixed, ema, z-score, or recipe", "recipe"},
         {"factor", "of ema: times the mean of past norms, or recipe", "recipe"},
         {"z", "of z-score: standard deviations above that mean, or recipe", "recipe"},
         {"decay", "of that mean, 0 .. below 1, or recipe", "recipe"},
         {"warmup",
          "updates, from the rule's first, at which warmup_norm is the threshold, or recipe",
          "recipe"},
         {"warmup_norm", "none, a norm, or recipe", "recipe"}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
