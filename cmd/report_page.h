// ReportPage: the one HTML file of a report: template, style, script and D3, which are parts of the
// program (cmd/report/, CMakeLists.txt), and the data. Used by report. Pure.
#ifndef RETRACE_CMD_REPORT_PAGE_H_
#define RETRACE_CMD_REPORT_PAGE_H_

#include <string>
#include <string_view>

#include "core/status.h"

namespace retrace {

// Text within an HTML element or attribute.
std::string EscapedHtml(std::string_view text);
// JSON within a script element: no '<', so that nothing in it ends the element or begins a comment.
std::string EscapedJson(std::string_view json);

// Errors: kUnsupported where the program was built without D3.
Result<std::string> ReportPage(std::string_view title, std::string_view json);

}  // namespace retrace

#endif  // RETRACE_CMD_REPORT_PAGE_H_
