// precision: other rounding points: a preset, or one point.
#include "core/precision.h"

#include "core/nearest_name.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

struct OpClass {
  const char* name;
  std::vector<Point> points;
};

// What sums, squares or exponentiates, by what frameworks keep in FP32 together.
const std::vector<OpClass>& OpClasses() {
  static const std::vector<OpClass> kClasses = {
      {"norms",
       {Point::kInputNorm, Point::kQkNorm, Point::kVNorm, Point::kPostAttentionNorm,
        Point::kPreMlpNorm, Point::kPostMlpNorm, Point::kFinalNorm}},
      {"attention-softmax", {Point::kScores, Point::kSoftmax}},
      {"residual-stream", {Point::kResidual, Point::kLayerScalar}},
      {"head", {Point::kLogits, Point::kSoftcap, Point::kCrossEntropy}},
      {"mlp", {Point::kGateUp, Point::kGelu, Point::kGateTimesUp, Point::kDown}},
      {"projections", {Point::kQkv, Point::kOProj, Point::kGateUp, Point::kDown}}};
  return kClasses;
}

// A class or a single point -> points.
Result<std::vector<Point>> PointsOf(const std::string& name) {
  std::vector<std::string> names;
  for (const OpClass& c : OpClasses()) {
    if (name == c.name) return c.points;
    names.push_back(c.name);
  }
  for (int i = 0; i < kNumPoints; ++i) {
    const Point point = static_cast<Point>(i);
    if (name == PointName(point)) return std::vector<Point>{point};
    names.push_back(PointName(point));
  }
  return UsageError("ops: expected classes or points joined by +, got '" + name +
                    "'; the nearest is '" + NearestName(name, names) + "'");
}

// Tensors of the ops and their gradients.
Status ApplyOps(const Arguments& arguments, PrecisionPolicy* policy) {
  std::string rest = arguments.at("ops") + "+";
  for (size_t plus; (plus = rest.find('+')) != std::string::npos; rest = rest.substr(plus + 1)) {
    RT_ASSIGN_OR_RETURN(const std::vector<Point> points, PointsOf(rest.substr(0, plus)));
    for (const Point point : points) {
      const std::string name = PointName(point);
      RT_RETURN_IF_ERROR(SetPrecision(name, arguments.at("format"), policy));
      if (point == Point::kCrossEntropy) continue;
      RT_RETURN_IF_ERROR(SetPrecision(name + ".grad", arguments.at("format"), policy));
    }
  }
  return {};
}

Status Apply(const Arguments& arguments, PrecisionPolicy* policy) {
  if (arguments.at("preset") != "none") {
    RT_ASSIGN_OR_RETURN(*policy, PrecisionPreset(arguments.at("preset")));
  }
  if (arguments.at("point") != "none") {
    RT_RETURN_IF_ERROR(SetPrecision(arguments.at("point"), arguments.at("format"), policy));
  }
  if (arguments.at("ops") != "none") RT_RETURN_IF_ERROR(ApplyOps(arguments, policy));
  return CheckPrecision(*policy);
}

Status Check(const Arguments& arguments) {
  const bool single = arguments.at("point") != "none" || arguments.at("ops") != "none";
  if (arguments.at("preset") == "none" && !single) {
    return UsageError(
        "expected preset=NAME, or ops=NAMES,format=bf16|fp32, or point=NAME,format=...");
  }
  if (single && arguments.at("format") == "none") {
    return UsageError("ops= and point= need format=bf16|fp32");
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
    .summary = "Recompute with other rounding points: a preset, then one point, then whole ops",
    .touches = "recipe: precision",
    .formula = "y = round(y) at each rounding point",
    .example = "precision:fp32",
    .reference = "NVIDIA-NeMo/Automodel issue 3443 (FP32-sensitive ops)",
    .parameters = {{"preset", "bf16, bf16-sensitive-fp32, fp32 or fp64", "none"},
                   {"point", "a rounding point, as softmax or scores.grad", "none"},
                   {"ops",
                    "points with their gradients, or classes of them (norms, attention-softmax, "
                    "residual-stream, head, mlp, projections), joined by +",
                    "none"},
                   {"format",
                    "of the point or the ops: bf16 or fp32 (fp64 is a preset: all or nothing)",
                    "none"}},
    .check = Check,
    .edit_recipe = Edit};

}  // namespace retrace
