// virtual-shards: the same state, computed as another number of shards: another order of sums.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Remake(const Arguments& arguments, Recipe* recipe) {
  RT_ASSIGN_OR_RETURN(const uint64_t count, WholeArgument(arguments, "count"));
  if (count < 1 || count > 256 || (count & (count - 1)) != 0) {
    return UsageError("count: expected a power of two in 1 .. 256, got '" + arguments.at("count") +
                      "'");
  }
  recipe->topology.virtual_shards = static_cast<int64_t>(count);
  return {};
}

Status Check(const Arguments& arguments) {
  Recipe recipe;
  return Remake(arguments, &recipe);
}

// No value changes; who owns it does.
Status Edit(const Arguments&, Job&) { return {}; }

}  // namespace

const InterventionKind kVirtualShards = {
    .name = "virtual-shards",
    .summary =
        "Compute the model as another number of virtual shards: the same state, other orders of "
        "sums. A control: what it changes is rounding alone",
    .touches = "state: who owns what; recipe: topology.virtual_shards",
    .formula = "p, m and v as they are",
    .example = "virtual-shards:1",
    .reference = "core/NUMERICS.md, clause 7",
    .parameters = {{"count", "V, a power of two that the model's shape allows", ""}},
    .check = Check,
    .edit_state = Edit,
    .remake = Remake};

}  // namespace retrace
