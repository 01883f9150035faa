#include "replay/update.h"

#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "core/scalar_math.h"
#include "core/schedule.h"
#include "kernels/adamw.h"

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

double TreeOver(const double* values, int64_t count, int64_t stride) {
  if (count == 1) return values[0];
  return TreeOver(values, count / 2, stride) +
         TreeOver(values + count / 2 * stride, count / 2, stride);
}

// Applies a block to elements [first, first + count) of a piece, row by row where the clip is per
// row.
void ApplyChunk(Isa isa, const OptimizerBlock& block, const Chunk& chunk, const float* gradient,
                ShardState* slab) {
  const OptimizerRow& row = block.rows[chunk.piece->tensor];
  const int64_t offset = chunk.piece->offset + chunk.first;
  float* p = slab->slab(Component::kParameter).data() + offset;
  float* m = slab->slab(Component::kM).data() + offset;
  float* v = slab->slab(Component::kV).data() + offset;
  const float* g = gradient + offset;
  const std::vector<float>* clips =
      block.row_clips.empty() ? nullptr : &block.row_clips[chunk.piece->tensor];
  if (clips == nullptr || clips->empty()) {
    AdamW(isa, row, row.clip, g, p, m, v, chunk.count);
    return;
  }
  const int64_t cols = chunk.piece->cols();
  for (int64_t at = 0; at < chunk.count;) {
    const int64_t element = chunk.first + at;
    const int64_t count = std::min(chunk.count - at, cols - element % cols);
    const float clip = (*clips)[chunk.piece->row_first + element / cols];
    AdamW(isa, row, clip, g + at, p + at, m + at, v + at, count);
    at += count;
  }
}

}  // namespace

void ApplyBlock(Engine& engine, const Layout& layout, const OptimizerBlock& block,
                const std::vector<Piece>& pieces, const float* gradient, ShardState* slab) {
  RT_CHECK_EQ(layout.tensors().size(), block.rows.size());
  const std::vector<Chunk> chunks = ChunksOf(pieces);
  engine.pool().Run(static_cast<int64_t>(chunks.size()), [&](int64_t i, int) {
    ApplyChunk(engine.isa(), block, chunks[i], gradient, slab);
  });
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
Result<std::vector<TokenBatch>> Updater::ReadStep(int64_t first_sample) const {
  const DataRecipe& data = recipe_.data;
  const RankPlace& place = context_.place;
  std::vector<TokenBatch> batches(data.micro_batches);
  for (int64_t i = 0; i < data.micro_batches; ++i) {
    const int64_t lane = i % recipe_.topology.lanes;
    if (lane < place.first_lane || lane >= place.first_lane + place.lane_count) continue;
    RT_ASSIGN_OR_RETURN(batches[i], ReadBatch(batches_, false,
                                              first_sample + i * data.micro_batch_size,
                                              data.micro_batch_size, data.sequence_length));
  }
  return batches;
}

Status Updater::DigestTokens(int64_t first_sample, UpdateRecord* record) const {
  DigestStream stream;
  RT_ASSIGN_OR_RETURN(const TokenBatch step,
                      ReadBatch(batches_, false, first_sample, recipe_.data.SamplesPerStep(),
                                recipe_.data.sequence_length));
  AppendTokens(step, &stream);
  record->tokens = stream.Finish();
  record->first_sample = first_sample;
  record->samples = recipe_.data.SamplesPerStep();
  return {};
}

// ||g|| of each tensor: clause 11.
Result<std::vector<double>> Updater::TensorNorms() const {
  const Layout& layout = map_.layout();
  const int64_t tensors = static_cast<int64_t>(layout.tensors().size());
  std::vector<double> mine(map_.shard_count() * tensors, 0.0);
  for (int i = 0; i < map_.shard_count(); ++i) {
    const std::vector<Chunk> chunks = ChunksOf(layout.pieces(map_.first_shard() + i));
    std::vector<double> sums(chunks.size());
    const float* gradient = pass_->gradient(i).data();
    context_.engine.pool().Run(static_cast<int64_t>(chunks.size()), [&](int64_t c, int) {
      sums[c] = SumSquaresBlock(context_.engine.isa(),
                                gradient + chunks[c].piece->offset + chunks[c].first,
                                chunks[c].count);
    });
    for (size_t c = 0; c < chunks.size(); ++c) {
      double& sum = mine[i * tensors + chunks[c].piece->tensor];
      sum = chunks[c].first == 0 ? sums[c] : sum + sums[c];
    }
  }
  std::vector<double> all(layout.shards() * tensors);
  RT_RETURN_IF_ERROR(context_.comm.AllGather(context_.place.tp_group(), mine.data(), all.data(),
                                             mine.size() * sizeof(double)));
  std::vector<double> squares(tensors);
  for (int64_t t = 0; t < tensors; ++t) {
    squares[t] = TreeOver(all.data() + t, layout.shards(), tensors);
  }
  return squares;
}

OptimizerBlock Updater::MakeBlock(const RankState& state, double clip, double lr,
                                  TensorAction action) const {
  const OptimizerRecipe& opt = recipe_.optimizer;
  OptimizerBlock block;
  const std::vector<TensorSpec>& tensors = map_.layout().tensors();
  for (size_t t = 0; t < tensors.size(); ++t) {
    const bool skipped = action == TensorAction::kSkip;
    const int64_t adam_t = state.state.counters.adam_t[t] + (skipped ? 0 : 1);
    const bool decays = opt.decay_on == DecayOn::kAll || !tensors[t].vector;
    OptimizerRow row;
    row.action = action;
    row.t = adam_t;
    row.lr = static_cast<float>(lr);
    row.beta1 = static_cast<float>(opt.beta1);
    row.one_minus_beta1 = static_cast<float>(1.0 - opt.beta1);
    row.beta2 = static_cast<float>(opt.beta2);
    row.one_minus_beta2 = static_cast<float>(1.0 - opt.beta2);
    row.bias_correction1 = static_cast<float>(1.0 - math::PowInt(opt.beta1, adam_t));
    row.bias_correction2 = static_cast<float>(1.0 - math::PowInt(opt.beta2, adam_t));
    row.eps = static_cast<float>(opt.eps);
    row.weight_decay = static_cast<float>(decays ? opt.weight_decay : 0.0);
    row.clip = static_cast<float>(clip);
    block.rows.push_back(row);
  }
  return block;
}

Result<UpdateResult> Updater::Run(RankState* state) {
  Counters& counters = state->state.counters;
  UpdateResult result;
  UpdateRecord& record = result.record;
  record.update = counters.position + 1;
  context_.comm.set_phase("update " + std::to_string(record.update));
  RT_RETURN_IF_ERROR(DigestTokens(counters.data_cursor, &record));
  RT_ASSIGN_OR_RETURN(record.evaluation_loss, EvaluationLoss(*state));
  RT_ASSIGN_OR_RETURN(const std::vector<TokenBatch> batches, ReadStep(counters.data_cursor));
  RT_ASSIGN_OR_RETURN(record.loss, pass_->Gradients(*state, batches));
  RT_ASSIGN_OR_RETURN(const std::vector<double> squares, TensorNorms());
  double sum = 0;
  for (double square : squares) {
    sum = sum + square;
    record.tensor_norms.push_back(math::Sqrt(square));
  }
  record.gradient_norm = math::Sqrt(sum);
  record.lr = AppliedLearningRate(recipe_.schedule, counters.schedule_index);
  const double coefficient = recipe_.optimizer.clip / (record.gradient_norm + 1e-6);
  if (recipe_.optimizer.clip > 0 && coefficient < 1.0) {
    record.clip = static_cast<float>(coefficient);
  }
  TensorAction action = TensorAction::kUpdate;
  if (!std::isfinite(record.loss) || !std::isfinite(record.gradient_norm)) {
    result.reason = FirstNonFinite(record);
    if (recipe_.optimizer.non_finite == NonFinitePolicy::kHalt) {
      result.action = UpdateAction::kHalted;
      record.action = "halted";
      return result;
    }
    if (recipe_.optimizer.non_finite == NonFinitePolicy::kSkip) {
      result.action = UpdateAction::kSkipped;
      record.action = "skipped";
      action = TensorAction::kSkip;
    }
  }
  result.block = MakeBlock(*state, record.clip, record.lr, action);
  for (int i = 0; i < map_.shard_count(); ++i) {
    ApplyBlock(context_.engine, map_.layout(), result.block,
               map_.layout().pieces(map_.first_shard() + i), pass_->gradient(i).data(),
               &state->slab(i));
  }
  std::vector<Piece> replicas;
  for (const ParameterMap::Replica& replica : map_.replicas()) replicas.push_back(replica.piece);
  ApplyBlock(context_.engine, map_.layout(), result.block, replicas,
             pass_->gradient(map_.shard_count()).data(), &state->replicas);
  for (size_t t = 0; t < counters.adam_t.size(); ++t) counters.adam_t[t] = result.block.rows[t].t;
  counters.position += 1;
  counters.schedule_index += 1;
  counters.data_cursor += recipe_.data.SamplesPerStep();
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
