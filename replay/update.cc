#include "replay/update.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include "core/scalar_math.h"
#include "core/schedule.h"
#include "kernels/adamw.h"
#include "replay/block_part.h"
#include "replay/machine.h"

namespace retrace {
namespace {

// One block of a piece, for the parallel loops over a slab.
struct Chunk {
  const Piece* piece;
  int64_t first, count;  // in elements of the piece
};

std::vector<Chunk> ChunksOf(const std::vector<Piece>& pieces) {
  std::vector<Chunk> chunks;
  for (const Piece& piece : pieces) {
    for (int64_t at = 0; at < piece.numel(); at += kSquareBlock) {
      chunks.push_back({&piece, at, std::min(kSquareBlock, piece.numel() - at)});
    }
  }
  return chunks;
}

// Sum of the squares of (m / bc1) / (sqrt(v / bc2) + eps) * update_clip: clause 12's quotient, of
// m and v after the update. FP64, eight chains, added up in order.
double SumSquaredUpdates(const OptimizerRow& row, const float* m, const float* v, int64_t n) {
  constexpr int64_t kChains = 8;
  double sums[kChains] = {};
  for (int64_t i = 0; i < n; ++i) {
    const float quotient = (m[i] / row.bias_correction1) /
                           (math::Sqrt(v[i] / row.bias_correction2) + row.eps) * row.update_clip;
    sums[i % kChains] += static_cast<double>(quotient) * static_cast<double>(quotient);
  }
  double sum = 0;
  for (double chain : sums) sum += chain;
  return sum;
}

double TreeOver(const double* values, int64_t count, int64_t stride) {
  if (count == 1) return values[0];
  return TreeOver(values, count / 2, stride) +
         TreeOver(values + count / 2 * stride, count / 2, stride);
}

// Calls visit(at, count, clip) for the runs of a chunk's elements that have one clip factor: the
// chunk, or its rows where the clip is per row.
template <class Visit>
void ForEachClip(const OptimizerBlock& block, const Chunk& chunk, Visit visit) {
  const int tensor = chunk.piece->tensor;
  const std::vector<float>* clips = block.row_clips.empty() ? nullptr : &block.row_clips[tensor];
  if (clips == nullptr || clips->empty()) return visit(0, chunk.count, block.rows[tensor].clip);
  const int64_t cols = chunk.piece->cols();
  for (int64_t at = 0; at < chunk.count;) {
    const int64_t element = chunk.first + at;
    const int64_t count = std::min(chunk.count - at, cols - element % cols);
    visit(at, count, (*clips)[chunk.piece->row_first + element / cols]);
    at += count;
  }
}

// Applies a block to a chunk of a slab. g: the chunk's gradient.
void ApplyChunk(Isa isa, const OptimizerBlock& block, const Chunk& chunk, const float* g,
                ShardState* slab) {
  const int64_t offset = chunk.piece->offset + chunk.first;
  float* p = slab->slab(Component::kParameter).data() + offset;
  float* m = slab->slab(Component::kM).data() + offset;
  float* v = slab->slab(Component::kV).data() + offset;
  ForEachClip(block, chunk, [&](int64_t at, int64_t count, float clip) {
    AdamW(isa, block.rows[chunk.piece->tensor], clip, g + at, p + at, m + at, v + at, count);
  });
}

// The same, and what it left: in blocks that stay in the first caches between the two, because what
// costs here is reading memory.
UpdateSums ApplyAndSum(Isa isa, const OptimizerBlock& block, const Chunk& chunk,
                       const float* gradient, ShardState* slab) {
  constexpr int64_t kSumBlock = 4096;
  float before[kSumBlock];
  UpdateSums sums;
  for (int64_t at = 0; at < chunk.count; at += kSumBlock) {
    const int64_t n = std::min(kSumBlock, chunk.count - at);
    const int64_t offset = chunk.piece->offset + chunk.first + at;
    const float* p = slab->slab(Component::kParameter).data() + offset;
    const float* m = slab->slab(Component::kM).data() + offset;
    const float* v = slab->slab(Component::kV).data() + offset;
    std::copy_n(p, n, before);
    UpdateSums part;
    part.p = SumSquaresBlock(isa, p, n);
    ApplyChunk(isa, block, {chunk.piece, chunk.first + at, n}, gradient + offset, slab);
    part.change = SumSquaredChangeBlock(isa, before, p, n);
    part.m = SumSquaresBlock(isa, m, n);
    part.v = SumSquaresBlock(isa, v, n);
    part.odd_g = CountOdd(isa, gradient + offset, n);
    part.odd_p = CountOdd(isa, p, n);
    part.odd_m = CountOdd(isa, m, n);
    part.odd_v = CountOdd(isa, v, n);
    sums += part;
  }
  return sums;
}

// Six digits: what people read, and a quarter of the ledger's size less.
double Rounded(double norm) {
  return std::isfinite(norm) ? std::strtod(fmt::format("{:.6g}", norm).c_str(), nullptr) : norm;
}

TensorNorms NormsOf(const std::vector<UpdateSums>& tensors) {
  TensorNorms norms;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const UpdateSums& sums = tensors[t];
    norms.p.push_back(Rounded(math::Sqrt(sums.p)));
    norms.m.push_back(Rounded(math::Sqrt(sums.m)));
    norms.v.push_back(Rounded(math::Sqrt(sums.v)));
    norms.change.push_back(Rounded(math::Sqrt(sums.change)));
    for (const auto& [of, odd] : {std::pair("g", sums.odd_g), std::pair("p", sums.odd_p),
                                  std::pair("m", sums.odd_m), std::pair("v", sums.odd_v)}) {
      if (odd.none()) continue;
      norms.odd.push_back({static_cast<int64_t>(t), of, odd.zero, odd.subnormal, odd.infinite,
                           odd.nan});
    }
  }
  return norms;
}

}  // namespace

UpdateSums& UpdateSums::operator+=(const UpdateSums& other) {
  p += other.p;
  m += other.m;
  v += other.v;
  change += other.change;
  odd_g += other.odd_g;
  odd_p += other.odd_p;
  odd_m += other.odd_m;
  odd_v += other.odd_v;
  return *this;
}

void ApplyBlock(Engine& engine, const Layout& layout, const OptimizerBlock& block,
                const std::vector<Piece>& pieces, const float* gradient, ShardState* slab,
                UpdateSums* sums) {
  RT_CHECK_EQ(layout.tensors().size(), block.rows.size());
  const std::vector<Chunk> chunks = ChunksOf(pieces);
  std::vector<UpdateSums> parts(sums != nullptr ? chunks.size() : 0);
  engine.pool().Run(static_cast<int64_t>(chunks.size()), [&](int64_t i, int) {
    const Chunk& chunk = chunks[i];
    const float* g = gradient + chunk.piece->offset + chunk.first;
    if (sums != nullptr) parts[i] = ApplyAndSum(engine.isa(), block, chunk, gradient, slab);
    else ApplyChunk(engine.isa(), block, chunk, g, slab);
  });
  for (size_t i = 0; i < parts.size(); ++i) sums[chunks[i].piece->tensor] += parts[i];
}

void ApplyBlockPart(Isa isa, const OptimizerBlock& block, const std::vector<Piece>& pieces,
                    int64_t first, int64_t count, const float* gradient, ShardState* slab) {
  auto piece = std::upper_bound(pieces.begin(), pieces.end(), first,
                                [](int64_t at, const Piece& p) { return at < p.offset; });
  for (int64_t at = first; at < first + count; ++piece) {
    const Piece& owner = *(piece - 1);
    const int64_t last = std::min(first + count, owner.offset + owner.numel());
    ApplyChunk(isa, block, {&owner, at - owner.offset, last - at}, gradient + (at - first), slab);
    at = last;
  }
}

UpdateDirective UpdateDirective::Default(const Recipe& recipe, const Counters& counters) {
  UpdateDirective directive;
  directive.samples = Consecutive(counters.data_cursor, recipe.data.SamplesPerStep());
  directive.cursor = counters.data_cursor + recipe.data.SamplesPerStep();
  return directive;
}

Updater::Updater(const Recipe& recipe, const ParameterMap& map, RankContext context,
                 const BatchSource& batches)
    : recipe_(recipe),
      map_(map),
      context_(context),
      batches_(batches),
      pass_(MakeStepPass(recipe, map, context)) {}

Result<std::optional<double>> Updater::EvaluationLoss(const RankState& state) {
  if (recipe_.data.evaluation_samples == 0) return std::optional<double>();
  if (!evaluation_) {
    RT_ASSIGN_OR_RETURN(evaluation_,
                        ReadBatch(batches_, true, 0, recipe_.data.evaluation_samples,
                                  recipe_.data.sequence_length));
  }
  RT_ASSIGN_OR_RETURN(const double loss, pass_->Loss(state, *evaluation_, "evaluation"));
  return std::optional<double>(loss);
}

// This rank's micro-batches; the others stay empty.
Result<std::vector<TokenBatch>> Updater::ReadStep(const std::vector<int64_t>& samples) const {
  const DataRecipe& data = recipe_.data;
  const RankPlace& place = context_.place;
  std::vector<TokenBatch> batches(data.micro_batches);
  for (int64_t i = 0; i < data.micro_batches; ++i) {
    const int64_t lane = i % recipe_.topology.lanes;
    if (lane < place.first_lane || lane >= place.first_lane + place.lane_count) continue;
    const auto first = samples.begin() + i * data.micro_batch_size;
    RT_ASSIGN_OR_RETURN(batches[i],
                        ReadBatch(batches_, false,
                                  std::vector<int64_t>(first, first + data.micro_batch_size),
                                  data.sequence_length));
  }
  return batches;
}

Status Updater::DigestTokens(const std::vector<int64_t>& samples, UpdateRecord* record) const {
  DigestStream stream;
  RT_ASSIGN_OR_RETURN(const TokenBatch step,
                      ReadBatch(batches_, false, samples, recipe_.data.sequence_length));
  AppendTokens(step, &stream);
  record->tokens = stream.Finish();
  record->first_sample = samples.front();
  record->samples = std::ssize(samples);
  if (samples != Consecutive(samples.front(), std::ssize(samples))) record->sample_list = samples;
  return {};
}

Result<std::vector<double>> Updater::TensorSums(
    const std::function<double(int slab, const Piece& piece, int64_t first, int64_t count)>&
        block_sum) const {
  const Layout& layout = map_.layout();
  const int64_t tensors = static_cast<int64_t>(layout.tensors().size());
  std::vector<double> mine(map_.shard_count() * tensors, 0.0);
  for (int i = 0; i < map_.shard_count(); ++i) {
    const std::vector<Chunk> chunks = ChunksOf(layout.pieces(map_.first_shard() + i));
    std::vector<double> sums(chunks.size());
    context_.engine.pool().Run(static_cast<int64_t>(chunks.size()), [&](int64_t c, int) {
      sums[c] = block_sum(i, *chunks[c].piece, chunks[c].first, chunks[c].count);
    });
    for (size_t c = 0; c < chunks.size(); ++c) {
      double& sum = mine[i * tensors + chunks[c].piece->tensor];
      sum = chunks[c].first == 0 ? sums[c] : sum + sums[c];
    }
  }
  std::vector<double> all(layout.shards() * tensors);
  RT_RETURN_IF_ERROR(context_.comm.AllGather(context_.place.tp_group(), mine.data(), all.data(),
                                             mine.size() * sizeof(double)));
  std::vector<double> sums(tensors);
  for (int64_t t = 0; t < tensors; ++t) {
    sums[t] = TreeOver(all.data() + t, layout.shards(), tensors);
  }
  return sums;
}

// ||g||^2 of each tensor.
Result<std::vector<double>> Updater::TensorSquares() const {
  return TensorSums([this](int slab, const Piece& piece, int64_t first, int64_t count) {
    return SumSquaresBlock(context_.engine.isa(),
                           pass_->gradient(slab).data() + piece.offset + first, count);
  });
}

// Of what AdamW multiplied by the learning rate, decay apart; over the tensors that it moved.
Result<double> Updater::UpdateRms(const RankState& state, const OptimizerBlock& block) const {
  RT_ASSIGN_OR_RETURN(
      const std::vector<double> squares,
      TensorSums([&](int slab, const Piece& piece, int64_t first, int64_t count) {
        const OptimizerRow& row = block.rows[piece.tensor];
        if (row.action == TensorAction::kSkip) return 0.0;
        const int64_t offset = piece.offset + first;
        return SumSquaredUpdates(row, state.slab(slab).slab(Component::kM).data() + offset,
                                 state.slab(slab).slab(Component::kV).data() + offset, count);
      }));
  double sum = 0, moved = 0;
  for (size_t t = 0; t < squares.size(); ++t) {
    if (block.rows[t].action == TensorAction::kSkip) continue;
    sum = sum + squares[t];
    moved += static_cast<double>(map_.layout().tensors()[t].numel());
  }
  return moved == 0 ? 0.0 : math::Sqrt(sum / moved);
}

// The same of each row of a tensor whose rows are divided among the shards.
Result<std::vector<double>> Updater::RowSquares(int tensor) const {
  const Layout& layout = map_.layout();
  const TensorSpec& spec = layout.tensors()[tensor];
  RT_CHECK(spec.split == Split::kRows);
  std::vector<double> mine;
  for (int i = 0; i < map_.shard_count(); ++i) {
    const Piece& piece = *layout.FindPiece(map_.first_shard() + i, tensor);
    const float* gradient = pass_->gradient(i).data() + piece.offset;
    const size_t base = mine.size();
    mine.resize(base + piece.rows());
    context_.engine.pool().Run(piece.rows(), [&](int64_t row, int) {
      for (int64_t at = 0; at < spec.cols; at += kSquareBlock) {
        const double sum = SumSquaresBlock(context_.engine.isa(), gradient + row * spec.cols + at,
                                           std::min(kSquareBlock, spec.cols - at));
        mine[base + row] = at == 0 ? sum : mine[base + row] + sum;
      }
    });
  }
  std::vector<double> all(spec.rows);
  RT_RETURN_IF_ERROR(context_.comm.AllGather(context_.place.tp_group(), mine.data(), all.data(),
                                             mine.size() * sizeof(double)));
  return all;
}

Result<GradientSquares> Updater::Squares() const {
  const std::vector<TensorSpec>& tensors = map_.layout().tensors();
  GradientSquares squares;
  RT_ASSIGN_OR_RETURN(squares.tensors, TensorSquares());
  squares.rows.resize(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (!IsClippedByRows(recipe_, tensors[t])) continue;
    RT_ASSIGN_OR_RETURN(squares.rows[t], RowSquares(static_cast<int>(t)));
  }
  return squares;
}

// Loss and gradient.
Status Updater::Measure(const RankState& state, const UpdateDirective& directive,
                        UpdateRecord* record) {
  RT_CHECK_EQ(recipe_.data.SamplesPerStep(), std::ssize(directive.samples));
  record->update = state.state.counters.position + 1;
  record->level = LevelName(recipe_.numerics.level);
  context_.comm.set_phase("update " + std::to_string(record->update));
  RT_RETURN_IF_ERROR(DigestTokens(directive.samples, record));
  RT_ASSIGN_OR_RETURN(record->evaluation_loss, EvaluationLoss(state));
  RT_ASSIGN_OR_RETURN(const std::vector<TokenBatch> batches, ReadStep(directive.samples));
  RT_ASSIGN_OR_RETURN(record->loss, pass_->Gradients(state, batches));
  return {};
}

// Whether the update is applied: clause 16, and what it is told.
UpdateAction Updater::Decide(const UpdateDirective& directive, UpdateResult* result) const {
  UpdateRecord& record = result->record;
  const auto finite = [](double x) { return std::isfinite(x); };
  if (!finite(record.loss) || !finite(record.gradient_norm) ||
      !std::all_of(record.tensor_norms.begin(), record.tensor_norms.end(), finite)) {
    result->reason = FirstNonFinite(record);
    if (recipe_.optimizer.non_finite == NonFinitePolicy::kHalt) {
      record.action = "halted";
      return UpdateAction::kHalted;
    }
    if (recipe_.optimizer.non_finite == NonFinitePolicy::kSkip) {
      record.action = "skipped";
      return UpdateAction::kSkipped;
    }
  }
  if (!directive.skip) return UpdateAction::kApplied;
  result->reason = "an intervention skips it";
  record.action = "skipped";
  return UpdateAction::kSkipped;
}

// c_u of each tensor: clause 12.
Status Updater::ClipUpdates(const RankState& state, OptimizerBlock* block) const {
  const double limit = recipe_.optimizer.update_clip;
  if (!(limit > 0)) return {};
  RT_ASSIGN_OR_RETURN(
      const std::vector<double> squares,
      TensorSums([&](int slab, const Piece& piece, int64_t first, int64_t count) {
        double sum = 0;
        ForEachClip(*block, {&piece, first, count}, [&](int64_t at, int64_t run, float clip) {
          const int64_t offset = piece.offset + first + at;
          const double part =
              SumUpdateSquaresBlock(context_.engine.isa(), block->rows[piece.tensor], clip,
                                    pass_->gradient(slab).data() + offset,
                                    state.slab(slab).slab(Component::kV).data() + offset, run);
          sum = at == 0 ? part : sum + part;
        });
        return sum;
      }));
  for (size_t t = 0; t < squares.size(); ++t) {
    const double mean = squares[t] / static_cast<double>(map_.layout().tensors()[t].numel());
    const double coefficient = limit / math::Sqrt(mean);
    if (coefficient < 1.0) block->rows[t].update_clip = static_cast<float>(coefficient);
  }
  return {};
}

Result<TensorNorms> Updater::Apply(const OptimizerBlock& block, RankState* state) {
  const Layout& layout = map_.layout();
  const size_t tensors = layout.tensors().size();
  std::vector<UpdateSums> mine(map_.shard_count() * tensors);
  for (int i = 0; i < map_.shard_count(); ++i) {
    ApplyBlock(context_.engine, layout, block, layout.pieces(map_.first_shard() + i),
               pass_->gradient(i).data(), &state->slab(i), &mine[i * tensors]);
  }
  std::vector<Piece> replicas;
  for (const ParameterMap::Replica& replica : map_.replicas()) replicas.push_back(replica.piece);
  ApplyBlock(context_.engine, map_.layout(), block, replicas,
             pass_->gradient(map_.shard_count()).data(), &state->replicas);
  std::vector<UpdateSums> all(layout.shards() * tensors), sums(tensors);
  RT_RETURN_IF_ERROR(context_.comm.AllGather(context_.place.tp_group(), mine.data(), all.data(),
                                             mine.size() * sizeof(UpdateSums)));
  for (size_t i = 0; i < all.size(); ++i) sums[i % tensors] += all[i];
  return NormsOf(sums);
}

Result<Clips> Updater::Gradient(const RankState& state, const UpdateDirective& directive) {
  RT_ASSIGN_OR_RETURN(const std::vector<TokenBatch> batches, ReadStep(directive.samples));
  RT_RETURN_IF_ERROR(pass_->Gradients(state, batches).status());
  RT_ASSIGN_OR_RETURN(const GradientSquares squares, Squares());
  return ClipGradient(recipe_, map_.layout().tensors(), squares, state.state.memory);
}

void Updater::EmitPieces(const std::string& suffix,
                         const std::function<const float*(int slab)>& elements) const {
  const Layout& layout = map_.layout();
  for (int i = 0; i < map_.shard_count(); ++i) {
    const int shard = map_.first_shard() + i;
    for (const Piece& piece : layout.pieces(shard)) {
      pass_->probe()->Op(
          fmt::format("optimizer/{}{}/shard{}", layout.tensors()[piece.tensor].name, suffix, shard),
          elements(i) + piece.offset, piece.rows(), piece.cols());
    }
  }
}

void Updater::EmitGradient() const {
  if (pass_->probe() == nullptr) return;
  EmitPieces("#g", [this](int slab) { return pass_->gradient(slab).data(); });
}

void Updater::EmitOptimizer(const UpdateRecord& record, const OptimizerBlock& block,
                            const RankState& state) const {
  if (pass_->probe() == nullptr) return;
  const std::vector<double>& norms = record.tensor_norms;
  pass_->probe()->Op("optimizer/norms", norms.data(), std::ssize(norms), 1);
  std::vector<double> rows;
  for (const OptimizerRow& r : block.rows) {
    for (const double x :
         {static_cast<double>(r.action), static_cast<double>(r.t), double{r.lr}, double{r.beta1},
          double{r.one_minus_beta1}, double{r.beta2}, double{r.one_minus_beta2},
          double{r.bias_correction1}, double{r.bias_correction2}, double{r.eps},
          double{r.weight_decay}, double{r.clip}, double{r.update_clip}}) {
      rows.push_back(x);
    }
  }
  const int64_t tensors = std::ssize(block.rows);
  pass_->probe()->Op("optimizer/rows", rows.data(), tensors, std::ssize(rows) / tensors);
  for (const Component c : {Component::kParameter, Component::kM, Component::kV}) {
    EmitPieces(std::string("#") + ComponentName(c),
               [&](int slab) { return state.slab(slab).slab(c).data(); });
  }
}

Result<UpdateResult> Updater::Run(RankState* state, const UpdateDirective& directive) {
  Counters& counters = state->state.counters;
  const std::vector<TensorSpec>& tensors = map_.layout().tensors();
  UpdateResult result;
  UpdateRecord& record = result.record;
  RT_RETURN_IF_ERROR(Measure(*state, directive, &record));
  EmitGradient();
  RT_ASSIGN_OR_RETURN(const GradientSquares squares, Squares());
  const Clips clips = ClipGradient(recipe_, tensors, squares, state->state.memory);
  for (double square : squares.tensors) record.tensor_norms.push_back(math::Sqrt(square));
  record.gradient_norm = clips.gradient_norm;
  record.clip = clips.smallest;
  if (recipe_.optimizer.clip_scope != ClipScope::kGlobal) {
    record.tensor_clips.assign(clips.tensors.begin(), clips.tensors.end());
  }
  record.lr = AppliedLearningRate(recipe_.schedule, counters.schedule_index);
  result.action = Decide(directive, &result);
  if (result.action == UpdateAction::kHalted) return result;
  const bool skipped = result.action == UpdateAction::kSkipped;
  result.block = MakeOptimizerBlock(
      recipe_, tensors, counters, clips,
      {.lr = record.lr, .skip = skipped, .skipped_t_moves = directive.skip && directive.t_moves});
  RT_RETURN_IF_ERROR(ClipUpdates(*state, &result.block));
  for (size_t t = 0; recipe_.optimizer.update_clip > 0 && t < tensors.size(); ++t) {
    record.tensor_update_clips.push_back(result.block.rows[t].update_clip);
  }
  RT_ASSIGN_OR_RETURN(record.norms, Apply(result.block, state));
  EmitOptimizer(record, result.block, *state);
  if (recipe_.store.flight.update_rms > 0) {
    RT_ASSIGN_OR_RETURN(record.update_rms, UpdateRms(*state, result.block));
  }
  for (size_t t = 0; t < counters.adam_t.size(); ++t) counters.adam_t[t] = result.block.rows[t].t;
  counters.position += 1;
  counters.schedule_index += directive.schedule_moves ? 1 : 0;
  counters.data_cursor = directive.cursor;
  if (!skipped) state->state.memory = clips.memory;
  return result;
}

// The halt names the first tensor whose gradient is not finite, or the loss.
std::string Updater::FirstNonFinite(const UpdateRecord& record) const {
  for (size_t t = 0; t < record.tensor_norms.size(); ++t) {
    if (std::isfinite(record.tensor_norms[t])) continue;
    return fmt::format("the gradient of {} has norm {}", map_.layout().tensors()[t].name,
                       record.tensor_norms[t]);
  }
  return std::isfinite(record.loss) ? fmt::format("the gradient norm is {}", record.gradient_norm)
                                    : fmt::format("the loss is {}", record.loss);
}

}  // namespace retrace
