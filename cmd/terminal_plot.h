// TerminalPlot: curves over updates, drawn with characters: Braille dots, or ASCII. Used by log.
// It draws what it is given and says what it leaves out: values that are not finite (or not
// positive on a log axis) leave a gap and a '!' on the axis. Pure.
#ifndef RETRACE_CMD_TERMINAL_PLOT_H_
#define RETRACE_CMD_TERMINAL_PLOT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cmd/console.h"

namespace retrace {

struct PlotSeries {
  std::vector<std::pair<int64_t, double>> points;  // (update, value), ascending
};

// A vertical line through an update, with words below the axis.
struct PlotMark {
  int64_t update = 0;
  std::string text;  // "": the line alone
};

struct PlotStyle {
  int width = 80;
  bool ascii = false;
  OutputFlags output;
};

struct PlotPanel {
  std::string title;  // with unit
  bool log = false;
  int rows = 10;
  int64_t first = 0, last = 0;  // updates of the horizontal axis
  std::vector<PlotSeries> series;
  std::vector<PlotMark> marks;
  bool extremes = true;  // mark the largest and the smallest value of the first series
};

// Lines with newlines.
std::string PanelText(const PlotPanel& panel, const PlotStyle& style);

// How series `index` of `count` is drawn: for the legend.
std::string SeriesSample(const PlotStyle& style, size_t index, size_t count);

// One character a bin; each shows the largest value in it, between 0 and `full`.
std::string Sparkline(const std::vector<double>& values, int bins, double full, bool ascii);

}  // namespace retrace

#endif  // RETRACE_CMD_TERMINAL_PLOT_H_
