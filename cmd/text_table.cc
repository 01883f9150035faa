#include "cmd/text_table.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/check.h"

namespace retrace {
namespace {

constexpr int kWidthMin = 40, kWidthMax = 400;

}  // namespace

void TextTable::AddRow(std::vector<std::string> cells) {
  RT_CHECK_EQ(columns_.size(), cells.size());
  rows_.push_back(std::move(cells));
}

std::string TextTable::Text(const OutputFlags& flags, int indent) const {
  std::vector<int> widths;
  for (size_t c = 0; c < columns_.size(); ++c) {
    int width = DisplayWidth(columns_[c].title);
    for (const auto& row : rows_) width = std::max(width, DisplayWidth(row[c]));
    widths.push_back(width);
  }
  const auto line = [&](const auto& cell_of) {
    std::string text(indent, ' ');
    for (size_t c = 0; c < columns_.size(); ++c) {
      const std::string& cell = cell_of(c);
      const std::string pad(widths[c] - DisplayWidth(cell), ' ');
      text += columns_[c].left ? cell + pad : pad + cell;
      if (c + 1 < columns_.size()) text += "  ";
    }
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::string out =
      Tinted(flags, Tint::kDim,
             line([&](size_t c) -> const std::string& { return columns_[c].title; })) +
      "\n";
  for (const auto& row : rows_) {
    out += line([&](size_t c) -> const std::string& { return row[c]; }) + "\n";
  }
  return out;
}

int DisplayWidth(std::string_view text) {
  int width = 0;
  bool escape = false;  // within "\033[...m", which colours what follows
  for (char c : text) {
    if (c == '\033') escape = true;
    if (!escape && (static_cast<unsigned char>(c) & 0xc0) != 0x80) ++width;
    if (c == 'm') escape = false;
  }
  return width;
}

std::string Grouped(int64_t number) {
  std::string digits = std::to_string(number);
  const int64_t first = number < 0 ? 1 : 0;
  for (int64_t at = std::ssize(digits) - 3; at > first; at -= 3) digits.insert(at, 1, ',');
  return digits;
}

std::string PercentText(double share) {
  const double percent = 100 * share;
  return percent >= 9.95 ? fmt::format("{:.0f} %", percent) : fmt::format("{:.2g} %", percent);
}

std::string BaseName(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.rfind('/');
  return slash == std::string::npos || path.size() == 1 ? path : path.substr(slash + 1);
}

void PrintReport(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  OrFail(FinishOutput());
}

int TerminalWidth() {
  int width = 0;
  if (const char* columns = std::getenv("COLUMNS")) width = std::atoi(columns);
  winsize size{};
  if (width <= 0 && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) width = size.ws_col;
  return width <= 0 ? 80 : std::clamp(width, kWidthMin, kWidthMax);
}

}  // namespace retrace
