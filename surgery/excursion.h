// Excursion: when a quantity began to move, for the question which one moved first. Used by report.
// Pure; thread-safe.
//
// A quantity's excursion is its largest monotone-in-extremes move that ends while the loss rises:
// from the extreme where it turned to the extreme that it reached. Its onset is the first update
// from which on it stays beyond a tenth of that way, as rise times are measured; the lead of one
// quantity over another is the difference of their onsets. A move that begins where the window
// begins did not turn in view: a trend, without an onset.
#ifndef RETRACE_SURGERY_EXCURSION_H_
#define RETRACE_SURGERY_EXCURSION_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace retrace {

inline constexpr double kOnsetShare = 0.1;  // of the way

struct Excursion {
  int64_t turn = 0, onset = 0, end = 0;  // updates
  double value_turn = 0, value_end = 0;  // as given, not their logarithms
  double size = 0;                       // |value_end - value_turn|; of logarithms: natural ones
  bool trend = false;                    // turn is the window's first update

  bool rises() const { return value_end > value_turn; }
};

struct ExcursionWindow {
  int64_t first = 0;                    // update of values[0]
  int64_t end_first = 0, end_last = 0;  // where an excursion may end
  bool log = false;                     // sizes are of logarithms; values <= 0 are left out
  double least = 0;                     // smaller ones are none
};

// The largest excursion. Values that are not finite are left out. nullopt: none of the least size.
std::optional<Excursion> FindExcursion(const std::vector<double>& values,
                                       const ExcursionWindow& window);

}  // namespace retrace

#endif  // RETRACE_SURGERY_EXCURSION_H_
