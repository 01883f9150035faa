// CompareTraces: what `retrace diff` prints of two traces. Used by diff.
#ifndef RETRACE_CMD_TRACE_DIFF_H_
#define RETRACE_CMD_TRACE_DIFF_H_

#include <cstdint>
#include <string>

#include "cmd/console.h"

namespace retrace {

struct TraceDiffFlags {
  std::string a, b, only;
  std::string truth;        // a trace in FP64; "": none
  std::string by = "auto";  // auto, bits, rounding
  int64_t top = 10;         // 0: all
  bool top_given = false;
  OutputFlags output;
};

// Are both of them traces? Fails where only one is.
bool AreTraces(const std::string& a, const std::string& b);

// Ends with 0 where they are the same, by bits or within rounding, else 1.
[[noreturn]] void CompareTraces(const TraceDiffFlags& flags);

}  // namespace retrace

#endif  // RETRACE_CMD_TRACE_DIFF_H_
