#include "cmd/report_page.h"

#include <utility>

// cmd/report/assets.S
#define RETRACE_ASSET(name)                    \
  extern "C" const char retrace_##name##_begin[]; \
  extern "C" const char retrace_##name##_end[]
RETRACE_ASSET(page_html);
RETRACE_ASSET(page_css);
RETRACE_ASSET(page_js);
RETRACE_ASSET(d3_js);
RETRACE_ASSET(d3_license);
#undef RETRACE_ASSET

namespace retrace {
namespace {

std::string_view Asset(const char* begin, const char* end) {
  return {begin, static_cast<size_t>(end - begin)};
}

}  // namespace

std::string EscapedHtml(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += c;
    }
  }
  return out;
}

std::string EscapedJson(std::string_view json) {
  std::string out;
  out.reserve(json.size() + json.size() / 64);
  for (const char c : json) {
    if (c == '<') out += "\\u003c";
    else out += c;
  }
  return out;
}

Result<std::string> ReportPage(std::string_view title, std::string_view json) {
  const std::string_view d3 = Asset(retrace_d3_js_begin, retrace_d3_js_end);
  if (d3.empty()) {
    return UnsupportedError(
        "report: this program was built without D3, which draws its plots; scripts/setup.sh installs "
        "it (Debian's node-d3), then build again. 'retrace log --plot' draws in the terminal");
  }
  const std::string data = EscapedJson(json), heading = EscapedHtml(title);
  const std::pair<std::string_view, std::string_view> parts[] = {
      {"{{title}}", heading},
      {"{{css}}", Asset(retrace_page_css_begin, retrace_page_css_end)},
      {"{{license}}", Asset(retrace_d3_license_begin, retrace_d3_license_end)},
      {"{{data}}", data},
      {"{{d3}}", d3},
      {"{{js}}", Asset(retrace_page_js_begin, retrace_page_js_end)}};
  std::string_view rest = Asset(retrace_page_html_begin, retrace_page_html_end);
  std::string page;
  page.reserve(rest.size() + data.size() + d3.size() + (size_t{1} << 17));
  while (!rest.empty()) {
    const size_t open = rest.find("{{");
    page += rest.substr(0, open);
    if (open == std::string_view::npos) break;
    rest.remove_prefix(open);
    bool known = false;
    for (const auto& [name, text] : parts) {
      if (!rest.starts_with(name)) continue;
      page += text;
      rest.remove_prefix(name.size());
      known = true;
      break;
    }
    RT_CHECK(known);  // page.html has no other parts
  }
  return page;
}

}  // namespace retrace
