#include "surgery/excursion.h"

#include <algorithm>
#include <cmath>

namespace retrace {
namespace {

struct Sample {
  int64_t update = 0;
  double value = 0;  // as given
  double level = 0;  // the value or its logarithm
};

std::vector<Sample> SamplesOf(const std::vector<double>& values, const ExcursionWindow& window) {
  std::vector<Sample> samples;
  for (size_t i = 0; i < values.size(); ++i) {
    const double level = window.log ? std::log(values[i]) : values[i];
    if (!std::isfinite(level)) continue;
    samples.push_back({window.first + static_cast<int64_t>(i), values[i], level});
  }
  return samples;
}

// The first sample from which on all up to `end` lie beyond the share of the way.
size_t OnsetOf(const std::vector<Sample>& samples, size_t turn, size_t end) {
  const double way = samples[end].level - samples[turn].level;
  size_t onset = end;
  while (onset > turn + 1) {
    const double gone = (samples[onset - 1].level - samples[turn].level) / way;
    if (gone <= kOnsetShare) break;
    --onset;
  }
  return onset;
}

// Indices of turn and end of the largest move upward (sign 1) or downward (sign -1).
struct Move {
  size_t turn = 0, end = 0;
  double size = 0;
};

Move LargestMove(const std::vector<Sample>& samples, const ExcursionWindow& window, double sign) {
  Move move;
  size_t least = 0;
  for (size_t i = 1; i < samples.size(); ++i) {
    const double size = sign * (samples[i].level - samples[least].level);
    const bool ends = samples[i].update >= window.end_first && samples[i].update <= window.end_last;
    if (ends && size > move.size) move = {least, i, size};
    if (size <= 0) least = i;
  }
  return move;
}

}  // namespace

std::optional<Excursion> FindExcursion(const std::vector<double>& values,
                                       const ExcursionWindow& window) {
  const std::vector<Sample> samples = SamplesOf(values, window);
  if (samples.empty()) return std::nullopt;
  const Move up = LargestMove(samples, window, 1), down = LargestMove(samples, window, -1);
  const Move& move = up.size >= down.size ? up : down;
  if (move.size <= 0 || move.size < window.least) return std::nullopt;
  const Sample &turn = samples[move.turn], &end = samples[move.end];
  Excursion excursion{.turn = turn.update,
                      .onset = samples[OnsetOf(samples, move.turn, move.end)].update,
                      .end = end.update,
                      .value_turn = turn.value,
                      .value_end = end.value,
                      .size = move.size};
  excursion.trend = move.turn == 0;
  return excursion;
}

}  // namespace retrace
