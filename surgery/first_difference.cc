#include "surgery/first_difference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>

#include "replay/exchange.h"
#include "replay/trace_diff.h"
#include "surgery/traced_update.h"

namespace retrace {
namespace {

using OpList = std::vector<UpdateTracer::TracedOp>;

// What one life of an update left, with the job that lived it.
struct Life {
  std::unique_ptr<Job> job;
  std::unique_ptr<UpdateTracer> tracer;
  TracedUpdate traced;
};

Result<Life> Live(Comm& comm, const JobOptions& options, const DifferenceSide& side, int64_t update,
                  std::function<bool(std::string_view)> tensors) {
  const RunReader& run = *side.run;
  RT_ASSIGN_OR_RETURN(const Recipe recipe,
                      ParseRecipe(run.recipe_text(), run.dir() + "/recipe.toml"));
  Life life;
  RT_ASSIGN_OR_RETURN(life.job, Job::Make(recipe, comm, options));
  life.tracer = std::make_unique<UpdateTracer>(
      *life.job, TraceOptions{.evaluation = true,
                              .tensors = std::move(tensors),
                              .before = side.before});
  Result<TracedUpdate> traced = TraceRecorded(run, *life.job, update, *life.tracer);
  if (traced.ok()) life.traced = std::move(traced).value();
  else if (life.tracer->ops().empty()) return traced.status();
  return life;  // ranks that disagree end an update, but not the list of what they did
}

// A rank with a fault may have another record than its peers.
Result<bool> AllSay(Comm& comm, bool mine) {
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      GatherTexts(comm, comm.World(), mine ? "yes" : "no"));
  return std::count(all.begin(), all.end(), "yes") == std::ssize(all);
}

std::string WithoutRank(const std::string& name) {
  const size_t at = name.rfind("@rank");
  return at == std::string::npos ? name : name.substr(0, at);
}

// The first op, in order of execution, that the sides have not alike: its place in each list; -1: not
// there.
struct OpPair {
  int64_t a = -1, b = -1;
};

std::optional<OpPair> FirstOtherOp(const OpList& a, const OpList& b) {
  const size_t common = std::min(a.size(), b.size());
  size_t i = 0;
  while (i < common && a[i].name == b[i].name && a[i].digest == b[i].digest) ++i;
  if (i == a.size() && i == b.size()) return std::nullopt;
  const auto find = [](const OpList& ops, const std::string& name) {
    const auto found = std::find_if(ops.begin(), ops.end(),
                                    [&](const auto& op) { return op.name == name; });
    return found == ops.end() ? int64_t{-1} : found - ops.begin();
  };
  const auto at = static_cast<int64_t>(i);
  if (i == a.size()) return OpPair{find(a, WithoutRank(b[i].name)), at};
  if (i == b.size()) return OpPair{at, find(b, WithoutRank(a[i].name))};
  if (a[i].name == b[i].name) return OpPair{at, at};
  // Only one side has the op: a rank's other bits, or what the other's recipe leaves out.
  if (find(b, a[i].name) < 0) return OpPair{at, find(b, WithoutRank(a[i].name))};
  return OpPair{find(a, WithoutRank(b[i].name)), at};
}

std::vector<double> ValuesOf(const std::string& bytes, TensorType type) {
  if (type == TensorType::kF64) {
    std::vector<double> values(bytes.size() / sizeof(double));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(double));
    return values;
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
  return {values.begin(), values.end()};
}

DifferingElement ElementOf(std::string name, int64_t cols, const TensorDifference& difference) {
  return {std::move(name), cols, *difference.first, difference.differing, difference.elements};
}

// The op's elements of both sides, compared. Collective.
Status ReadElement(Comm& comm, const JobOptions& options, const DifferenceSide& a,
                   const DifferenceSide& b, int64_t update, const std::string& name_a,
                   const std::string& name_b, FirstDifference* found) {
  std::vector<double> values[2];
  TensorType types[2];
  int64_t cols[2];
  for (int i = 0; i < 2; ++i) {
    const std::string& name = i == 0 ? name_a : name_b;
    const std::string wanted = WithoutRank(name);
    RT_ASSIGN_OR_RETURN(const Life life,
                        Live(comm, options, i == 0 ? a : b, update,
                             [&](std::string_view op) { return op == wanted; }));
    const OpList& ops = life.tracer->ops();
    const auto op = std::find_if(ops.begin(), ops.end(),
                                 [&](const auto& each) { return each.name == name; });
    if (op == ops.end()) return {};  // it was there the first time: a fault that comes and goes
    RT_ASSIGN_OR_RETURN(const std::string bytes, life.tracer->Elements(*op));
    values[i] = ValuesOf(bytes, op->type);
    types[i] = op->type;
    cols[i] = op->cols;
  }
  if (values[0].size() != values[1].size() || cols[0] != cols[1]) return {};
  const TensorDifference d = DiffElements(values[0], types[0], values[1], types[1], cols[0]);
  if (d.first) found->element = ElementOf(*found->op, cols[0], d);
  return {};
}

// --- A recording and its replay ---

std::vector<double> Doubles(const float* values, int64_t count) {
  return {values, values + count};
}

// Which pieces of what the recording kept are not the replay's. On rank 0; `kept` gives a piece's
// elements.
std::vector<size_t> OtherPieces(const OpList& ops, const std::string& component, const Layout& layout,
                                const std::function<const float*(int shard, const Piece&)>& kept) {
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < ops.size(); ++i) places[ops[i].name] = i;
  std::vector<size_t> others;
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    for (int shard = 0; shard < layout.shards(); ++shard) {
      const Piece* piece = layout.FindPiece(shard, static_cast<int>(t));
      if (piece == nullptr) continue;
      const auto at = places.find(fmt::format("optimizer/{}#{}/shard{}", layout.tensors()[t].name,
                                              component, shard));
      if (at == places.end()) continue;
      const Digest digest = TensorDigest(kept(shard, *piece), piece->numel() * sizeof(float));
      if (digest != *ops[at->second].digest) others.push_back(at->second);
    }
  }
  return others;
}

std::string TensorOf(const std::string& op) {  // "optimizer/NAME#g/shard3" -> "NAME"
  return op.substr(sizeof("optimizer/") - 1, op.rfind('#') - (sizeof("optimizer/") - 1));
}

class FaultSearch {
 public:
  FaultSearch(const RunReader& run, Life& life) : run_(run), life_(life) {}

  // Collective; whole on rank 0.
  Result<RecordedFault> Run() {
    const TracedUpdate& traced = life_.traced;
    const PositionEntry& entry = *run_.history().Find(traced.update);
    fault_.has_journal = entry.HasJournal();
    fault_.has_keyframe = entry.HasKeyframe();
    const UpdateRecord &recorded = *traced.record, &replayed = traced.step.result.record;
    const bool loss = recorded.loss != replayed.loss;
    for (size_t t = 0; t < recorded.tensor_norms.size(); ++t) {
      if (t < replayed.tensor_norms.size() && recorded.tensor_norms[t] != replayed.tensor_norms[t]) {
        fault_.tensors.push_back(life_.job->layout().tensors()[t].name);
      }
    }
    RT_RETURN_IF_ERROR(CompareJournal());
    if (!fault_.element) RT_RETURN_IF_ERROR(CompareKeyframe());
    const bool evaluation = recorded.evaluation_loss != replayed.evaluation_loss;
    fault_.phase = loss                      ? "forward"
                   : !fault_.tensors.empty() ? "backward"
                   : !traced.same_state      ? "optimizer"
                   : evaluation              ? "evaluation"
                                             : "record";
    return std::move(fault_);
  }

 private:
  // The first piece that differs, its elements beside the replay's. Rank 0 knows which; all take part.
  Status Show(const std::vector<size_t>& others,
              const std::function<const float*(const std::string& op)>& kept) {
    Comm& comm = life_.job->comm();
    const std::string mine = others.empty() ? "" : std::to_string(others[0]);
    RT_ASSIGN_OR_RETURN(const std::vector<std::string> all, GatherTexts(comm, comm.World(), mine));
    if (all[0].empty()) return {};
    const UpdateTracer::TracedOp& op = life_.tracer->ops()[std::stoull(all[0])];
    RT_ASSIGN_OR_RETURN(const std::string bytes, life_.tracer->Elements(op));
    if (comm.rank() != 0) {
      fault_.element.emplace();  // so that all ranks go the same way
      return {};
    }
    const TensorDifference d =
        DiffElements(Doubles(kept(op.name), op.numel()), TensorType::kF32,
                     ValuesOf(bytes, op.type), op.type, op.cols);
    if (d.first) fault_.element = ElementOf(op.name, op.cols, d);
    return {};
  }

  const Piece& PieceOf(const std::string& op, int* shard) const {
    const Layout& layout = life_.job->layout();
    *shard = std::stoi(op.substr(op.rfind("/shard") + 6));
    return *layout.FindPiece(*shard, layout.Find(TensorOf(op)));
  }

  Status CompareJournal() {
    if (!fault_.has_journal) return {};
    const Layout& layout = life_.job->layout();
    Journal journal;
    Status read;
    std::vector<size_t> others;
    const auto at = [&](int shard, const Piece& piece) {
      return journal.gradients[shard].data() + piece.offset;
    };
    if (life_.job->is_rank0()) {
      read = run_.ReadJournal(layout, life_.traced.update, 0, layout.shards(), &journal);
      if (read.ok()) others = OtherPieces(life_.tracer->ops(), "g", layout, at);
    }
    RT_RETURN_IF_ERROR(AgreeOnStatus(life_.job->comm(), read));
    if (!others.empty()) fault_.tensors.clear();
    for (const size_t i : others) {
      const std::string tensor = TensorOf(life_.tracer->ops()[i].name);
      if (fault_.tensors.empty() || fault_.tensors.back() != tensor) {
        fault_.tensors.push_back(tensor);
      }
    }
    return Show(others, [&](const std::string& op) {
      int shard = 0;
      const Piece& piece = PieceOf(op, &shard);
      return at(shard, piece);
    });
  }

  Status CompareKeyframe() {
    if (!fault_.has_keyframe) return {};
    const Layout& layout = life_.job->layout();
    State state = MakeState(layout, 0, life_.job->is_rank0() ? layout.shards() : 0);
    Status read;
    std::vector<size_t> others;
    if (life_.job->is_rank0()) {
      read = run_.ReadKeyframe(layout, life_.traced.update, 0, layout.shards(), &state);
      for (int c = 0; read.ok() && c < kNumComponents; ++c) {
        const auto component = static_cast<Component>(c);
        const std::vector<size_t> more = OtherPieces(
            life_.tracer->ops(), ComponentName(component), layout,
            [&](int shard, const Piece& piece) {
              return state.shards[shard].slab(component).data() + piece.offset;
            });
        others.insert(others.end(), more.begin(), more.end());
      }
    }
    RT_RETURN_IF_ERROR(AgreeOnStatus(life_.job->comm(), read));
    return Show(others, [&](const std::string& op) -> const float* {
      int shard = 0;
      const Piece& piece = PieceOf(op, &shard);
      for (int c = 0; c < kNumComponents; ++c) {
        const auto component = static_cast<Component>(c);
        if (op[op.rfind('#') + 1] != ComponentName(component)[0]) continue;
        return state.shards[shard].slab(component).data() + piece.offset;
      }
      return nullptr;
    });
  }

  const RunReader& run_;
  Life& life_;
  RecordedFault fault_;
};

}  // namespace

std::optional<int64_t> FirstOtherDigest(const RunHistory& a, const RunHistory& b, int64_t first,
                                        int64_t last) {
  for (int64_t k = first; k <= last; ++k) {
    if (a.Find(k)->digest != b.Find(k)->digest) return k;
  }
  return std::nullopt;
}

Result<PartingPoint> FindPartingPoint(const RunReader& a, const RunReader& b) {
  const RunHistory &x = a.history(), &y = b.history();
  PartingPoint point;
  point.first = std::max(x.first_position(), y.first_position());
  point.last = std::min(x.last_position(), y.last_position());
  if (point.last < point.first) {
    return UsageError(fmt::format("{} has positions {}..{}, {} has {}..{}: none in common", a.dir(),
                                  x.first_position(), x.last_position(), b.dir(),
                                  y.first_position(), y.last_position()));
  }
  RT_ASSIGN_OR_RETURN(const Recipe recipe_a, ParseRecipe(a.recipe_text(), a.dir() + "/recipe.toml"));
  RT_ASSIGN_OR_RETURN(const Recipe recipe_b, ParseRecipe(b.recipe_text(), b.dir() + "/recipe.toml"));
  if (recipe_a.topology.virtual_shards != recipe_b.topology.virtual_shards) {
    return UnsupportedError(fmt::format(
        "{} and {}: of {} and {} virtual shards, whose digests can not be compared; 'retrace diff' "
        "finds where their states part, and diff of 'retrace trace --tensors' of both the op",
        a.dir(), b.dir(), recipe_a.topology.virtual_shards, recipe_b.topology.virtual_shards));
  }
  point.position = FirstOtherDigest(x, y, point.first, point.last);
  point.at_first = point.position == point.first;
  for (int64_t k = point.first; k <= point.position.value_or(point.last); ++k) {
    if (k == x.first_position() || k == y.first_position()) continue;
    if (x.Find(k)->record == y.Find(k)->record) continue;
    RT_ASSIGN_OR_RETURN(const UpdateRecord record_a, ParseRecord(x.Find(k)->record));
    RT_ASSIGN_OR_RETURN(const UpdateRecord record_b, ParseRecord(y.Find(k)->record));
    if (record_a.Same(record_b)) continue;
    point.states = point.position == k;
    point.at_first = point.states && k == point.first;
    point.position = k;
    break;
  }
  return point;
}

std::string DifferingElement::IndexText() const {
  return fmt::format("[{}, {}]", element.row(cols), element.col(cols));
}

std::string PhaseOf(const std::string& op) {
  for (const char* phase : {"state", "evaluation", "optimizer"}) {
    if (op.starts_with(phase)) return phase;
  }
  std::string name = WithoutRank(op);
  if (const size_t at = name.rfind("/shard"); at != std::string::npos) name.resize(at);
  return name.ends_with(".grad") ? "backward" : "forward";
}

Result<FirstDifference> LiveDifference(Comm& comm, const JobOptions& job, const DifferenceSide& a,
                                       const DifferenceSide& b, const PartingPoint& point) {
  FirstDifference found;
  found.update = point.update();
  OpList ops[2];
  std::optional<Recipe> recipes[2];
  for (int i = 0; i < 2; ++i) {
    const DifferenceSide& side = i == 0 ? a : b;
    ReplayedSide& replayed = i == 0 ? found.a : found.b;
    RT_ASSIGN_OR_RETURN(Life life, Live(comm, job, side, found.update, {}));
    ops[i] = life.tracer->ops();
    if (life.traced.update == 0) continue;  // its ranks disagree
    replayed.recorded = life.traced.recorded;
    RT_ASSIGN_OR_RETURN(replayed.same, AllSay(comm, life.traced.identical()));
    recipes[i] = life.traced.recipe;
    if (!replayed.recorded || replayed.same) continue;
    const auto optimizer = [](std::string_view name) { return name.starts_with("optimizer/"); };
    RT_ASSIGN_OR_RETURN(life, Live(comm, job, side, found.update, optimizer));
    RT_ASSIGN_OR_RETURN(replayed.fault, FaultSearch(*side.run, life).Run());
  }
  if (recipes[0] && recipes[1]) found.recipes = DiffRecipes(*recipes[0], *recipes[1]);
  found.ops = std::ssize(ops[0]);
  const std::optional<OpPair> pair = FirstOtherOp(ops[0], ops[1]);
  if (!pair) return found;
  found.op = pair->a < 0 || (pair->b >= 0 && ops[1][pair->b].name.find('@') != std::string::npos)
                 ? ops[1][pair->b].name
                 : ops[0][pair->a].name;
  if (pair->a < 0 || pair->b < 0) {
    found.only_in = pair->a < 0 ? "B" : "A";
    return found;
  }
  RT_RETURN_IF_ERROR(ReadElement(comm, job, a, b, found.update, ops[0][pair->a].name,
                                 ops[1][pair->b].name, &found));
  return found;
}

}  // namespace retrace
