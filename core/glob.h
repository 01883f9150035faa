// Globs over tensor names, as in only=model.layers.*.mlp.*. Used by recipes and interventions.
// Pure.
#ifndef RETRACE_CORE_GLOB_H_
#define RETRACE_CORE_GLOB_H_

#include <string_view>

namespace retrace {

// Does a glob (* any run of characters, ? one) match a tensor's name? "": all.
bool GlobMatches(std::string_view glob, std::string_view name);

}  // namespace retrace

#endif  // RETRACE_CORE_GLOB_H_
