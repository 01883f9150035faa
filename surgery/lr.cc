// lr: another learning rate: a factor on the schedule, or a constant.
#include "surgery/registry.h"

namespace retrace {
namespace {

Result<double> NotNegative(const Arguments& arguments, const std::string& name) {
  RT_ASSIGN_OR_RETURN(const double value, NumberArgument(arguments, name));
  if (value >= 0) return value;
  return UsageError(name + ": expected a number of at least 0, got '" + arguments.at(name) + "'");
}

Status Check(const Arguments& arguments) {
  const bool scaled = arguments.at("scale") != "none", constant = arguments.at("constant") != "none";
  if (scaled == constant) return UsageError("expected one of scale=FACTOR and constant=LR");
  return NotNegative(arguments, scaled ? "scale" : "constant").status();
}

Status Edit(const Arguments& arguments, Recipe* recipe) {
  ScheduleRecipe& schedule = recipe->schedule;
  if (arguments.at("constant") != "none") {
    RT_ASSIGN_OR_RETURN(schedule.peak, NotNegative(arguments, "constant"));
    schedule.initial = schedule.peak;  // not used, but above the peak it is no valid recipe
    schedule.shape = LrShape::kConstant;
    schedule.warmup_steps = 0;
    return {};
  }
  RT_ASSIGN_OR_RETURN(const double factor, NotNegative(arguments, "scale"));
  schedule.initial *= factor;
  schedule.peak *= factor;
  schedule.minimum *= factor;
  return {};
}

}  // namespace

const InterventionKind kLr = {
    .name = "lr",
    .summary = "Use another learning rate: the schedule times a factor, or a constant",
    .touches = "recipe: schedule",
    .formula = "p = p - lr * u",
    .example = "lr:scale=0.25@6..10",
    .reference = "Wortsman et al. 2023, arXiv 2309.14322 (LR sensitivity)",
    .parameters = {{"scale", "factor on the whole schedule", "none"},
                   {"constant", "the learning rate itself", "none"}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
