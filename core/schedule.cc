#include "core/schedule.h"

#include <algorithm>

#include "core/scalar_math.h"

namespace retrace {
namespace {

constexpr double kPi = 3.141592653589793;

double Cosine(const ScheduleRecipe& schedule, int64_t k) {
  const double done = static_cast<double>(k - schedule.warmup_steps);
  const double all = static_cast<double>(schedule.total_steps - schedule.warmup_steps);
  const double ratio = done / all;
  const double share = 0.5 * (math::Cos(kPi * ratio) + 1.0);
  return schedule.minimum + share * (schedule.peak - schedule.minimum);
}

}  // namespace

double LearningRate(const ScheduleRecipe& schedule, int64_t k) {
  if (schedule.warmup_steps > 0 && k <= schedule.warmup_steps) {
    const double rise = (schedule.peak - schedule.initial) * static_cast<double>(k);
    return schedule.initial + rise / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.shape == LrShape::kConstant) return schedule.peak;
  if (k > schedule.total_steps) return schedule.minimum;
  return Cosine(schedule, k);
}

double AppliedLearningRate(const ScheduleRecipe& schedule, int64_t schedule_index) {
  if (schedule.hold > 0) schedule_index = std::min(schedule_index, schedule.hold - 1);
  const bool next = schedule.indexing == LrIndexing::kStep;
  return LearningRate(schedule, next ? schedule_index + 1 : schedule_index);
}

}  // namespace retrace
