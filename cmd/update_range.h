// UpdateRange: updates A..B as commands take them (--steps A..B). Used by the files of cmd/. A
// value.
#ifndef RETRACE_CMD_UPDATE_RANGE_H_
#define RETRACE_CMD_UPDATE_RANGE_H_

#include <cstdint>
#include <string>

#include "core/status.h"

namespace retrace {

struct UpdateRange {
  int64_t first = 0, last = 0;

  int64_t size() const { return last - first + 1; }
};

// "A..B" with 1 <= A <= B; `flag` is named in the message. Errors: kUsage.
Result<UpdateRange> ParseUpdateRange(const std::string& text, const char* flag);

}  // namespace retrace

#endif  // RETRACE_CMD_UPDATE_RANGE_H_
