// bias-correction: whether Adam's moments are divided by 1 - beta^t.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "of", {"both", "m", "v", "none"}));
  const std::string& of = arguments.at("of");
  if (of == "both") recipe->optimizer.bias_correction = BiasCorrection::kBoth;
  if (of == "m") recipe->optimizer.bias_correction = BiasCorrection::kM;
  if (of == "v") recipe->optimizer.bias_correction = BiasCorrection::kV;
  if (of == "none") recipe->optimizer.bias_correction = BiasCorrection::kNone;
  return {};
}

}  // namespace

const InterventionKind kBiasCorrection = {
    .name = "bias-correction",
    .summary = "Correct the bias of m, v, both or neither",
    .touches = "recipe: optimizer.bias_correction",
    .formula = "m / (1 - beta1^t) and v / (1 - beta2^t), or m and v themselves",
    .example = "bias-correction:none",
    .reference = "Kingma and Ba 2015, arXiv 1412.6980, section 3",
    .parameters = {{"of", "both, m, v or none", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
