// A file that a command writes for people: report.html, event files. Used by report and log.
#ifndef RETRACE_CMD_WRITTEN_FILE_H_
#define RETRACE_CMD_WRITTEN_FILE_H_

#include <string>
#include <string_view>

#include "core/status.h"

namespace retrace {

// `path` then holds `bytes`, whole; until then what it held before. Errors: kUsage where it is a
// directory or lies in none; kFailed with the system's reason.
Status WriteWholeFile(const std::string& path, std::string_view bytes);

}  // namespace retrace

#endif  // RETRACE_CMD_WRITTEN_FILE_H_
