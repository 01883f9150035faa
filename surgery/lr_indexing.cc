// lr-indexing: which point of the schedule an update applies.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments& arguments, Recipe* recipe) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "update", {"n", "n-1"}));
  recipe->schedule.indexing = arguments.at("update") == "n" ? LrIndexing::kStep
                                                            : LrIndexing::kStepMinusOne;
  return {};
}

}  // namespace

const InterventionKind kLrIndexing = {
    .name = "lr-indexing",
    .summary = "Apply lr(n) or lr(n-1) in update n: frameworks differ by one",
    .touches = "recipe: schedule.indexing",
    .formula = "update n applies lr(n), or lr(n - 1)",
    .example = "lr-indexing:n-1",
    .reference = "Megatron Core's scheduler steps after the optimizer",
    .parameters = {{"update", "n: update n applies lr(n); n-1: update n applies lr(n-1)", ""}},
    .edit_recipe = Edit};

}  // namespace retrace
