// How losses add up: over the tokens of a micro-batch, and over the micro-batches of a step. Used by
// the passes, and by whoever has the losses of tokens and wants the bits that a record has.
// Pure.
#ifndef RETRACE_REPLAY_STEP_LOSS_H_
#define RETRACE_REPLAY_STEP_LOSS_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/check.h"
#include "core/recipe.h"

namespace retrace {

// Clause 6 in FP64.
template <class Values>
double SumInFp64(const Values& values) {
  double lane[16] = {};
  for (size_t i = 0; i < values.size(); ++i) {
    lane[i % 16] = lane[i % 16] + static_cast<double>(values[i]);
  }
  for (int h = 8; h > 0; h /= 2) {
    for (int l = 0; l < h; ++l) lane[l] = lane[l] + lane[l + h];
  }
  return lane[0];
}

// sum(lo..hi) = sum(lo..mid) + sum(mid..hi); their number is a power of two.
inline double TreeSum(std::vector<double> values) {
  RT_CHECK(std::has_single_bit(values.size()));
  for (size_t half = 1; half < values.size(); half *= 2) {
    for (size_t i = 0; i < values.size(); i += 2 * half) values[i] += values[i + half];
  }
  return values[0];
}

// The step's mean loss, in nats, from the sum over tokens of each micro-batch; lanes as in clause 8.
inline double StepLoss(const Recipe& recipe, const std::vector<double>& sums) {
  std::vector<double> lanes(recipe.topology.lanes, 0.0);
  for (size_t i = 0; i < sums.size(); ++i) {
    double& lane = lanes[i % lanes.size()];
    lane = i < lanes.size() ? sums[i] : lane + sums[i];
  }
  const double tokens = static_cast<double>(recipe.data.SamplesPerStep()) *
                        static_cast<double>(recipe.data.sequence_length);
  return TreeSum(lanes) / tokens;
}

}  // namespace retrace

#endif  // RETRACE_REPLAY_STEP_LOSS_H_
