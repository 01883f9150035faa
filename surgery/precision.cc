// precision: other rounding points: a preset, or one point.
#include "core/precision.h"

#include "surgery/registry.h"

namespace retrace {
namespace {

Status Apply(const Arguments& arguments, PrecisionPolicy* policy) {
  if (arguments.at("preset") != "none") {
    RT_ASSIGN_OR_RETURN(*policy, PrecisionPreset(arguments.at("preset")));
  }
  if (arguments.at("point") != "none") {
    RT_RETURN_IF_ERROR(SetPrecision(arguments.at("point"), arguments.at("format"), policy));
  }
  return CheckPrecision(*policy);
}

Status Check(const Arguments& arguments) {
  if (arguments.at("preset") == "none" && arguments.at("point") == "none") {
    return UsageError("expected preset=NAME, or point=NAME,format=bf16|fp32");
  }
  if (arguments.at("point") != "none" && arguments.at("format") == "none") {
    return UsageError("point=" + arguments.at("point") + " needs format=bf16|fp32");
  }
  RT_ASSIGN_OR_RETURN(PrecisionPolicy policy, PrecisionPreset("fp32"));
  return Apply(arguments, &policy);
}

Status Edit(const Arguments& arguments, Recipe* recipe) {
  return Apply(arguments, &recipe->precision);
}

}  // namespace

const InterventionKind kPrecision = {
    .name = "precision",
    .summary = "Recompute with other rounding points: a preset, one point, or both in this order",
    .touches = "recipe: precision",
    .formula = "y = round(y) at each rounding point",
    .example = "precision:fp32",
    .reference = "NVIDIA-NeMo/Automodel issue 3443 (FP32-sensitive ops)",
    .parameters = {{"preset", "bf16, bf16-sensitive-fp32, fp32 or fp64", "none"},
                   {"point", "a rounding point, as softmax or scores.grad", "none"},
                   {"format", "of the point: bf16 or fp32", "none"}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
