// Remaking: a branch under another recipe than its parent's, with other tensors or other virtual
// shards. Used by branches and their plans.
#ifndef RETRACE_SURGERY_REMAKE_H_
#define RETRACE_SURGERY_REMAKE_H_

#include <memory>
#include <optional>
#include <vector>

#include "surgery/intervention.h"

namespace retrace {

// The recipe of a branch that begins with update `first`: what the interventions make of the job's;
// nothing where none of them remakes it. Errors: kUsage for a recipe that is not valid or that the
// job's ranks can not carry, and for a date other than `first`.
Result<std::optional<Recipe>> RemadeRecipe(const Job& job,
                                           const std::vector<Intervention>& interventions,
                                           int64_t first);

// A job of that recipe in the same ranks, at the same state: every element of a tensor that both
// have by name, and its t; what only the new one has is zero. Position, counters and rule memories
// stay. Collective; needs memory for one component of the whole model in every rank.
Result<std::unique_ptr<Job>> RemadeJob(Job& job, const Recipe& recipe);

}  // namespace retrace

#endif  // RETRACE_SURGERY_REMAKE_H_
