// NearestName: the name that a mistyped word most likely meant, for "the nearest is ..." in
// messages. Used by everything that reads names from people. Pure; the time is bounded whatever the
// word.
#ifndef RETRACE_CORE_NEAREST_NAME_H_
#define RETRACE_CORE_NEAREST_NAME_H_

#include <string>
#include <string_view>
#include <vector>

namespace retrace {

// The name with the least edit distance (insertions, deletions, substitutions; the first of
// equals). For dotted names a wrong or missing section counts as one edit, so "vocab_sze" finds
// "model.vocab_size". `names` may not be empty.
std::string NearestName(std::string_view word, const std::vector<std::string>& names);

}  // namespace retrace

#endif  // RETRACE_CORE_NEAREST_NAME_H_
