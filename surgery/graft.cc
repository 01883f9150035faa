// graft: parts of another run's state, transplanted.
#include <algorithm>

#include "surgery/donor.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

const std::vector<std::string> kParts = {"p", "m", "v", "t", "schedule", "cursor", "memory"};

Status Check(const Arguments& arguments) {
  RT_RETURN_IF_ERROR(PartsArgument(arguments, "what", kParts).status());
  return CheckDonorArguments(arguments);
}

Status MoveCursor(const Arguments& arguments, int64_t, int64_t* cursor) {
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                      PartsArgument(arguments, "what", kParts));
  if (std::find(parts.begin(), parts.end(), "cursor") == parts.end()) return {};
  RT_ASSIGN_OR_RETURN(const PositionEntry donor, FindDonor(arguments));
  *cursor = donor.counters.data_cursor;
  return {};
}

void Copy(float* mine, const float* others, int64_t n) { std::copy_n(others, n, mine); }

Status Edit(const Arguments& arguments, Job& job) {
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                      PartsArgument(arguments, "what", kParts));
  RT_ASSIGN_OR_RETURN(const std::shared_ptr<const Donor> donor, ReadDonor(arguments, job));
  const std::string& only = arguments.at("only");
  Counters& counters = job.state().state.counters;
  const Counters& others = donor->state.counters;
  for (const std::string& part : parts) {
    if (part == "p") ForEachCommonRun(*donor, only, Component::kParameter, job, Copy);
    if (part == "m") ForEachCommonRun(*donor, only, Component::kM, job, Copy);
    if (part == "v") ForEachCommonRun(*donor, only, Component::kV, job, Copy);
    if (part == "schedule") counters.schedule_index = others.schedule_index;
    if (part == "memory") job.state().state.memory = donor->state.memory;
    if (part == "cursor") counters.data_cursor = others.data_cursor;
    for (size_t t = 0; part == "t" && t < counters.adam_t.size(); ++t) {
      const std::string& name = job.layout().tensors()[t].name;
      if (GlobMatches(only, name)) counters.adam_t[t] = others.adam_t[donor->layout.Find(name)];
    }
  }
  return {};
}

}  // namespace

const InterventionKind kGraft = {
    .name = "graft",
    .summary = "Take parameters, moments or counters from a state of any other run",
    .touches = "state: what is named",
    .formula = "x = other",
    .example = "graft:from=runs/healthy,at=12,what=m+v,only=model.layers.*@13",
    .reference = "Chowdhery et al. 2022, arXiv 2204.02311 (same batches, another state: no spike)",
    .parameters = {{"from", "directory of the other run", ""},
                   {"at", "its position k", ""},
                   {"what", "of p, m, v, t, schedule, cursor and memory (of rules), joined by +",
                    ""},
                   {"digest",
                    "that RUN@k has to have, or any, for which a lineage names the one it had",
                    "any"},
                   {"only", "glob over the names of tensors, for p, m, v and t", "*"}},
    .check = Check,
    .edit_state = Edit,
    .move_cursor = MoveCursor,
    .resolve = ResolveDonor};

}  // namespace retrace
