// average: a weighted mean with another run's state.
#include "surgery/donor.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

const std::vector<std::string> kParts = {"p", "m", "v"};

Status Check(const Arguments& arguments) {
  RT_RETURN_IF_ERROR(NumberArgumentIn(arguments, "weight", 0, 1).status());
  RT_RETURN_IF_ERROR(PartsArgument(arguments, "what", kParts).status());
  return CheckDonorArguments(arguments);
}

// (1 - weight) * own + weight * other in FP64, rounded once.
Status Edit(const Arguments& arguments, Job& job) {
  RT_ASSIGN_OR_RETURN(const double weight, NumberArgumentIn(arguments, "weight", 0, 1));
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                      PartsArgument(arguments, "what", kParts));
  RT_ASSIGN_OR_RETURN(const std::shared_ptr<const Donor> donor, ReadDonor(arguments, job));
  const double rest = 1.0 - weight;
  const auto mean = [&](float* mine, const float* others, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      mine[i] = static_cast<float>(rest * static_cast<double>(mine[i]) +
                                   weight * static_cast<double>(others[i]));
    }
  };
  const std::string& only = arguments.at("only");
  for (const std::string& part : parts) {
    if (part == "p") ForEachCommonRun(*donor, only, Component::kParameter, job, mean);
    if (part == "m") ForEachCommonRun(*donor, only, Component::kM, job, mean);
    if (part == "v") ForEachCommonRun(*donor, only, Component::kV, job, mean);
  }
  return {};
}

}  // namespace

const InterventionKind kAverage = {
    .name = "average",
    .summary = "Take the weighted mean with a state of this or another run; counters stay",
    .touches = "state: p, or what is named",
    .formula = "x = (1 - weight) x + weight other",
    .example = "average:from=runs/healthy,at=12,weight=0.5@13",
    .reference =
        "Izmailov et al. 2018, arXiv 1803.05407 (SWA); Kaddour 2022, arXiv 2209.14981 (LAWA)",
    .parameters = {{"from", "directory of the other run", ""},
                   {"at", "its position k", ""},
                   {"weight", "of the other state, 0 .. 1", ""},
                   {"what", "of p, m and v, joined by +", "p"},
                   {"digest",
                    "that RUN@k has to have, or any, for which a lineage names the one it had",
                    "any"},
                   {"only", "glob over tensor names", "*"}},
    .check = Check,
    .edit_state = Edit,
    .resolve = ResolveDonor};

}  // namespace retrace
