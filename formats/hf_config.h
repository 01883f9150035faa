// The config.json of a model as Hugging Face's transformers read it (Gemma4ForCausalLM). Used by
// export. A pure function; thread-safe.
#ifndef RETRACE_FORMATS_HF_CONFIG_H_
#define RETRACE_FORMATS_HF_CONFIG_H_

#include <string>

#include "core/recipe.h"
#include "core/status.h"

namespace retrace {

// Errors: kUnsupported where the public model has no such switch (a norm left out, another
// attention scale); the message names the recipe's key. Source  transformers 5.24,
// models/gemma4/configuration_gemma4.py
Result<std::string> HfConfigJson(const Recipe& recipe);

}  // namespace retrace

#endif  // RETRACE_FORMATS_HF_CONFIG_H_
