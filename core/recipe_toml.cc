#include "core/recipe_toml.h"

#include <toml++/toml.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "core/nearest_name.h"
#include "core/recipe_check.h"
#include "core/recipe_keys.h"
#include "core/recipe_presets.h"
#include "core/toml_text.h"

namespace retrace {
namespace {

// A value and the place that a message about it names: FILE:LINE:COLUMN or the override.
struct Given {
  KeyValue value;
  std::string where;
};

using GivenKeys = std::map<std::string, Given, std::less<>>;

std::string Shown(std::string_view text) {
  constexpr size_t kMost = 60;
  return text.size() <= kMost ? QuotedText(text) : QuotedText(text.substr(0, kMost)) + "...";
}

std::string Place(std::string_view file, const toml::source_region& region) {
  return std::string(file) + ":" + std::to_string(region.begin.line) + ":" +
         std::to_string(region.begin.column);
}

std::vector<std::string> KeyNames() {
  std::vector<std::string> names;
  for (const Key& key : AllKeys()) names.push_back(key.name);
  return names;
}

std::vector<std::string> SectionNames() {
  std::set<std::string> names;
  for (const Key& key : AllKeys()) {
    if (!SectionOf(key.name).empty()) names.insert(SectionOf(key.name));
  }
  return {names.begin(), names.end()};
}

Status UnknownKey(const std::string& where, std::string_view name) {
  return UsageError(where + ": unknown key " + Shown(name) + "; the nearest is " +
                    NearestName(name, KeyNames()));
}

bool HasKeysBelow(std::string_view name) {
  const std::string prefix = std::string(name) + ".";
  for (const Key& key : AllKeys()) {
    if (key.name.starts_with(prefix)) return true;
  }
  return false;
}

// ---- TOML values ----

std::optional<KeyValue> FromArray(const toml::array& array) {
  std::vector<int64_t> integers;
  std::vector<double> reals;
  std::vector<std::string> texts;
  for (const toml::node& item : array) {
    if (const auto* integer = item.as_integer()) {
      integers.push_back(integer->get());
      reals.push_back(static_cast<double>(integer->get()));
    } else if (const auto* real = item.as_floating_point()) {
      reals.push_back(real->get());
    } else if (const auto* text = item.as_string()) {
      texts.push_back(text->get());
    }
  }
  if (integers.size() == array.size()) return integers;
  if (reals.size() == array.size()) return reals;
  if (texts.size() == array.size()) return texts;
  return std::nullopt;  // mixed, nested, or dates
}

std::optional<KeyValue> FromNode(const toml::node& node) {
  if (const auto* flag = node.as_boolean()) return flag->get();
  if (const auto* integer = node.as_integer()) return integer->get();
  if (const auto* real = node.as_floating_point()) return real->get();
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* array = node.as_array()) return FromArray(*array);
  return std::nullopt;  // table, date, time
}

std::string KindOf(const toml::node& node) {
  if (node.is_table()) return "a table";
  if (node.is_array()) return "a list of mixed or nested values";
  return "a date or time";
}

// Converts, checks and stores one value.
Status Give(const Key& key, const toml::node& node, const std::string& where, GivenKeys* given) {
  const std::optional<KeyValue> value = FromNode(node);
  if (!value) {
    return UsageError(where + ": " + key.name + ": expected " + ExpectedOf(key) + ", got " +
                      KindOf(node));
  }
  const Result<KeyValue> checked = CheckValue(key, *value);
  if (!checked.ok()) return checked.status().Within(key.name).Within(where);
  given->insert_or_assign(key.name, Given{*checked, where});
  return {};
}

// Every key of `table` and of the tables in it. Goes as deep as keys have dots.
Status ReadTable(const toml::table& table, const std::string& prefix, std::string_view file,
                 GivenKeys* given) {
  for (const auto& [toml_key, node] : table) {
    const std::string name = prefix + std::string(toml_key.str());
    const std::string key_place = Place(file, toml_key.source());
    const toml::table* inner = node.as_table();
    if (inner != nullptr && HasKeysBelow(name) && !(inner->empty() && FindKey(name))) {
      RT_RETURN_IF_ERROR(ReadTable(*inner, name + ".", file, given));
      continue;
    }
    const Key* const key = FindKey(name);
    if (key == nullptr && inner != nullptr && prefix.empty()) {
      return UsageError(key_place + ": unknown section " + Shown(name) + "; the nearest is " +
                        NearestName(name, SectionNames()));
    }
    if (key == nullptr) return UnknownKey(key_place, name);
    if (given->contains(name)) {
      return UsageError(key_place + ": " + name + ": given twice, first at " +
                        given->find(name)->second.where);
    }
    RT_RETURN_IF_ERROR(Give(*key, node, Place(file, node.source()), given));
  }
  return {};
}

Status ReadFileText(std::string_view toml, std::string_view file, GivenKeys* given) {
  const Status size = CheckTomlSize(toml);
  if (!size.ok()) return size.Within(std::string(file));
  try {
    return ReadTable(toml::parse(toml, file), "", file, given);
  } catch (const toml::parse_error& error) {
    return UsageError(Place(file, error.source()) +
                      ": not TOML: " + std::string(error.description()));
  } catch (const std::exception& error) {
    return UsageError(std::string(file) + ": can not be parsed: " + error.what());
  }
}

// ---- Overrides ----

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t first = text.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlanks) - first + 1);
}

Status ReadOverride(const std::string& override_text, GivenKeys* given) {
  const std::string where = "override " + Shown(override_text);
  const size_t equals = override_text.find('=');
  if (equals == std::string::npos) {
    return UsageError(where + ": expected KEY=VALUE, such as optimizer.eps=1e-5");
  }
  const std::string_view whole = override_text;
  const std::string_view name = Trimmed(whole.substr(0, equals));
  const Key* const key = FindKey(name);
  if (key == nullptr) return UnknownKey(where, name);
  std::string value(Trimmed(whole.substr(equals + 1)));
  const bool text = key->kind == KeyKind::kText || key->kind == KeyKind::kChoice;
  if (text && !value.starts_with('"') && !value.starts_with('\'')) value = QuotedText(value);
  const Status size = CheckTomlSize(value);
  if (!size.ok()) return size.Within(key->name).Within(where);
  try {
    const toml::table table = toml::parse("value = " + value + "\n");
    const toml::node* const node = table.get("value");
    if (node != nullptr && table.size() == 1) return Give(*key, *node, where, given);
  } catch (const std::exception&) {
    // Said below: what is wrong with half a line of TOML is best said as what was expected.
  }
  return UsageError(where + ": " + key->name + ": expected " + ExpectedOf(*key) + ", got " +
                    Shown(value) + ", which is not one TOML value");
}

// ---- Precedence ----

bool IsPatternKey(std::string_view name) { return name == kFullEveryKey || name == kLastFullKey; }

// Whether an override of `winner` takes the place of `name` of the file.
bool Replaces(std::string_view winner, std::string_view name) {
  if (winner == name) return true;
  if (winner == kPrecisionPresetKey) return name.starts_with("precision.");
  if (winner == "model.layer_types") return IsPatternKey(name);
  if (IsPatternKey(winner)) return name == "model.layer_types";
  if (winner != kPresetKey) return false;
  for (const PresetValue& value : PresetValues("automodel", DefaultRecipe())) {
    if (value.key == name) return true;
  }
  return false;
}

GivenKeys Merge(GivenKeys file, GivenKeys overrides) {
  for (const auto& [winner, unused] : overrides) {
    std::erase_if(file, [&](const auto& entry) { return Replaces(winner, entry.first); });
  }
  overrides.merge(file);
  return overrides;
}

Status CheckGiven(const GivenKeys& given, std::string_view file) {
  for (const Key& key : AllKeys()) {
    if (!key.required || given.contains(key.name)) continue;
    return UsageError(std::string(file) + ": " + key.name + ": missing; expected " +
                      ExpectedOf(key) + " (" + key.doc + ")");
  }
  const auto list = given.find("model.layer_types");
  for (std::string_view name : {kFullEveryKey, kLastFullKey}) {
    const auto pattern = given.find(name);
    if (list == given.end() || pattern == given.end()) continue;
    return UsageError(pattern->second.where + ": " + std::string(name) +
                      ": model.layer_types is given too, at " + list->second.where +
                      "; remove one of them");
  }
  return {};
}

// ---- Resolving ----

template <class T>
T GivenOr(const GivenKeys& given, std::string_view name, T otherwise) {
  const auto at = given.find(name);
  return at == given.end() ? otherwise : std::get<T>(at->second.value);
}

// Defaults, then the presets, then what was given.
Recipe Assign(const GivenKeys& given, const std::vector<PresetValue>& preset) {
  Recipe recipe = DefaultRecipe();
  recipe.precision =
      PrecisionPreset(GivenOr<std::string>(given, kPrecisionPresetKey, "fp32")).value();
  for (const PresetValue& value : preset) FindKey(value.key)->set(value.value, &recipe);
  for (const Key& key : AllKeys()) {  // in order: model.layers comes before what is per layer
    const auto at = given.find(key.name);
    if (!key.input_only && at != given.end()) key.set(at->second.value, &recipe);
  }
  return recipe;
}

Recipe Resolve(const GivenKeys& given) {
  Recipe recipe = Assign(given, {});
  const auto preset = GivenOr<std::string>(given, kPresetKey, "");
  if (!preset.empty()) recipe = Assign(given, PresetValues(preset, recipe));
  ModelRecipe& model = recipe.model;
  if (!given.contains("model.global_kv_heads")) model.global_kv_heads = model.kv_heads;
  if (!given.contains("model.global_head_dim")) model.global_head_dim = model.head_dim;
  if (!given.contains("model.layer_scalar")) model.layer_scalar.assign(model.layers, 1.0);
  if (!given.contains("model.layer_types")) {
    model.layer_types = LayerPattern(model.layers, GivenOr<int64_t>(given, kFullEveryKey, 6),
                                     GivenOr<bool>(given, kLastFullKey, true));
  }
  return recipe;
}

// ---- Printing ----

std::string PrintKeys(const Recipe& recipe, const std::function<bool(const Key&)>& wanted) {
  static const Recipe kDefaults = DefaultRecipe();
  std::string text, section;
  for (const Key& key : AllKeys()) {
    if (key.input_only || !wanted(key)) continue;
    if (key.quiet && ValueText(key.get(recipe)) == ValueText(key.get(kDefaults))) continue;
    const std::string its_section = SectionOf(key.name);
    if (its_section != section) {
      section = its_section;
      text += "\n[" + section + "]\n";
    }
    const std::string name = key.name.substr(section.empty() ? 0 : section.size() + 1);
    text += (name.find('.') == std::string::npos ? name : QuotedText(name)) + " = " +
            ValueText(key.get(recipe)) + "\n";
  }
  return text;
}

}  // namespace

Result<Recipe> ParseRecipe(std::string_view toml, std::string_view file_name,
                           const std::vector<std::string>& overrides) {
  GivenKeys from_file, from_overrides;
  RT_RETURN_IF_ERROR(ReadFileText(toml, file_name, &from_file));
  for (const std::string& text : overrides) {
    RT_RETURN_IF_ERROR(ReadOverride(text, &from_overrides));
  }
  const GivenKeys given = Merge(std::move(from_file), std::move(from_overrides));
  RT_RETURN_IF_ERROR(CheckGiven(given, file_name));
  Recipe recipe = Resolve(given);
  if (const auto problem = FindProblem(recipe)) {
    const auto at = given.find(problem->key);
    const std::string where = at == given.end() ? std::string(file_name) : at->second.where;
    return UsageError(where + ": " + problem->key + ": " + problem->message);
  }
  return recipe;
}

Result<Recipe> LoadRecipe(const std::string& path, const std::vector<std::string>& overrides) {
  RT_ASSIGN_OR_RETURN(const std::string text, ReadTomlFile(path, "a recipe"));
  return ParseRecipe(text, path, overrides);
}

std::string PrintRecipe(const Recipe& recipe) {
  return PrintKeys(recipe, [](const Key&) { return true; });
}

std::string RecipeJson(const Recipe& recipe) {
  using Json = nlohmann::ordered_json;
  Json json = Json::object();
  for (const Key& key : AllKeys()) {
    if (key.input_only) continue;
    std::visit([&](const auto& value) { json[key.name] = value; }, key.get(recipe));
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

Digest RecipeDigest(const Recipe& recipe) {
  return DigestOf(PrintKeys(recipe, [](const Key& key) {
    const std::string section = SectionOf(key.name);
    return section != "store" && section != "execution";
  }));
}

std::vector<RecipeDifference> DiffRecipes(const Recipe& a, const Recipe& b) {
  std::vector<RecipeDifference> differences;
  for (const Key& key : AllKeys()) {
    if (key.input_only) continue;
    std::string value_a = ValueText(key.get(a)), value_b = ValueText(key.get(b));
    if (value_a == value_b) continue;
    differences.push_back({key.name, std::move(value_a), std::move(value_b)});
  }
  return differences;
}

std::vector<RecipeKey> RecipeKeys() {
  const Recipe defaults = DefaultRecipe();
  std::vector<RecipeKey> keys;
  for (const Key& key : AllKeys()) {
    std::string value = key.default_note;
    if (value.empty() && !key.required) value = ValueText(key.get(defaults));
    keys.push_back({.name = key.name,
                    .expected = ExpectedOf(key),
                    .choices = key.choices,
                    .default_value = std::move(value),
                    .doc = key.doc,
                    .required = key.required,
                    .input_only = key.input_only,
                    .quiet = key.quiet});
  }
  return keys;
}

}  // namespace retrace
