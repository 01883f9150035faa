// The defaults in which the two public frameworks differ, for recipes that start from one of them
// with `preset = "automodel"` or "megatron". Used by recipe_toml.cc and the reference page. Pure.
// Versions: NeMo AutoModel 0.7.0 (Hugging Face transformers' model and init), Megatron Bridge 0.6.2
// with its stock pretraining recipe on Megatron Core 0.19.2.
#ifndef RETRACE_CORE_RECIPE_PRESETS_H_
#define RETRACE_CORE_RECIPE_PRESETS_H_

#include <string_view>
#include <vector>

#include "core/recipe_keys.h"

namespace retrace {

struct PresetValue {
  std::string_view key;
  KeyValue value;
  std::string_view reason;  // one line for docs
};

// What `preset` (a choice of the key `preset`) sets. Both presets set the same keys, so one
// replaces the other without residue. `draft` is the recipe without the preset: some values follow
// from its precision (a rounding to BF16 exists only in a BF16 run) and from its peak learning
// rate.
std::vector<PresetValue> PresetValues(std::string_view preset, const Recipe& draft);

}  // namespace retrace

#endif  // RETRACE_CORE_RECIPE_PRESETS_H_
