// The learning rate as a function of the schedule index. Used by the trainer and by interventions
// on the schedule. Pure.
//
// Computes    k <= warm-up:  initial + ((peak - initial) * k) / warmup_steps
//             constant:      peak
//             k > total:     minimum
//             cosine:        minimum + (0.5 * (cos(pi * r) + 1)) * (peak - minimum),
//                            r = (k - warmup_steps) / (total_steps - warmup_steps)
// Shapes      scalars
// Order       as written, in FP64, every operation rounded; cos is math::Cos. The order is that of
//             Megatron Core's scheduler.
// Guarantee   the same bits everywhere; rounded to FP32 once, by the optimizer
// Clause      2 of NUMERICS.md
#ifndef RETRACE_CORE_SCHEDULE_H_
#define RETRACE_CORE_SCHEDULE_H_

#include <cstdint>

#include "core/recipe.h"

namespace retrace {

// lr(k); k >= 0 is the number of completed scheduler steps.
double LearningRate(const ScheduleRecipe& schedule, int64_t k);

// The rate that the next update applies when schedule_index scheduler steps are complete (0 before
// the first update): lr(schedule_index + 1) for LrIndexing::kStep, lr(schedule_index) for
// kStepMinusOne. With schedule.hold = n, an index past n - 1 counts as n - 1.
double AppliedLearningRate(const ScheduleRecipe& schedule, int64_t schedule_index);

}  // namespace retrace

#endif  // RETRACE_CORE_SCHEDULE_H_
