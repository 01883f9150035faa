// skip-update: an update is computed and not applied.
#include "surgery/registry.h"

namespace retrace {
namespace {

Result<bool> Advances(const Arguments& arguments, const char* name) {
  RT_RETURN_IF_ERROR(ChoiceArgument(arguments, name, {"advance", "stay"}));
  return arguments.at(name) == "advance";
}

Status Edit(const Arguments& arguments, const DatedUpdate& dated, UpdateDirective* directive) {
  RT_ASSIGN_OR_RETURN(directive->t_moves, Advances(arguments, "t"));
  RT_ASSIGN_OR_RETURN(directive->schedule_moves, Advances(arguments, "schedule"));
  RT_ASSIGN_OR_RETURN(const bool cursor_moves, Advances(arguments, "cursor"));
  if (!cursor_moves) directive->cursor = dated.cursor;
  directive->skip = true;
  return {};
}

Status Check(const Arguments& arguments) {
  UpdateDirective directive;
  return Edit(arguments, {}, &directive);
}

}  // namespace

const InterventionKind kSkipUpdate = {
    .name = "skip-update",
    .summary = "Compute an update and leave parameters and moments as they are",
    .touches = "update: parameters, m and v stay; counters as told",
    .formula = "p = p, m = m, v = v",
    .example = "skip-update:t=stay,schedule=advance,cursor=advance@6",
    .reference =
        "Chowdhery et al. 2022, arXiv 2204.02311, section 5.1; Micikevicius et al. 2018, arXiv "
        "1710.03740 (updates skipped by loss scaling)",
    .parameters = {{"t", "Adam's step counter: advance or stay", ""},
                   {"schedule", "updates that the learning rate counts as done: advance or stay",
                    ""},
                   {"cursor",
                    "samples consumed: advance, or stay (the next update gets this batch)", ""}},
    .check = Check,
    .edit_update = Edit};

}  // namespace retrace
