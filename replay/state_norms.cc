#include "replay/state_norms.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "replay/timeline.h"
#include "replay/update.h"

namespace retrace {
namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// What is known of one update: the state before and after, its journal and the one before, if there
// are any.
struct Step {
  const State& before;
  const State& after;
  const Journal* journal;   // may be null
  const Journal* last;      // may be null
};

// The slabs of one shard at a piece.
struct PieceView {
  const float *p, *p_next, *m, *m_next, *v_next;
  const float *g = nullptr, *g_last = nullptr;

  PieceView(const Step& step, size_t shard, int64_t at)
      : p(step.before.shards[shard].slab(Component::kParameter).data() + at),
        p_next(step.after.shards[shard].slab(Component::kParameter).data() + at),
        m(step.before.shards[shard].slab(Component::kM).data() + at),
        m_next(step.after.shards[shard].slab(Component::kM).data() + at),
        v_next(step.after.shards[shard].slab(Component::kV).data() + at) {
    if (step.journal != nullptr) g = step.journal->gradients[shard].data() + at;
    if (step.last != nullptr) g_last = step.last->gradients[shard].data() + at;
  }
};

bool SameSign(float a, float b) { return (a > 0 && b > 0) || (a < 0 && b < 0); }
bool BothSigned(float a, float b) { return (a > 0 || a < 0) && (b > 0 || b < 0); }

void AddStates(const PieceView& view, int64_t n, TensorMotion* sum) {
  for (int64_t i = 0; i < n; ++i) {
    const double p = view.p[i], change = static_cast<double>(view.p_next[i]) - p;
    const double m_next = view.m_next[i], m = view.m[i];
    sum->parameter2 += p * p;
    sum->change2 += change * change;
    sum->first2 += m_next * m_next;
    sum->previous2 += m * m;
    sum->second += view.v_next[i];
  }
}

void AddGradient(const PieceView& view, int64_t n, TensorMotion* sum) {
  for (int64_t i = 0; i < n; ++i) {
    const double g = view.g[i];
    sum->gradient2 += g * g;
    sum->along += view.m[i] * g;
    sum->same_sign_m += SameSign(view.g[i], view.m[i]);
    sum->signed_m += BothSigned(view.g[i], view.m[i]);
  }
  if (view.g_last == nullptr) return;
  for (int64_t i = 0; i < n; ++i) {
    const double g_last = view.g_last[i];
    sum->before2 += g_last * g_last;
    sum->turned += view.g[i] * g_last;
    sum->same_sign_g += SameSign(view.g[i], view.g_last[i]);
    sum->signed_g += BothSigned(view.g[i], view.g_last[i]);
  }
}

// What Adam made of the gradient: it is clipped by `clip` there.
void AddAdam(const PieceView& view, int64_t n, const OptimizerRow& row, float clip, bool ratios,
             TensorMotion* sum) {
  // sqrt(v / c) < eps, with one product for all elements.
  const double least = static_cast<double>(row.eps) * row.eps * row.bias_correction2;
  for (int64_t i = 0; i < n; ++i) {
    sum->below_eps += view.v_next[i] < least;
    sum->gradient_below += std::fabs(clip * view.g[i]) < row.eps;
  }
  if (!ratios) return;
  for (int64_t i = 0; i < n; ++i) {
    const float g = clip * view.g[i], v_hat = view.v_next[i] / row.bias_correction2;
    if (v_hat > 0) sum->ratios.Add(static_cast<float>(static_cast<double>(g) * g / v_hat));
  }
}

// Adds the part of a tensor that one shard owns, row by row where the clip is per row.
void AddPiece(const Step& step, size_t shard, const Piece& piece, bool ratios, TensorMotion* sum) {
  const PieceView view(step, shard, piece.offset);
  sum->elements += static_cast<double>(piece.numel());
  AddStates(view, piece.numel(), sum);
  if (step.journal == nullptr) return;
  AddGradient(view, piece.numel(), sum);
  const OptimizerBlock& block = step.journal->optimizer;
  const OptimizerRow& row = block.rows[piece.tensor];
  if (block.row_clips.empty() || block.row_clips[piece.tensor].empty()) {
    return AddAdam(view, piece.numel(), row, row.clip, ratios, sum);
  }
  for (int64_t r = 0; r < piece.rows(); ++r) {
    const PieceView part(step, shard, piece.offset + r * piece.cols());
    AddAdam(part, piece.cols(), row, block.row_clips[piece.tensor][piece.row_first + r], ratios,
            sum);
  }
}

TensorMotion MotionOf(const Layout& layout, const Step& step, int tensor, bool ratios) {
  TensorMotion sum;
  for (int shard = 0; shard < layout.shards(); ++shard) {
    const Piece* piece = layout.FindPiece(shard, tensor);
    if (piece != nullptr) AddPiece(step, static_cast<size_t>(shard), *piece, ratios, &sum);
  }
  if (step.journal == nullptr) {
    for (double* x : {&sum.gradient2, &sum.along, &sum.same_sign_m, &sum.signed_m,
                      &sum.below_eps, &sum.gradient_below}) {
      *x = kUnknown;
    }
  }
  if (step.journal == nullptr || step.last == nullptr) {
    for (double* x : {&sum.before2, &sum.turned, &sum.same_sign_g, &sum.signed_g}) *x = kUnknown;
  }
  return sum;
}

// Of a tensor whose rows are divided among the shards.
std::vector<RowMotion> RowsOf(const Layout& layout, const Step& step, int tensor) {
  std::vector<RowMotion> rows;
  for (int shard = 0; shard < layout.shards(); ++shard) {
    const Piece* piece = layout.FindPiece(shard, tensor);
    if (piece == nullptr) continue;
    for (int64_t r = 0; r < piece->rows(); ++r) {
      const PieceView view(step, static_cast<size_t>(shard), piece->offset + r * piece->cols());
      RowMotion row{.row = piece->row_first + r};
      if (view.g == nullptr) row.gradient2 = kUnknown;
      for (int64_t i = 0; i < piece->cols(); ++i) {
        const double p = view.p[i], change = static_cast<double>(view.p_next[i]) - p;
        row.parameter2 += p * p;
        row.change2 += change * change;
        if (view.g != nullptr) row.gradient2 += static_cast<double>(view.g[i]) * view.g[i];
      }
      rows.push_back(row);
    }
  }
  return rows;
}

UpdateMotion MotionsOf(const Layout& layout, Engine& engine, const Step& step,
                       const MotionOptions& options) {
  UpdateMotion motion;
  motion.update = step.after.counters.position;
  motion.tensors.resize(layout.tensors().size());
  engine.pool().Run(std::ssize(motion.tensors), [&](int64_t tensor, int) {
    motion.tensors[tensor] = MotionOf(layout, step, static_cast<int>(tensor), options.ratios);
  });
  if (options.rows_of >= 0) motion.rows = RowsOf(layout, step, options.rows_of);
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

double Ratio(double above, double below) { return below > 0 ? above / below : kUnknown; }

}  // namespace

TensorMotion& TensorMotion::operator+=(const TensorMotion& other) {
  for (const auto member :
       {&TensorMotion::elements, &TensorMotion::parameter2, &TensorMotion::change2,
        &TensorMotion::first2, &TensorMotion::second, &TensorMotion::previous2, &TensorMotion::gradient2, &TensorMotion::along,
        &TensorMotion::same_sign_m, &TensorMotion::signed_m, &TensorMotion::below_eps,
        &TensorMotion::gradient_below, &TensorMotion::before2, &TensorMotion::turned,
        &TensorMotion::same_sign_g, &TensorMotion::signed_g}) {
    this->*member += other.*member;
  }
  ratios += other.ratios;
  return *this;
}

double TensorMotion::UpdateRms(double lr) const {
  return Ratio(std::sqrt(Ratio(change2, elements)), lr);
}
double TensorMotion::RelativeUpdate() const { return std::sqrt(Ratio(change2, parameter2)); }
double TensorMotion::RootV() const { return std::sqrt(Ratio(second, elements)); }
double TensorMotion::CosineWithM() const { return Ratio(along, std::sqrt(previous2 * gradient2)); }
double TensorMotion::CosineWithLast() const { return Ratio(turned, std::sqrt(before2 * gradient2)); }
double TensorMotion::SignsWithM() const { return Ratio(same_sign_m, signed_m); }
double TensorMotion::SignsWithLast() const { return Ratio(same_sign_g, signed_g); }

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

Status WalkNorms(const RunReader& run, const Layout& layout, Engine& engine,
                 const UpdateRange& range, const MotionOptions& options,
                 const std::function<void(UpdateMotion)>& took) {
  if (range.first > range.last) return {};
  const Timeline timeline(run, layout, engine);
  RT_ASSIGN_OR_RETURN(State state, timeline.Seek(range.first - 1));
  State before;
  std::optional<Journal> journal, last;
  const PositionEntry* entry = run.history().Find(range.first - 1);
  if (entry->HasJournal()) {
    last.emplace();
    RT_RETURN_IF_ERROR(run.ReadJournal(layout, range.first - 1, 0, layout.shards(), &*last));
  }
  for (int64_t k = range.first; k <= range.last; ++k) {
    journal.reset();
    if (run.history().Find(k)->HasJournal()) {
      journal.emplace();
      RT_RETURN_IF_ERROR(WalkOne(run, layout, engine, &state, &before, &*journal));
    } else {
      before = std::move(state);
      RT_ASSIGN_OR_RETURN(state, timeline.Seek(k));
    }
    const Step step = {before, state, journal ? &*journal : nullptr, last ? &*last : nullptr};
    took(MotionsOf(layout, engine, step, options));
    std::swap(journal, last);
  }
  const Digest got = StateDigest(layout, state), expected = run.history().Find(range.last)->digest;
  if (got != expected) {
    return DamagedError(
        fmt::format("{}@{}: the walk from {} gave digest {}, the ledger says {}; "
                    "run 'retrace verify {}'",
                    run.dir(), range.last, range.first - 1, got.Hex(), expected.Hex(), run.dir()));
  }
  return {};
}

}  // namespace retrace
