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

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace recipe check mine.toml --set optimizer.clip=0
  retrace recipe print examples/demo.toml          # every key, presets resolved
  retrace recipe keys store                        # the keys of [store])";

struct RecipeFlags {
  std::string file, keys;
  std::vector<std::string> overrides;
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
  CLI::App* recipe = app.add_subcommand("recipe", "Check and print recipes");
  recipe->require_subcommand(1);
  recipe->footer(kExamples);
  auto flags = std::make_shared<RecipeFlags>();
  AddPart(*recipe, "check", "Say whether a recipe is complete and possible", flags)
      ->callback([flags] { RunCheck(*flags); });
  AddPart(*recipe, "print", "Print the resolved recipe, every key of it", flags)->callback([flags] {
    RunPrint(*flags);
  });
  CLI::App* keys = recipe->add_subcommand("keys", "List the keys that a recipe may have");
  keys->add_option("key", flags->keys, "Only this key or section");
  AddOutputFlags(keys, &flags->output, true);
  keys->callback([flags] { RunKeys(*flags); });
}

}  // namespace retrace
