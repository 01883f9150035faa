// swap-batch: the batches of two updates, exchanged.
#include "surgery/registry.h"

namespace retrace {
namespace {

Status Edit(const Arguments&, const DatedUpdate& dated, UpdateDirective* directive) {
  if (dated.first == dated.last) {
    return UsageError("expected the dates @k..l of two updates, whose batches change places");
  }
  const int64_t apart = dated.last - dated.first;
  const bool first = dated.update == dated.first, last = dated.update == dated.last;
  if (!first && !last) return {};
  directive->samples =
      Consecutive(dated.cursor + (first ? apart : -apart) * dated.samples, dated.samples);
  return {};
}

}  // namespace

const InterventionKind kSwapBatch = {
    .name = "swap-batch",
    .summary = "Exchange the batches of update k and update l, the ends of the dates",
    .touches = "update: its samples",
    .formula = "update k has the samples of update l, and l those of k",
    .example = "swap-batch@6..9",
    .reference =
        "Chowdhery et al. 2022, arXiv 2204.02311, section 5.1 (a batch alone is not the cause)",
    .parameters = {},
    .edit_update = Edit};

}  // namespace retrace
