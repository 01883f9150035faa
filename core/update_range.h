// UpdateRange: updates A..B, as commands take them (--steps A..B). Used by replay and cmd. A value.
#ifndef RETRACE_CORE_UPDATE_RANGE_H_
#define RETRACE_CORE_UPDATE_RANGE_H_

#include <cstdint>
#include <string>

#include "core/status.h"

namespace retrace {

struct UpdateRange {
  int64_t first = 0, last = 0;  // first > last: none

  int64_t size() const { return last - first + 1; }
};

inline constexpr UpdateRange kAllUpdates = {1, INT64_MAX};

// "A..B" with 1 <= A <= B; `flag` is named in the message. Errors: kUsage.
Result<UpdateRange> ParseUpdateRange(const std::string& text, const char* flag);

}  // namespace retrace

#endif  // RETRACE_CORE_UPDATE_RANGE_H_
