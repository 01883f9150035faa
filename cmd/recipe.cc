#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/text_table.h"
#include "core/nearest_name.h"
#include "core/recipe_toml.h"
#include "replay/recipe_plan.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace recipe check mine.toml --set optimizer.clip=0
  retrace recipe print examples/demo.toml          # every key, presets resolved
  retrace recipe plan examples/gemma4_31b.toml --tp 4
  retrace recipe keys store                        # the keys of [store])";

struct RecipeFlags {
  std::string file, keys;
  std::vector<std::string> overrides;
  int tp = 1, dp = 1;
  OutputFlags output;

  Recipe Load() const { return OrFail(LoadRecipe(file, overrides)); }
};

void PrintJson(const Json& json) {
  PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

void RunCheck(const RecipeFlags& flags) {
  const Recipe recipe = flags.Load();
  const std::string digest = RecipeDigest(recipe).Hex();
  if (flags.output.json) {
    PrintJson({{"recipe", flags.file}, {"name", recipe.name}, {"digest", digest}});
  } else {
    fmt::print("{}: a recipe, '{}', {} updates, digest {}\n", flags.file, recipe.name, recipe.steps,
               digest);
  }
}

void RunPrint(const RecipeFlags& flags) {
  const Recipe recipe = flags.Load();
  PrintReport(flags.output.json ? RecipeJson(recipe) + "\n" : PrintRecipe(recipe));
}

Json PlanJson(const RecipeFlags& flags, const Recipe& recipe, const RecipePlan& plan) {
  Json ranks = Json::array();
  for (const RankPlan& rank : plan.ranks) {
    ranks.push_back({{"tp_rank", rank.tp_rank},
                     {"parameters", rank.parameters},
                     {"replicas", rank.replicas},
                     {"state_bytes", rank.state_bytes},
                     {"gradient_bytes", rank.gradient_bytes},
                     {"weight_copy_bytes", rank.weight_copy_bytes},
                     {"activation_bytes", rank.activation_bytes},
                     {"staging_bytes", rank.staging_bytes},
                     {"bytes", rank.bytes()}});
  }
  return {{"recipe", flags.file},
          {"name", recipe.name},
          {"parameters", plan.parameters},
          {"tensors", plan.tensors},
          {"tokens_per_update", plan.tokens},
          {"flops_per_update", plan.flops},
          {"tp", flags.tp},
          {"dp", flags.dp},
          {"ranks", ranks},
          {"keyframe_bytes", plan.keyframe_bytes},
          {"journal_bytes_estimate", plan.journal_bytes},
          {"window_keyframes", plan.window_keyframes},
          {"window_journals", plan.window_journals},
          {"every_keyframes", plan.every_keyframes}};
}

void PrintRanks(const RecipeFlags& flags, const RecipePlan& plan) {
  fmt::print("\nmemory of each rank, tp {} x dp {} (before anything small)\n", flags.tp, flags.dp);
  fmt::print("{:>5} {:>16} {:>10} {:>10} {:>10} {:>11} {:>10} {:>10}\n", "rank", "parameters",
             "state", "gradients", "weights", "activations", "staging", "in all");
  for (const RankPlan& rank : plan.ranks) {
    fmt::print("{:>5} {:>16} {:>10} {:>10} {:>10} {:>11} {:>10} {:>10}\n", rank.tp_rank,
               Grouped(rank.parameters), ByteText(rank.state_bytes), ByteText(rank.gradient_bytes),
               ByteText(rank.weight_copy_bytes), ByteText(rank.activation_bytes),
               ByteText(rank.staging_bytes), ByteText(rank.bytes()));
  }
  fmt::print("weights: copies in the compute format; staging: what the recorder may hold\n");
}

void PrintStorage(const Recipe& recipe, const RecipePlan& plan) {
  fmt::print("\nstorage\n");
  fmt::print("  a keyframe   {} (12 bytes a parameter; compression takes a little off)\n",
             ByteText(plan.keyframe_bytes));
  fmt::print("  a journal    {} (estimate: {} bytes a parameter)\n", ByteText(plan.journal_bytes),
             kJournalBytesPerParameter);
  const double bytes =
      static_cast<double>(plan.window_keyframes + plan.every_keyframes + 2) *
          static_cast<double>(plan.keyframe_bytes) +
      static_cast<double>(plan.window_journals) * static_cast<double>(plan.journal_bytes);
  fmt::print("  the run      at most {} (estimate): the first and the last state", ByteText(bytes));
  if (plan.window_keyframes > 0) {
    fmt::print(", {} keyframes and {} journals of the window {}..{}", plan.window_keyframes,
               plan.window_journals, recipe.store.window_first, recipe.store.window_last);
  }
  if (plan.every_keyframes > 0) {
    fmt::print(", {} keyframes of every {} updates", plan.every_keyframes, recipe.store.every);
  }
  fmt::print("\n");
}

void RunPlan(const RecipeFlags& flags) {
  const Recipe recipe = flags.Load();
  const RecipePlan plan = OrFail(PlanRecipe(recipe, flags.tp, flags.dp));
  if (flags.output.json) return PrintJson(PlanJson(flags, recipe, plan));
  fmt::print("{}: '{}'\n", flags.file, recipe.name);
  fmt::print("  parameters   {} in {} tensors\n", Grouped(plan.parameters), plan.tensors);
  fmt::print("  an update    {} tokens, {:.4g} TFLOP in matrix products\n", Grouped(plan.tokens),
             plan.flops / 1e12);
  PrintRanks(flags, plan);
  PrintStorage(recipe, plan);
}

// The keys of a section, the key of that name, or all.
std::vector<RecipeKey> ChosenKeys(const std::string& wanted) {
  std::vector<RecipeKey> chosen;
  std::vector<std::string> names;
  for (RecipeKey& key : RecipeKeys()) {
    names.push_back(key.name);
    if (wanted.empty() || key.name == wanted || key.name.starts_with(wanted + ".")) {
      chosen.push_back(std::move(key));
    }
  }
  if (chosen.empty()) {
    Fail(UsageError("there is no key or section '" + wanted + "'; the nearest key is '" +
                    NearestName(wanted, names) + "'"));
  }
  return chosen;
}

void RunKeys(const RecipeFlags& flags) {
  Json json = Json::array();
  for (const RecipeKey& key : ChosenKeys(flags.keys)) {
    if (flags.output.json) {
      json.push_back({{"key", key.name},
                      {"expected", key.expected},
                      {"choices", key.choices},
                      {"default", key.default_value},
                      {"required", key.required},
                      {"input_only", key.input_only},
                      {"meaning", key.doc}});
      continue;
    }
    fmt::print("{}\n    {}\n    expected: {}{}\n", Tinted(flags.output, Tint::kBold, key.name),
               key.doc, key.expected,
               key.required ? "; required" : "; default: " + key.default_value);
  }
  if (flags.output.json) PrintJson(json);
}

CLI::App* AddPart(CLI::App& recipe, const char* name, const char* summary,
                  const std::shared_ptr<RecipeFlags>& flags) {
  CLI::App* part = recipe.add_subcommand(name, summary);
  part->add_option("file", flags->file, "The recipe (TOML)")->required();
  part->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  AddOutputFlags(part, &flags->output, true);
  return part;
}

}  // namespace

void AddRecipeCommand(CLI::App& app) {
  CLI::App* recipe = app.add_subcommand("recipe", "Check, print and plan recipes");
  recipe->require_subcommand(1);
  recipe->footer(kExamples);
  auto flags = std::make_shared<RecipeFlags>();
  AddPart(*recipe, "check", "Say whether a recipe is complete and possible", flags)
      ->callback([flags] { RunCheck(*flags); });
  AddPart(*recipe, "print", "Print the resolved recipe, every key of it", flags)->callback([flags] {
    RunPrint(*flags);
  });
  CLI::App* plan = AddPart(*recipe, "plan", "Say what memory and storage a recipe asks for", flags);
  CLI::Option* tp =
      plan->add_option("--tp", flags->tp, "Tensor-parallel ranks; divides virtual_shards");
  WholeIn(tp, 1, 65536)->capture_default_str();
  CLI::Option* dp = plan->add_option("--dp", flags->dp, "Data-parallel ranks; divides lanes");
  WholeIn(dp, 1, 65536)->capture_default_str();
  plan->callback([flags] { RunPlan(*flags); });
  CLI::App* keys = recipe->add_subcommand("keys", "List the keys that a recipe may have");
  keys->add_option("key", flags->keys, "Only this key or section");
  AddOutputFlags(keys, &flags->output, true);
  keys->callback([flags] { RunKeys(*flags); });
}

}  // namespace retrace
