#include "surgery/donor.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "core/recipe_toml.h"

namespace retrace {
namespace {

// The donor that was read last, for as long as somebody holds it: a search transplants from one state
// thousands of times, from several threads.
class HeldDonor {
 public:
  std::shared_ptr<const Donor> Find(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return key == key_ ? donor_.lock() : nullptr;
  }
  void Hold(const std::string& key, const std::shared_ptr<const Donor>& donor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    key_ = key;
    donor_ = donor;
  }

 private:
  std::mutex mutex_;
  std::string key_;  // all that the state depends on: its digest, and its layout
  std::weak_ptr<const Donor> donor_;
};

Result<PositionEntry> CheckedDonor(const Arguments& arguments, const PositionEntry& entry) {
  const std::string &expected = arguments.at("digest"), got = entry.digest.Hex();
  if (expected == "any" || expected == got) return entry;
  return UsageError(fmt::format("digest: expected {}, but {}@{} has {}", expected,
                                arguments.at("from"), arguments.at("at"), got));
}

Result<std::shared_ptr<const Donor>> Read(const Arguments& arguments, Engine& engine) {
  const std::string& from = arguments.at("from");
  RT_ASSIGN_OR_RETURN(const uint64_t at, WholeArgument(arguments, "at"));
  const int64_t position = static_cast<int64_t>(at);
  RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(from, engine.threads()));
  RT_ASSIGN_OR_RETURN(const Recipe recipe, ParseRecipe(run.recipe_text(), from + "/recipe.toml"));
  RT_ASSIGN_OR_RETURN(Layout layout, Layout::Make(recipe.model, recipe.topology.virtual_shards));
  static HeldDonor held;
  const PositionEntry* entry = run.history().Find(position);
  const std::string key = (entry != nullptr ? entry->digest.Hex() : "") + run.recipe_text();
  std::shared_ptr<const Donor> donor = held.Find(key);
  if (donor == nullptr) {
    RT_ASSIGN_OR_RETURN(State state, Timeline(run, layout, engine).Seek(position));
    donor = std::make_shared<const Donor>(Donor{std::move(layout), std::move(state)});
    held.Hold(key, donor);
  }
  RT_RETURN_IF_ERROR(CheckedDonor(arguments, *entry).status());
  return donor;
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

// What two pieces of one tensor have in common, row by row.
void VisitOverlap(const Piece& from, const float* source, const Piece& to, float* target,
                  const std::function<void(float*, const float*, int64_t)>& visit) {
  const int64_t row_first = std::max(from.row_first, to.row_first);
  const int64_t row_last = std::min(from.row_last, to.row_last);
  const int64_t col_first = std::max(from.col_first, to.col_first);
  const int64_t col_last = std::min(from.col_last, to.col_last);
  if (col_first >= col_last) return;
  for (int64_t row = row_first; row < row_last; ++row) {
    const float* in =
        source + from.offset + (row - from.row_first) * from.cols() + col_first - from.col_first;
    float* out = target + to.offset + (row - to.row_first) * to.cols() + col_first - to.col_first;
    visit(out, in, col_last - col_first);
  }
}

}  // namespace

Status CheckDonorArguments(const Arguments& arguments) {
  RT_RETURN_IF_ERROR(DigestArgument(arguments, "digest"));
  return WholeArgument(arguments, "at").status();
}

Result<PositionEntry> FindDonor(const Arguments& arguments) {
  RT_ASSIGN_OR_RETURN(const uint64_t at, WholeArgument(arguments, "at"));
  RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(arguments.at("from")));
  const PositionEntry* entry = run.history().Find(static_cast<int64_t>(at));
  if (entry == nullptr) {
    return UsageError(fmt::format("{}@{}: the run has positions {}..{}", run.dir(), at,
                                  run.history().first_position(), run.history().last_position()));
  }
  return CheckedDonor(arguments, *entry);
}

Status ResolveDonor(Arguments* arguments) {
  RT_ASSIGN_OR_RETURN(const PositionEntry donor, FindDonor(*arguments));
  (*arguments)["digest"] = donor.digest.Hex();
  return {};
}

Result<std::shared_ptr<const Donor>> ReadDonor(const Arguments& arguments, Job& job) {
  Result<std::shared_ptr<const Donor>> donor = Read(arguments, job.engine());
  Status status = donor.status();
  if (status.ok()) status = CheckShapes(**donor, job.layout(), arguments);
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), status));
  return donor;
}

void ForEachCommonRun(const Donor& donor, const std::string& only, Component component, Job& job,
                      const std::function<void(float*, const float*, int64_t)>& visit) {
  ForEachPiece(job, only, [&](const TensorSpec& spec, const Piece& to, ShardState& slab) {
    const int tensor = donor.layout.Find(spec.name);
    for (int shard = 0; shard < donor.layout.shards(); ++shard) {
      const Piece* from = donor.layout.FindPiece(shard, tensor);
      if (from == nullptr) continue;
      VisitOverlap(*from, donor.state.shards[shard].slab(component).data(), to,
                   slab.slab(component).data(), visit);
    }
  });
}

Result<std::vector<std::string>> PartsArgument(const Arguments& arguments, const std::string& name,
                                               const std::vector<std::string>& known) {
  std::vector<std::string> parts;
  std::string rest = arguments.at(name) + "+";
  for (size_t plus; (plus = rest.find('+')) != std::string::npos; rest = rest.substr(plus + 1)) {
    Arguments one = {{name, rest.substr(0, plus)}};
    RT_RETURN_IF_ERROR(ChoiceArgument(one, name, known));
    if (std::find(parts.begin(), parts.end(), one[name]) != parts.end()) {
      return UsageError(fmt::format("{}: '{}' is given twice", name, one[name]));
    }
    parts.push_back(one[name]);
  }
  return parts;
}

}  // namespace retrace
