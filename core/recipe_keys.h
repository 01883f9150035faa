// The one list of a recipe's keys: names, members, ranges, defaults and meanings. Parsing,
// printing,
// --set, checks, comparison and docs/recipe.md all walk this list, so a key that is added here is
// known everywhere. Internal to core; others use recipe_toml.h. Immutable after first use.
#ifndef RETRACE_CORE_RECIPE_KEYS_H_
#define RETRACE_CORE_RECIPE_KEYS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/recipe.h"

namespace retrace {

// A value as TOML gives it. A name of a choice is text.
using KeyValue = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>,
                              std::vector<double>, std::vector<std::string>>;

enum class KeyKind {
  kBool,
  kInteger,
  kReal,
  kText,
  kChoice,       // one of `choices`
  kChoices,      // a list of them: layer_types
  kRealOrReals,  // one number for all, or a list: layer_scalar
  kIntegerPair,  // [first, last], or [] for none: store.window
  kTexts,        // a list of text, each as `check_text` wants it: optimizer.freeze
};

struct Key {
  std::string name;  // "model.vocab_size"
  std::string doc;   // with unit
  KeyKind kind = KeyKind::kInteger;
  int64_t integer_min = 0, integer_max = 0;           // inclusive; kInteger, kIntegerPair
  double real_min = 0, real_max = 0;                  // kReal, kRealOrReals
  bool real_min_open = false, real_max_open = false;  // the end itself is refused
  std::vector<std::string> choices;
  bool required = false;
  // Input only: never part of a resolved recipe, nor of its digest. `get` and `set` are empty.
  bool input_only = false;
  // Stands in the canonical text only where it is not the default: so keys that newer programs
  // know leave the digests of older recipes as they were.
  bool quiet = false;
  std::string form;  // kTexts: what an entry looks like
  Status (*check_text)(const std::string& text) = nullptr;
  std::string default_note;  // for docs, where the default is not that of Recipe{}
  std::function<KeyValue(const Recipe&)> get;
  std::function<void(const KeyValue&, Recipe*)> set;  // value has passed CheckValue
};

// In the order of the canonical text. Built once.
const std::vector<Key>& AllKeys();
const Key* FindKey(std::string_view name);  // nullptr: no such key

// Input-only keys.
inline constexpr std::string_view kPresetKey = "preset";
inline constexpr std::string_view kPrecisionPresetKey = "precision.preset";
inline constexpr std::string_view kFullEveryKey = "model.full_attention_every";
inline constexpr std::string_view kLastFullKey = "model.last_layer_full";

// "an integer in 1 .. 1024", "one of bf16, fp32, fp64", ...
std::string ExpectedOf(const Key& key);

// The value in canonical TOML: doubles in the shortest form that reads back to the same bits.
std::string ValueText(const KeyValue& value);
std::string QuotedText(std::string_view text);  // a TOML basic string

// Converts what TOML gave (an integer where a real is expected, ...) and checks kind and range.
// Errors: kUsage, "expected ..., got ...", without the key's name or place.
Result<KeyValue> CheckValue(const Key& key, const KeyValue& given);

// What every recipe starts from: Recipe{} with the precision preset fp32.
Recipe DefaultRecipe();

// The part of a dotted name before the first dot, or "".
std::string SectionOf(std::string_view name);

}  // namespace retrace

#endif  // RETRACE_CORE_RECIPE_KEYS_H_
