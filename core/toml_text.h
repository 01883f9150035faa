// TomlText: the text of a user's TOML file, bounded so that the TOML library can be given it. Used by
// the readers of recipes and experiments.
#ifndef RETRACE_CORE_TOML_TEXT_H_
#define RETRACE_CORE_TOML_TEXT_H_

#include <string>
#include <string_view>

#include "core/status.h"

namespace retrace {

// What the TOML library may see: at most 1 MiB and 4096 dots. Errors: kUsage.
Status CheckTomlSize(std::string_view toml);

// The file's text; of one that CheckTomlSize refuses, enough for it to do so. what: "a recipe".
// Errors: kUsage where it can not be read.
Result<std::string> ReadTomlFile(const std::string& path, const std::string& what);

}  // namespace retrace

#endif  // RETRACE_CORE_TOML_TEXT_H_
