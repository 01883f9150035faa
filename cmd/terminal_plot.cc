#include "cmd/terminal_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "cmd/text_table.h"

namespace retrace {
namespace {

constexpr int kLabelWidth = 9;  // of the vertical axis
constexpr int kDotsAcross = 2, kDotsDown = 4;
constexpr double kValueMax = 1e100;

constexpr std::array<Tint, 6> kTints = {Tint::kCyan,  Tint::kYellow, Tint::kRed,
                                        Tint::kGreen, Tint::kBold,   Tint::kDim};
constexpr std::array<const char*, 6> kMarkers = {"●", "○", "△", "□", "×", "+"};
constexpr std::array<const char*, 6> kAsciiMarkers = {"*", "o", "x", "+", "#", "%"};

std::string Braille(int dots) {
  const int code = 0x2800 + dots;
  return {static_cast<char>(0xe0 | (code >> 12)), static_cast<char>(0x80 | ((code >> 6) & 0x3f)),
          static_cast<char>(0x80 | (code & 0x3f))};
}

int DotBit(int x, int y) {
  static constexpr int kBits[2][4] = {{0x01, 0x02, 0x04, 0x40}, {0x08, 0x10, 0x20, 0x80}};
  return kBits[x][y];
}

// 1, 2 or 5 times a power of ten, at least `least`.
double NiceStep(double least) {
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

// Are the series told apart by colour, so that all can be lines?
bool AllLines(const PlotStyle& style, size_t count) {
  return !style.ascii && (count == 1 || style.output.Colored());
}

const char* MarkerOf(const PlotStyle& style, size_t index) {
  return (style.ascii ? kAsciiMarkers : kMarkers)[index % kMarkers.size()];
}

// Value <-> height in [0, 1] of an axis.
class ValueAxis {
 public:
  ValueAxis(const PlotPanel& panel) : log_(panel.log) {
    bool any = false;
    for (const PlotSeries& series : panel.series) {
      for (const auto& [update, value] : series.points) {
        if (!Draws(value)) continue;
        const double y = Inner(value);
        low_ = any ? std::min(low_, y) : y;
        high_ = any ? std::max(high_, y) : y;
        any = true;
      }
    }
    // A constant curve runs through the middle, of a range that its size suggests.
    const double size = std::max(std::fabs(low_), log_ ? 1.0 : 1e-3);
    const double pad = high_ > low_ ? 0.02 * (high_ - low_) : 0.05 * size;
    low_ -= pad;
    high_ += pad;
  }

  // Beyond kValueMax the axis itself would overflow.
  bool Draws(double value) const { return std::fabs(value) < kValueMax && (!log_ || value > 0); }
  double Height(double value) const { return (Inner(value) - low_) / (high_ - low_); }

  // Ticks with labels, for about `count` of them.
  std::vector<std::pair<double, std::string>> Ticks(int count) const {
    return log_ ? LogTicks(count) : LinearTicks(count);
  }

 private:
  double Inner(double value) const { return log_ ? std::log10(value) : value; }

  std::vector<std::pair<double, std::string>> LinearTicks(int count) const {
    std::vector<std::pair<double, std::string>> ticks;
    const double step = NiceStep((high_ - low_) / count);
    const int decimals = std::clamp(static_cast<int>(-std::floor(std::log10(step))), 0, 9);
    const bool huge = std::max(std::fabs(low_), std::fabs(high_)) >= 1e6;
    for (double i = std::ceil(low_ / step); i * step <= high_ && ticks.size() < 64; ++i) {
      const double value = i == 0 ? 0 : i * step;  // no "-0"
      ticks.emplace_back(
          value, huge ? fmt::format("{:.3g}", value) : fmt::format("{:.{}f}", value, decimals));
    }
    return ticks;
  }

  // Whole decades; where fewer than two are in view, also 2 and 5 times them.
  std::vector<std::pair<double, std::string>> LogTicks(int count) const {
    std::vector<std::pair<double, std::string>> ticks;
    const int first = static_cast<int>(std::ceil(low_)), last = static_cast<int>(std::floor(high_));
    const int step = std::max(1, (last - first + count) / count);
    const auto add = [&](double value) {
      const double y = std::log10(value);
      if (y >= low_ && y <= high_) ticks.emplace_back(value, fmt::format("{:g}", value));
    };
    for (int decade = first - 1; decade <= last; ++decade) {
      const double value = std::pow(10.0, decade);
      if (decade >= first && (decade - first) % step == 0) add(value);
      if (last - first < 1) {
        add(2 * value);
        add(5 * value);
      }
    }
    if (ticks.empty()) {  // less than from 1 to 2: as on a linear axis
      const double low = std::pow(10.0, low_), high = std::pow(10.0, high_);
      const double width = NiceStep((high - low) / count);
      for (double i = std::ceil(low / width); i * width <= high && ticks.size() < 64; ++i) {
        add(i * width);
      }
    }
    return ticks;
  }

  const bool log_;
  double low_ = 0, high_ = 0;  // of Inner
};

struct Cell {
  std::string glyph = " ";
  Tint tint = Tint::kPlain;
  int dots = 0;
};

class Canvas {
 public:
  Canvas(const PlotPanel& panel, const PlotStyle& style)
      : panel_(panel),
        style_(style),
        axis_(panel),
        rows_(panel.rows),
        columns_(std::max(8, style.width - kLabelWidth - 2)),
        cells_(rows_ * columns_) {}

  std::string Text();

 private:
  Cell& cell(int row, int column) { return cells_[row * columns_ + column]; }
  int XDot(int64_t update) const {
    const double span = static_cast<double>(std::max<int64_t>(1, panel_.last - panel_.first));
    const double at = static_cast<double>(update - panel_.first) / span;
    return static_cast<int>(std::lround(at * (columns_ * kDotsAcross - 1)));
  }
  int YDot(double value) const {
    const int dots = rows_ * kDotsDown - 1;
    return std::clamp(dots - static_cast<int>(std::lround(axis_.Height(value) * dots)), 0, dots);
  }
  int Column(int64_t update) const { return XDot(update) / kDotsAcross; }
  int Row(double value) const { return YDot(value) / kDotsDown; }

  void Dot(int x, int y, Tint tint);
  void Segment(int x0, int y0, int x1, int y1, Tint tint);
  void DrawLine(size_t index);
  void DrawPoints(size_t index, bool connect);
  void DrawMarks();
  void DrawExtremes();
  std::string RowText(int row, const std::string& label) const;
  std::string HorizontalAxis() const;
  std::string MarkTexts() const;
  Tint TintOf(size_t index) const {
    return style_.output.Colored() ? kTints[index % kTints.size()] : Tint::kPlain;
  }

  const PlotPanel& panel_;
  const PlotStyle& style_;
  const ValueAxis axis_;
  const int rows_, columns_;
  std::vector<Cell> cells_;
};

void Canvas::Dot(int x, int y, Tint tint) {
  Cell& c = cell(y / kDotsDown, x / kDotsAcross);
  if (style_.ascii) {
    if (c.glyph == " ") c = {".", tint, 0};
    return;
  }
  c.dots |= DotBit(x % kDotsAcross, y % kDotsDown);
  c.glyph = Braille(c.dots);
  c.tint = tint;
}

void Canvas::Segment(int x0, int y0, int x1, int y1, Tint tint) {
  const int steps = std::max({std::abs(x1 - x0), std::abs(y1 - y0), 1});
  for (int i = 0; i <= steps; ++i) {
    Dot(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps, tint);
  }
}

void Canvas::DrawLine(size_t index) {
  int x_before = 0, y_before = 0;
  bool joined = false;
  for (const auto& [update, value] : panel_.series[index].points) {
    const bool drawn = axis_.Draws(value);
    if (drawn) {
      const int x = XDot(update), y = YDot(value);
      Segment(joined ? x_before : x, joined ? y_before : y, x, y, TintOf(index));
      x_before = x;
      y_before = y;
    }
    joined = drawn;
  }
}

void Canvas::DrawPoints(size_t index, bool connect) {
  if (connect) DrawLine(index);
  for (const auto& [update, value] : panel_.series[index].points) {
    if (!axis_.Draws(value)) continue;
    cell(Row(value), Column(update)) = {MarkerOf(style_, index), TintOf(index), 0};
  }
}

// Only where nothing else is drawn.
void Canvas::DrawMarks() {
  for (const PlotMark& mark : panel_.marks) {
    for (int row = 0; row < rows_; ++row) {
      Cell& c = cell(row, Column(mark.update));
      if (c.glyph == " ") c = {style_.ascii ? ":" : "┊", Tint::kDim, 0};
    }
  }
}

void Canvas::DrawExtremes() {
  if (!panel_.extremes || panel_.series.empty()) return;
  const std::pair<int64_t, double>*low = nullptr, *high = nullptr;
  for (const auto& point : panel_.series[0].points) {
    if (!axis_.Draws(point.second)) continue;
    if (low == nullptr || point.second < low->second) low = &point;
    if (high == nullptr || point.second > high->second) high = &point;
  }
  if (low == nullptr || low->second == high->second) return;
  cell(Row(high->second), Column(high->first)) = {style_.ascii ? "^" : "▲", Tint::kBold, 0};
  cell(Row(low->second), Column(low->first)) = {style_.ascii ? "v" : "▼", Tint::kBold, 0};
}

std::string Canvas::RowText(int row, const std::string& label) const {
  std::string text = fmt::format("{:>{}} ", label, kLabelWidth - 1);
  if (style_.ascii)
    text += label.empty() ? "|" : "+";
  else
    text += label.empty() ? "│" : "┤";
  int last = columns_ - 1;
  while (last >= 0 && cells_[row * columns_ + last].glyph == " ") --last;
  for (int column = 0; column <= last; ++column) {
    const Cell& c = cells_[row * columns_ + column];
    text += Tinted(style_.output, c.tint, c.glyph);
  }
  return text + "\n";
}

// The axis with ticks, '!' where a value could not be drawn, and the ticks' labels.
std::string Canvas::HorizontalAxis() const {
  std::vector<std::string> line(columns_, style_.ascii ? "-" : "─");
  std::string labels(columns_ + 12, ' ');
  const double span = static_cast<double>(std::max<int64_t>(1, panel_.last - panel_.first));
  const int64_t step =
      std::max<int64_t>(1, std::llround(NiceStep(span * 9 / static_cast<double>(columns_))));
  int free_from = 0;
  for (int64_t t = (panel_.first + step - 1) / step * step; t <= panel_.last; t += step) {
    const std::string label = std::to_string(t);
    const int column = Column(t);
    const int begin = std::max(0, column - static_cast<int>(label.size()) / 2);
    if (begin < free_from) continue;
    line[column] = style_.ascii ? "+" : "┬";
    labels.replace(begin, label.size(), label);
    free_from = begin + static_cast<int>(label.size()) + 1;
  }
  for (const PlotSeries& series : panel_.series) {
    for (const auto& [update, value] : series.points) {
      if (!axis_.Draws(value)) line[Column(update)] = "!";
    }
  }
  labels.erase(labels.find_last_not_of(' ') + 1);
  return fmt::format("{}{}{}\n{}{}\n", std::string(kLabelWidth, ' '), style_.ascii ? "+" : "└",
                     fmt::join(line, ""), std::string(kLabelWidth + 1, ' '), labels);
}

std::string Canvas::MarkTexts() const {
  std::string out;
  for (const PlotMark& mark : panel_.marks) {
    if (mark.text.empty()) continue;
    const std::string arrow = style_.ascii ? "^" : "↑";
    const int column = Column(mark.update), width = DisplayWidth(mark.text);
    std::string line;
    if (column + 2 + width <= columns_ || column < width + 1) {
      line = std::string(column, ' ') + arrow + " " + mark.text;
    } else {  // to the left of the arrow
      line = std::string(column - width - 1, ' ') + mark.text + " " + arrow;
    }
    out += std::string(kLabelWidth + 1, ' ') + line + "\n";
  }
  return out;
}

std::string Canvas::Text() {
  const size_t count = panel_.series.size();
  const bool lines = AllLines(style_, count);
  for (size_t i = 0; i < count; ++i) {
    if (lines || (i == 0 && !style_.ascii))
      DrawLine(i);
    else
      DrawPoints(i, count == 1);
  }
  DrawMarks();
  DrawExtremes();
  std::vector<std::string> labels(rows_);
  for (const auto& [value, label] : axis_.Ticks(std::max(2, rows_ / 2))) labels[Row(value)] = label;
  std::string out = Tinted(style_.output, Tint::kBold, panel_.title) + "\n";
  for (int row = 0; row < rows_; ++row) out += RowText(row, labels[row]);
  return out + HorizontalAxis() + MarkTexts();
}

}  // namespace

std::string PanelText(const PlotPanel& panel, const PlotStyle& style) {
  return Canvas(panel, style).Text();
}

std::string SeriesSample(const PlotStyle& style, size_t index, size_t count) {
  const Tint tint = style.output.Colored() ? kTints[index % kTints.size()] : Tint::kPlain;
  if (AllLines(style, count) || (index == 0 && !style.ascii)) {
    return Tinted(style.output, tint, "⠒⠒");
  }
  return Tinted(style.output, tint, MarkerOf(style, index)) + " ";
}

std::string Sparkline(const std::vector<double>& values, int bins, double full, bool ascii) {
  static constexpr const char* kBlocks[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  static constexpr const char* kAscii[] = {" ", ".", ":", "-", "=", "+", "*", "#", "@"};
  std::string text;
  const int64_t count = std::ssize(values);
  bins = static_cast<int>(std::min<int64_t>(bins, count));
  for (int bin = 0; bin < bins; ++bin) {
    double most = 0;
    for (int64_t i = bin * count / bins; i < (bin + 1) * count / bins; ++i) {
      if (std::isfinite(values[i])) most = std::max(most, values[i]);
    }
    const double share = full > 0 ? std::clamp(most / full, 0.0, 1.0) : 0;
    const int level = most > 0 ? std::max(1, static_cast<int>(std::ceil(share * 8))) : 0;
    text += (ascii ? kAscii : kBlocks)[level];
  }
  return text;
}

}  // namespace retrace
