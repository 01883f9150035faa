// graft: parts of another run's state, transplanted.
#include <fmt/format.h>

#include <algorithm>

#include "core/recipe_toml.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

const std::vector<std::string> kParts = {"p", "m", "v", "t", "schedule", "cursor"};

// "p+m+v" -> parts
Result<std::vector<std::string>> PartsOf(const Arguments& arguments) {
  std::vector<std::string> parts;
  std::string rest = arguments.at("what") + "+";
  for (size_t plus; (plus = rest.find('+')) != std::string::npos; rest = rest.substr(plus + 1)) {
    Arguments one = {{"what", rest.substr(0, plus)}};
    RT_RETURN_IF_ERROR(ChoiceArgument(one, "what", kParts));
    parts.push_back(one["what"]);
  }
  return parts;
}

Result<int64_t> PositionOf(const Arguments& arguments) {
  RT_ASSIGN_OR_RETURN(const uint64_t position, WholeArgument(arguments, "at"));
  return static_cast<int64_t>(position);
}

Status Check(const Arguments& arguments) {
  RT_RETURN_IF_ERROR(PartsOf(arguments).status());
  if (arguments.at("digest") != "any") {
    RT_RETURN_IF_ERROR(ParseDigest(arguments.at("digest")).status().Within("digest"));
  }
  return PositionOf(arguments).status();
}

// The whole of another run's state.
struct Donor {
  Layout layout;
  State state;
};

Result<Donor> ReadDonor(const Arguments& arguments, Engine& engine) {
  const std::string& from = arguments.at("from");
  RT_ASSIGN_OR_RETURN(const int64_t position, PositionOf(arguments));
  RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(from, engine.threads()));
  RT_ASSIGN_OR_RETURN(const Recipe recipe, ParseRecipe(run.recipe_text(), from + "/recipe.toml"));
  RT_ASSIGN_OR_RETURN(Layout layout,
                      Layout::Make(recipe.model, recipe.topology.virtual_shards));
  RT_ASSIGN_OR_RETURN(State state, Timeline(run, layout, engine).Seek(position));
  const std::string digest = run.history().Find(position)->digest.Hex();
  if (arguments.at("digest") != "any" && arguments.at("digest") != digest) {
    return UsageError(fmt::format("digest: expected {}, but {}@{} has {}", arguments.at("digest"),
                                  from, position, digest));
  }
  return Donor{std::move(layout), std::move(state)};
}

// Every tensor that matches has to exist in the donor, with the same shape.
Status CheckShapes(const Donor& donor, const Layout& layout, const Arguments& arguments) {
  RT_RETURN_IF_ERROR(CheckGlob(layout, arguments.at("only")));
  for (const TensorSpec& spec : layout.tensors()) {
    if (!GlobMatches(arguments.at("only"), spec.name)) continue;
    const int found = donor.layout.Find(spec.name);
    if (found < 0) {
      return UsageError(fmt::format("{} has no tensor {}; leave it out with only=GLOB",
                                    arguments.at("from"), spec.name));
    }
    const TensorSpec& other = donor.layout.tensors()[found];
    if (other.rows == spec.rows && other.cols == spec.cols) continue;
    return UsageError(fmt::format("{}: expected {} x {}, {} has {} x {}", spec.name, spec.rows,
                                  spec.cols, arguments.at("from"), other.rows, other.cols));
  }
  return {};
}

// Copies what two pieces of one tensor have in common.
void CopyOverlap(const Piece& from, const float* source, const Piece& to, float* target) {
  const int64_t row_first = std::max(from.row_first, to.row_first);
  const int64_t row_last = std::min(from.row_last, to.row_last);
  const int64_t col_first = std::max(from.col_first, to.col_first);
  const int64_t col_last = std::min(from.col_last, to.col_last);
  if (col_first >= col_last) return;
  for (int64_t row = row_first; row < row_last; ++row) {
    const float* in = source + from.offset + (row - from.row_first) * from.cols() + col_first -
                      from.col_first;
    float* out = target + to.offset + (row - to.row_first) * to.cols() + col_first - to.col_first;
    std::copy_n(in, col_last - col_first, out);
  }
}

void CopyComponent(const Donor& donor, const std::string& only, Component component, Job& job) {
  ForEachPiece(job, only, [&](const TensorSpec& spec, const Piece& to, ShardState& slab) {
    const int tensor = donor.layout.Find(spec.name);
    for (int shard = 0; shard < donor.layout.shards(); ++shard) {
      const Piece* from = donor.layout.FindPiece(shard, tensor);
      if (from == nullptr) continue;
      CopyOverlap(*from, donor.state.shards[shard].slab(component).data(), to,
                  slab.slab(component).data());
    }
  });
}

Status Edit(const Arguments& arguments, Job& job) {
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> parts, PartsOf(arguments));
  const Result<Donor> donor = ReadDonor(arguments, job.engine());
  Status status = donor.status();
  if (status.ok()) status = CheckShapes(*donor, job.layout(), arguments);
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), status));
  const std::string& only = arguments.at("only");
  Counters& counters = job.state().state.counters;
  const Counters& others = donor->state.counters;
  for (const std::string& part : parts) {
    if (part == "p") CopyComponent(*donor, only, Component::kParameter, job);
    if (part == "m") CopyComponent(*donor, only, Component::kM, job);
    if (part == "v") CopyComponent(*donor, only, Component::kV, job);
    if (part == "schedule") counters.schedule_index = others.schedule_index;
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
                   {"what", "of p, m, v, t, schedule and cursor, joined by +", ""},
                   {"digest", "that RUN@k has to have, or any", "any"},
                   {"only", "glob over the names of tensors, for p, m, v and t", "*"}},
    .check = Check,
    .edit_state = Edit};

}  // namespace retrace
