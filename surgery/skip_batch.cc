// skip-batch: batches that are never consumed.
#include "surgery/registry.h"

namespace retrace {
namespace {

constexpr uint64_t kMost = uint64_t{1} << 40;  // far from overflow

Result<int64_t> Count(const Arguments& arguments) {
  RT_ASSIGN_OR_RETURN(const uint64_t count, WholeArgument(arguments, "count"));
  if (count >= 1 && count <= kMost) return static_cast<int64_t>(count);
  return UsageError("count: expected a number of batches from 1 to 2^40, got '" +
                    arguments.at("count") + "'");
}

Status Check(const Arguments& arguments) { return Count(arguments).status(); }

Status MoveCursor(const Arguments& arguments, int64_t samples, int64_t* cursor) {
  RT_ASSIGN_OR_RETURN(const int64_t count, Count(arguments));
  *cursor += count * samples;
  return {};
}

Status Edit(const Arguments& arguments, Job& job) {
  return MoveCursor(arguments, job.recipe().data.SamplesPerStep(),
                    &job.state().state.counters.data_cursor);
}

}  // namespace

const InterventionKind kSkipBatch = {
    .name = "skip-batch",
    .summary = "Pass over the next batches: the updates go on with those behind them",
    .touches = "state: the data cursor",
    .formula = "cursor = cursor + count * samples of an update",
    .example = "skip-batch:count=2@6",
    .reference =
        "Chowdhery et al. 2022, arXiv 2204.02311, section 5.1 (skipping batches around a spike)",
    .parameters = {{"count", "batches", "1"}},
    .check = Check,
    .edit_state = Edit,
    .move_cursor = MoveCursor};

}  // namespace retrace
