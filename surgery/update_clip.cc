// update-clip: the largest root mean square of a tensor's update before the learning rate.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  recipe->optimizer.update_clip = 0;
  if (arguments.at("rms") == "none") return {};
  const Result<double> rms = NumberArgumentIn(arguments, "rms", 0, 1e30);
  if (!rms.ok() || *rms == 0) {
    return UsageError("rms: expected none or a number above 0 and at most 1e+30, got '" +
                      arguments.at("rms") + "'");
  }
  recipe->optimizer.update_clip = *rms;
  return {};
}

}  // namespace

const InterventionKind kUpdateClip = {
    .name = "update-clip",
    .summary = "Scale a tensor's update down where the gradient is large beside sqrt(v)",
    .touches = "recipe: optimizer.update_clip",
    .formula = "u = u * min(1, rms / RMS(g / sqrt(v)))",
    .example = "update-clip:1.0",
    .reference =
        "Shazeer and Stern 2018, arXiv 1804.04235; Wortsman et al. 2023, arXiv 2304.13013 "
        "(StableAdamW, which scales the decay too)",
    .parameters = {{"rms", "largest root mean square of g / sqrt(v), 1 as published, or none", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
