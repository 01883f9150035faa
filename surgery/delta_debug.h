// DeltaDebug: a smallest part of a set that still does something, by asking about parts. Used by
// the search for a cause. Pure but for `ask`.
//
// ddmin (Zeller and Hildebrandt 2002, IEEE Trans. Softw. Eng. 28, "Simplifying and isolating
// failure-inducing input"): halves, then complements of ever finer parts. The result is 1-minimal:
// it does it, and without any one of its members it does not; as far as the answers are right. One
// member of n takes about 2 log2 n questions, k members of n at the most n^2 + 3n.
#ifndef RETRACE_SURGERY_DELTA_DEBUG_H_
#define RETRACE_SURGERY_DELTA_DEBUG_H_

#include <functional>
#include <optional>
#include <vector>

#include "core/status.h"

namespace retrace {

// Whether a part does it; nullopt: the end of what may be asked.
using AskPart = std::function<Result<std::optional<bool>>(const std::vector<int>& part)>;

struct SmallestPart {
  std::vector<int> members;  // ascending
  bool complete = false;     // else the best so far
};

// Of members 0 .. size-1, which together do it. `smaller` is told of each smaller part that does it.
// Parts are asked about in ascending order of members; a part may be asked about again.
Result<SmallestPart> FindSmallestPart(int size, const AskPart& ask,
                                      const std::function<void(const std::vector<int>&)>& smaller);

}  // namespace retrace

#endif  // RETRACE_SURGERY_DELTA_DEBUG_H_
