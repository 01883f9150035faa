// repeat-batch: the batch before, once more.
#include "surgery/registry.h"

namespace retrace {
namespace {

// With then=lost the cursor goes on, so the batch lies one further back with each update.
Status Edit(const Arguments& arguments, const DatedUpdate& dated, UpdateDirective* directive) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, "then", {"later", "lost"}));
  const bool later = arguments.at("then") == "later";
  const int64_t back = later ? 1 : dated.update - dated.first + 1;
  const int64_t first = dated.cursor - back * dated.samples;
  if (first < 0) {
    return UsageError("no batch comes before that of update " + std::to_string(dated.first));
  }
  directive->samples = Consecutive(first, dated.samples);
  if (later) directive->cursor = dated.cursor;
  return {};
}

Status Check(const Arguments& arguments) {
  UpdateDirective directive;
  return Edit(arguments, {.cursor = 1, .samples = 1}, &directive);
}

}  // namespace

const InterventionKind kRepeatBatch = {
    .name = "repeat-batch",
    .summary = "Consume the batch before the dates again, in each update of the dates",
    .touches = "update: its samples, and the data cursor",
    .formula = "samples = those before update k",
    .example = "repeat-batch:then=later@6",
    .reference =
        "docs/architecture.md, \"Surgery\"; Muennighoff et al. 2023, arXiv 2305.16264 (repeated "
        "data)",
    .parameters = {{"then",
                    "the batches of the dates themselves: later (consumed afterwards) or lost",
                    ""}},
    .check = Check,
    .edit_update = Edit};

}  // namespace retrace
