// set-counter: the counters that surgery may edit, each by name.
#include "surgery/registry.h"

namespace retrace {
namespace {

constexpr const char* kNames[] = {"schedule", "cursor", "t"};
constexpr int64_t kMost = int64_t{1} << 40;  // far from overflow when updates add to it

Result<int64_t> CounterArgument(const Arguments& arguments, const std::string& name) {
  RT_ASSIGN_OR_RETURN(const uint64_t value, WholeArgument(arguments, name));
  if (value <= static_cast<uint64_t>(kMost)) return static_cast<int64_t>(value);
  return UsageError(name + ": expected at most 2^40, got '" + arguments.at(name) + "'");
}

Status Check(const Arguments& arguments) {
  bool any = false;
  for (const char* name : kNames) {
    if (arguments.at(name) == "keep") continue;
    any = true;
    RT_RETURN_IF_ERROR(CounterArgument(arguments, name).status());
  }
  return any ? Status() : UsageError("expected one of schedule=N, cursor=N and t=N at least");
}

Status MoveCursor(const Arguments& arguments, int64_t, int64_t* cursor) {
  if (arguments.at("cursor") == "keep") return {};
  RT_ASSIGN_OR_RETURN(*cursor, CounterArgument(arguments, "cursor"));
  return {};
}

Status Edit(const Arguments& arguments, Job& job) {
  Counters& counters = job.state().state.counters;
  const std::vector<TensorSpec>& tensors = job.layout().tensors();
  RT_RETURN_IF_ERROR(CheckGlob(job.layout(), arguments.at("only")));
  if (arguments.at("schedule") != "keep") {
    RT_ASSIGN_OR_RETURN(counters.schedule_index, CounterArgument(arguments, "schedule"));
  }
  RT_RETURN_IF_ERROR(MoveCursor(arguments, 0, &counters.data_cursor));
  if (arguments.at("t") == "keep") return {};
  RT_ASSIGN_OR_RETURN(const int64_t adam_t, CounterArgument(arguments, "t"));
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (GlobMatches(arguments.at("only"), tensors[i].name)) counters.adam_t[i] = adam_t;
  }
  return {};
}

}  // namespace

const InterventionKind kSetCounter = {
    .name = "set-counter",
    .summary = "Set the schedule's index, the data cursor or Adam's t",
    .touches = "state: counters",
    .formula = "counter = N",
    .example = "set-counter:schedule=0,t=0@6",
    .reference = "Kingma and Ba 2015, arXiv 1412.6980 (bias correction by t)",
    .parameters = {{"schedule", "updates that the learning rate counts as done, or keep", "keep"},
                   {"cursor", "samples that count as consumed, or keep", "keep"},
                   {"t", "Adam's step counter, or keep", "keep"},
                   {"only", "glob over the names of tensors whose t is set", "*"}},
    .check = Check,
    .edit_state = Edit,
    .move_cursor = MoveCursor};

}  // namespace retrace
