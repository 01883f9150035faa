// RepeatedName: what JSON parsers pass over in silence, and disagree on. Used by readers of files
// that other programs wrote. A pure function; thread-safe.
#ifndef RETRACE_FORMATS_JSON_NAMES_H_
#define RETRACE_FORMATS_JSON_NAMES_H_

#include <optional>
#include <string>
#include <string_view>

namespace retrace {

// A name that one object of the text has twice; nullopt where none has, or the text is no JSON.
std::optional<std::string> RepeatedName(std::string_view json_text);

}  // namespace retrace

#endif  // RETRACE_FORMATS_JSON_NAMES_H_
