#include "replay/state_norms.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <optional>

#include "core/tensor_view.h"
#include "replay/timeline.h"
#include "replay/update.h"

namespace retrace {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// What is known of one update: the state before and after, and its journal if there is one.
struct Step {
  const State& before;
  const State& after;
  const Journal* journal;  // may be null
};

// Adds the part of tensor `t` that one shard owns.
void AddPiece(const Step& step, size_t shard, const Piece& piece, TensorMotion* sum) {
  const ShardState &before = step.before.shards[shard], &after = step.after.shards[shard];
  const float* w = before.slab(Component::kParameter).data() + piece.offset;
  const float* w_next = after.slab(Component::kParameter).data() + piece.offset;
  const float* m = before.slab(Component::kM).data() + piece.offset;
  const float* m_next = after.slab(Component::kM).data() + piece.offset;
  const float* v_next = after.slab(Component::kV).data() + piece.offset;
  for (int64_t i = 0; i < piece.numel(); ++i) {
    const double parameter = w[i], change = static_cast<double>(w_next[i]) - w[i];
    const double first = m_next[i], previous = m[i];
    sum->parameter += parameter * parameter;
    sum->change += change * change;
    sum->first += first * first;
    sum->previous += previous * previous;
    sum->second += v_next[i];
  }
  if (step.journal == nullptr) return;
  const float* g = step.journal->gradients[shard].data() + piece.offset;
  const OptimizerRow& row = step.journal->optimizer.rows[piece.tensor];
  // sqrt(v / c) < eps, with one product for all elements.
  const double least = static_cast<double>(row.eps) * row.eps * row.bias_correction2;
  for (int64_t i = 0; i < piece.numel(); ++i) {
    sum->along += static_cast<double>(m[i]) * g[i];
    sum->gradient += static_cast<double>(g[i]) * g[i];
    sum->below_eps += v_next[i] < least ? 1 : 0;
  }
}

TensorMotion MotionOf(const Layout& layout, const Step& step, int tensor) {
  TensorMotion sum;
  for (int shard = 0; shard < layout.shards(); ++shard) {
    const Piece* piece = layout.FindPiece(shard, tensor);
    if (piece != nullptr) AddPiece(step, static_cast<size_t>(shard), *piece, &sum);
  }
  for (double* norm : {&sum.parameter, &sum.change, &sum.first, &sum.previous, &sum.gradient}) {
    *norm = std::sqrt(*norm);
  }
  if (step.journal == nullptr) sum.along = sum.gradient = sum.below_eps = kUnknown;
  return sum;
}

UpdateMotion MotionsOf(const Layout& layout, Engine& engine, const Step& step) {
  UpdateMotion motion;
  motion.update = step.after.counters.position;
  motion.tensors.resize(layout.tensors().size());
  engine.pool().Run(std::ssize(motion.tensors), [&](int64_t tensor, int) {
    motion.tensors[tensor] = MotionOf(layout, step, static_cast<int>(tensor));
  });
  return motion;
}

// Applies update position + 1 of the journal to *state; *before: the state that it started from.
Status WalkOne(const RunReader& run, const Layout& layout, Engine& engine, State* state,
               State* before, Journal* journal) {
  const int64_t k = state->counters.position + 1;
  if (run.history().Find(k)->HasPartial()) {
    RT_RETURN_IF_ERROR(run.ReadPartial(layout, k, state).status());
  }
  *before = *state;
  RT_RETURN_IF_ERROR(run.ReadJournal(layout, k, 0, layout.shards(), journal));
  for (int shard = 0; shard < layout.shards(); ++shard) {
    ApplyBlock(engine, layout, journal->optimizer, layout.pieces(shard),
               journal->gradients[shard].data(), &state->shards[shard]);
  }
  state->counters = journal->counters;
  state->memory = journal->memory;
  return {};
}

}  // namespace

UpdateRange KeptUpdates(const RunHistory& history, int64_t first, int64_t last) {
  const auto kept = [&](int64_t k) {
    return history.Find(k) != nullptr && history.NearestKeyframe(k).has_value();
  };
  UpdateRange range;
  range.last = std::min(last, history.last_position());
  const int64_t least = std::max(first, history.first_position() + 1);
  while (range.last >= least && !(kept(range.last) && kept(range.last - 1))) --range.last;
  range.first = range.last + 1;
  while (range.first > least && kept(range.first - 2)) --range.first;
  return range;
}

Result<std::vector<UpdateMotion>> WalkNorms(const RunReader& run, const Layout& layout,
                                            Engine& engine, const UpdateRange& range,
                                            const std::function<void(int64_t update)>& progress) {
  std::vector<UpdateMotion> motions;
  if (range.first > range.last) return motions;
  const Timeline timeline(run, layout, engine);
  RT_ASSIGN_OR_RETURN(State state, timeline.Seek(range.first - 1));
  State before;
  for (int64_t k = range.first; k <= range.last; ++k) {
    std::optional<Journal> journal;
    if (run.history().Find(k)->HasJournal()) {
      journal.emplace();
      RT_RETURN_IF_ERROR(WalkOne(run, layout, engine, &state, &before, &*journal));
    } else {
      before = std::move(state);
      RT_ASSIGN_OR_RETURN(state, timeline.Seek(k));
    }
    motions.push_back(MotionsOf(layout, engine, {before, state, journal ? &*journal : nullptr}));
    if (progress) progress(k);
  }
  const Digest got = StateDigest(layout, state), expected = run.history().Find(range.last)->digest;
  if (got != expected) {
    return DamagedError(
        fmt::format("{}@{}: the walk from {} gave digest {}, the ledger says {}; "
                    "run 'retrace verify {}'",
                    run.dir(), range.last, range.first - 1, got.Hex(), expected.Hex(), run.dir()));
  }
  return motions;
}

}  // namespace retrace
