// lr: another learning rate: a factor on the schedule, a constant, that of one update, or another
// schedule.
#include "surgery/registry.h"

namespace retrace {
namespace {

constexpr double kMost = 1e30;

bool Given(const Arguments& arguments, const char* name) { return arguments.at(name) != "none"; }

Status SetRate(const Arguments& arguments, const char* name, double* rate) {
  if (!Given(arguments, name)) return {};
  RT_ASSIGN_OR_RETURN(*rate, NumberArgumentIn(arguments, name, 0, kMost));
  return {};
}

Status SetUpdates(const Arguments& arguments, const char* name, int64_t* updates) {
  if (!Given(arguments, name)) return {};
  RT_ASSIGN_OR_RETURN(const uint64_t value, WholeArgument(arguments, name));
  *updates = static_cast<int64_t>(value);
  return {};
}

Status SetConstant(const Arguments& arguments, ScheduleRecipe* schedule) {
  RT_RETURN_IF_ERROR(SetRate(arguments, "constant", &schedule->peak));
  schedule->initial = schedule->peak;  // not used, but above the peak it is no valid recipe
  schedule->shape = LrShape::kConstant;
  schedule->warmup_steps = 0;
  return {};
}

// 0 is a recipe's way to say that no rate is held.
Status SetHold(const Arguments& arguments, ScheduleRecipe* schedule) {
  RT_RETURN_IF_ERROR(SetUpdates(arguments, "hold", &schedule->hold));
  return schedule->hold >= 1 ? Status() : UsageError("hold: expected an update, from 1, got '0'");
}

Status SetSchedule(const Arguments& arguments, ScheduleRecipe* schedule) {
  if (Given(arguments, "shape")) {
    RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "shape", {"constant", "cosine"}));
    schedule->shape = arguments.at("shape") == "cosine" ? LrShape::kCosine : LrShape::kConstant;
  }
  RT_RETURN_IF_ERROR(SetRate(arguments, "initial", &schedule->initial));
  RT_RETURN_IF_ERROR(SetRate(arguments, "peak", &schedule->peak));
  RT_RETURN_IF_ERROR(SetRate(arguments, "minimum", &schedule->minimum));
  RT_RETURN_IF_ERROR(SetUpdates(arguments, "warmup", &schedule->warmup_steps));
  return SetUpdates(arguments, "total", &schedule->total_steps);
}

Status Edit(const Arguments& arguments, Recipe* recipe) {
  int forms = Given(arguments, "scale") + Given(arguments, "constant") + Given(arguments, "hold");
  bool schedule = false;
  for (const char* name : {"shape", "initial", "peak", "minimum", "warmup", "total"}) {
    schedule = schedule || Given(arguments, name);
  }
  if (forms + schedule != 1) {
    return UsageError(
        "expected one of scale=FACTOR, constant=LR, hold=UPDATE, and another schedule "
        "(shape, initial, peak, minimum, warmup, total)");
  }
  if (Given(arguments, "constant")) return SetConstant(arguments, &recipe->schedule);
  if (Given(arguments, "hold")) return SetHold(arguments, &recipe->schedule);
  if (schedule) return SetSchedule(arguments, &recipe->schedule);
  RT_ASSIGN_OR_RETURN(const double factor, NumberArgumentIn(arguments, "scale", 0, kMost));
  recipe->schedule.initial *= factor;
  recipe->schedule.peak *= factor;
  recipe->schedule.minimum *= factor;
  return {};
}

}  // namespace

const InterventionKind kLr = {
    .name = "lr",
    .summary =
        "Use another learning rate: the schedule times a factor, a constant, that of one update, "
        "or another schedule",
    .touches = "recipe: schedule",
    .formula = "p = p - lr * u",
    .example = "lr:scale=0.25@6..10",
    .reference = "Wortsman et al. 2023, arXiv 2309.14322 (LR sensitivity)",
    .parameters = {{"scale", "factor on the whole schedule", "none"},
                   {"constant", "the learning rate itself", "none"},
                   {"hold", "the update, by the schedule's count, whose rate later ones apply too",
                    "none"},
                   {"shape", "of another schedule: constant or cosine", "none"},
                   {"initial", "its rate before the warm-up", "none"},
                   {"peak", "its rate after the warm-up", "none"},
                   {"minimum", "its rate at the end", "none"},
                   {"warmup", "its updates of warm-up", "none"},
                   {"total", "its updates in all", "none"}},
    .edit_recipe = Edit};

}  // namespace retrace
