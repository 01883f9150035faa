// docs/recipe.md, from the list of keys.
#include <string>
#include <vector>

#include "core/recipe_keys.h"
#include "core/recipe_presets.h"
#include "core/recipe_toml.h"

namespace retrace {
namespace {

constexpr const char* kIntroduction =
    R"(# Recipes

<!-- Generated from core/recipe_keys.cc by RecipeReference(); tests/recipe_test.cc says how. -->

A recipe is a TOML file that determines a run. It is strict: an unknown or repeated key, a value of
another type, out of range, or at odds with another value is refused, with its line and column, what was
expected, what came, and the nearest valid name. Integers are not taken for booleans or text, and the
reverse; an integer may stand where a number is expected.

A run keeps the *resolved* recipe: every key below except those marked *input*, in this order, presets
and patterns replaced by what they stand for; those marked *quiet* only where they do not have their
default. The recipe's digest covers that text without `[store]` and
`[execution]`, which do not change a bit of any state.

`--set KEY=VALUE` gives one key on the command line, with its dotted name: `--set data.seed=7`,
`--set data.path=data/gcide` (text needs no quotes), `--set 'store.window=[1, 24]'`,
`--set precision.scores.grad=fp32`. Which value counts, strongest first:

1. `--set` (of several for one key, the last);
2. keys of the file;
3. `preset`;
4. `precision.preset`, for the rounding points;
5. the defaults below.

`--set preset=...` and `--set precision.preset=...` also take the place of those keys of the file that
the preset sets; otherwise they would do nothing to a resolved recipe. Likewise `--set` of
`model.layer_types` and of the pattern keys take each other's place.

In `[precision]`, a point's name sets the format of the tensor and `"NAME.grad"`, in quotes, that of its
gradient:

```toml
[precision]
preset = "bf16"
softmax = "fp32"
"scores.grad" = "fp32"
```

The presets: `fp32` and `fp64` round every point so, and the partials too. `bf16` rounds every point to
BF16, as transformers in eager mode does, except the cross entropy, which is FP32. `bf16-sensitive-fp32`
is `bf16` with every norm, RoPE, scores, softmax, the residual stream, `layer_scalar`, logits, softcap and
cross entropy in FP32. FP64 is all or nothing.
)";

std::string Cell(std::string text) {
  std::erase(text, '\n');
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) {
    text.insert(at, "\\");
  }
  return text;
}

std::string KeyRow(const RecipeKey& key) {
  const std::string otherwise = key.required ? "*required*" : "`" + key.default_value + "`";
  const bool words =
      key.default_value.find(' ') != std::string::npos || key.default_value == "none";
  return "| `" + key.name + "`" + (key.input_only ? " *input*" : "") +
         (key.quiet ? " *quiet*" : "") + " | " + Cell(key.expected) +
         " | " + (words ? key.default_value : otherwise) + " | " + Cell(key.doc) + " |\n";
}

std::string KeyTables() {
  std::string text, section = "-";
  for (const RecipeKey& key : RecipeKeys()) {
    if (SectionOf(key.name) != section) {
      section = SectionOf(key.name);
      text += "\n## " + (section.empty() ? "Top level" : "[" + section + "]") + "\n\n";
      text += "| key | expected | default | meaning |\n| --- | --- | --- | --- |\n";
    }
    text += KeyRow(key);
  }
  return text;
}

std::string PresetTable() {
  Recipe draft = DefaultRecipe();
  draft.precision = PrecisionPreset("bf16").value();
  std::string text =
      "\n## Framework presets\n\n"
      "`preset` starts from what a framework does when nothing else is said (NeMo AutoModel 0.7.0; "
      "the "
      "stock\npretraining recipe of Megatron Bridge 0.6.2). Keys of the recipe win over it. The "
      "values "
      "below are those of\na BF16 run with peak learning rate " +
      ValueText(draft.schedule.peak) +
      ". What has no key is not imitated: Megatron's `fast_gelu`, its "
      "sampling\nof initial values per rank, and AutoModel's FP32 SDPA (take `bf16` with `scores`, "
      "`softmax` and `rope` in `fp32`).\nNor does a preset imitate what may be a fault: "
      "`model.qk_norm_gradient = \"first-shard\"` and `model.ignore_window` do.\n\n"
      "| key | automodel | why | megatron | why |\n| --- | --- | --- | --- | --- |\n";
  const auto automodel = PresetValues("automodel", draft),
             megatron = PresetValues("megatron", draft);
  for (size_t i = 0; i < automodel.size(); ++i) {
    text += "| `" + std::string(automodel[i].key) + "` | `" + ValueText(automodel[i].value) +
            "` | " + std::string(automodel[i].reason) + " | `" + ValueText(megatron[i].value) +
            "` | " + std::string(megatron[i].reason) + " |\n";
  }
  return text;
}

}  // namespace

std::string RecipeReference() { return kIntroduction + KeyTables() + PresetTable(); }

}  // namespace retrace
