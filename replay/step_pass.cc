#include "replay/step_pass.h"

#include <cmath>
#include <type_traits>

#include "core/scalar_math.h"
#include "replay/step_loss.h"

namespace retrace {
namespace {

template <class T>
class TypedPass : public StepPass {
 public:
  TypedPass(const Recipe& recipe, const ParameterMap& map, RankContext context)
      : recipe_(recipe),
        map_(map),
        context_(context),
        shard_tree_(context.engine, context.comm, context.place.tp_group()),
        lane_tree_(context.engine, context.comm, context.place.dp_group()),
        transformer_(recipe_, map, context.engine, shard_tree_),
        weights_(map.slabs()),
        lanes_(context.place.lane_count),
        gradient_(map.slabs()) {}

  void set_probe(Probe* probe) override {
    probe_ = probe;
    transformer_.set_probe(probe);
  }
  Probe* probe() const override { return probe_; }

  Result<double> Loss(const RankState& state, const TokenBatch& batch,
                      const std::string& name) override {
    const ComputeScope scope(context_.engine.device());
    const WeightSlabs<T> weights = ComputeWeights(state);
    double sum = 0;
    // In pieces of a micro-batch's size, added in order.
    const int64_t most = recipe_.data.micro_batch_size;
    for (int64_t first = 0; first < batch.sequences; first += most) {
      const TokenBatch part = Part(batch, first, std::min(most, batch.sequences - first));
      const std::string part_name =
          batch.sequences > most ? name + std::to_string(first / most) : name;
      RT_ASSIGN_OR_RETURN(const double part_sum, transformer_.Forward(part, weights, part_name));
      sum = sum + part_sum;
    }
    return sum / static_cast<double>(batch.tokens());
  }

  Result<double> Gradients(const RankState& state,
                           const std::vector<TokenBatch>& batches) override {
    const ComputeScope scope(context_.engine.device());
    const int64_t G = recipe_.topology.lanes;
    const WeightSlabs<T> weights = ComputeWeights(state);
    std::vector<double> sums(batches.size(), 0.0);
    for (int lane = 0; lane < context_.place.lane_count; ++lane) {
      for (size_t i = context_.place.first_lane + lane; i < batches.size(); i += G) {
        RT_RETURN_IF_ERROR(MicroBatch(batches[i], weights, i, lane, &sums[i]));
      }
    }
    RT_RETURN_IF_ERROR(CombineLanes());
    return StepLoss(batches.size(), sums);
  }

  const ComputeVector<float>& gradient(int slab) const override { return gradient_[slab]; }

 private:
  static TokenBatch Part(const TokenBatch& batch, int64_t first, int64_t count) {
    if (count == batch.sequences) return batch;
    TokenBatch part;
    part.sequences = count;
    part.length = batch.length;
    const auto cut = [&](const std::vector<int32_t>& all) {
      return std::vector<int32_t>(all.begin() + first * batch.length,
                                  all.begin() + (first + count) * batch.length);
    };
    part.ids = cut(batch.ids);
    part.labels = cut(batch.labels);
    return part;
  }

  // The master itself, or its copy in the format of point `weights`.
  WeightSlabs<T> ComputeWeights(const RankState& state) {
    const Format format = recipe_.precision.Forward(Point::kWeights);
    WeightSlabs<T> slabs;
    context_.engine.Sync();  // the copies may still be read
    for (int i = 0; i < map_.slabs(); ++i) {
      const std::vector<float>& master = state.slab(i).slab(Component::kParameter);
      if constexpr (std::is_same_v<T, float>) {
        if (format == Format::kFp32 && context_.engine.device() == nullptr) {
          slabs.push_back(master.data());
          continue;
        }
      }
      weights_[i].resize(master.size());
      const float* rounded = master.data();
      if (std::is_same_v<T, double> || context_.engine.device() != nullptr) {
        std::copy(master.begin(), master.end(), weights_[i].begin());
      }
      if constexpr (std::is_same_v<T, float>) {
        if (context_.engine.device() != nullptr) rounded = weights_[i].data();
        if (format == Format::kBf16) {
          context_.engine.Run(context_.engine.ops<float>().scale,
                              ScaleArgs<float>{.x = rounded, .y = weights_[i].data(),
                                               .scale = 1.0f, .round = Rounding::kBf16},
                              static_cast<int64_t>(master.size()), 1, 16);
        }
      }
      slabs.push_back(weights_[i].data());
    }
    return slabs;
  }

  T InverseTokens(const TokenBatch& batch) const {
    const double tokens = static_cast<double>(batch.tokens());
    const double batches = static_cast<double>(recipe_.data.micro_batches);
    return static_cast<T>(recipe_.optimizer.loss_division == LossDivision::kStepTokens
                              ? 1.0 / (tokens * batches)
                              : (1.0 / tokens) / batches);
  }

  std::vector<ComputeVector<T>>& LaneSlabs(int lane) {
    std::vector<ComputeVector<T>>& slabs = lanes_[lane];
    slabs.resize(map_.slabs());
    for (int i = 0; i < map_.slabs(); ++i) slabs[i].resize(map_.slab_numel(i));
    return slabs;
  }

  // The first micro-batch of a lane is written, a later one finished apart and added (clause 8).
  Status MicroBatch(const TokenBatch& batch, const WeightSlabs<T>& weights, size_t index, int lane,
                    double* sum) {
    const std::string name = "mb" + std::to_string(index);
    EmitTokens(batch, name);
    RT_ASSIGN_OR_RETURN(*sum, transformer_.Forward(batch, weights, name));
    std::vector<ComputeVector<T>>& slabs = LaneSlabs(lane);
    const bool first = static_cast<int64_t>(index) < recipe_.topology.lanes;
    if (!first) finished_.resize(map_.slabs());
    GradientSlabs<T> target;
    for (int i = 0; i < map_.slabs(); ++i) {
      if (!first) finished_[i].resize(map_.slab_numel(i));
      target.push_back(first ? slabs[i].data() : finished_[i].data());
    }
    RT_RETURN_IF_ERROR(transformer_.Backward(batch, weights, InverseTokens(batch), target));
    EmitGradients(target, name);
    for (int i = 0; !first && i < map_.slabs(); ++i) {
      context_.engine.Run(context_.engine.ops<T>().add,
                          AddArgs<T>{.dst = slabs[i].data(), .src = finished_[i].data(),
                                     .round = Rounding::kNone},
                          map_.slab_numel(i), 1, 16);
    }
    return {};
  }

  void EmitTokens(const TokenBatch& batch, const std::string& name) {
    if (!probe_) return;
    for (const auto& [what, tokens] : {std::pair("/ids", &batch.ids), {"/labels", &batch.labels}}) {
      const std::vector<T> numbers(tokens->begin(), tokens->end());
      probe_->Op(name + what, numbers.data(), batch.sequences, batch.length);
    }
  }

  void EmitGradients(const GradientSlabs<T>& gradients, const std::string& name) {
    if (!probe_) return;
    for (int i = 0; i < map_.shard_count(); ++i) {
      const int shard = map_.first_shard() + i;
      for (const Piece& piece : map_.layout().pieces(shard)) {
        probe_->Op(name + "/" + map_.layout().tensors()[piece.tensor].name + ".grad/shard" +
                       std::to_string(shard),
                   gradients[i] + piece.offset, piece.rows(), piece.cols());
      }
    }
  }

  Status CombineLanes() {
    for (int i = 0; i < map_.slabs(); ++i) {
      std::vector<T*> parts;
      for (auto& lane : lanes_) parts.push_back(lane[i].data());
      RT_RETURN_IF_ERROR(lane_tree_.Sum(parts, map_.slab_numel(i), Rounding::kNone,
                                        Rounding::kNone));
      RT_RETURN_IF_ERROR(context_.engine.Wait());
      if constexpr (std::is_same_v<T, float>) {
        std::swap(gradient_[i], lanes_[0][i]);
      } else {
        gradient_[i].assign(lanes_[0][i].begin(), lanes_[0][i].end());  // rounded once
      }
      for (float& g : gradient_[i]) g = g == g ? g : math::CanonicalNan(g);
    }
    return {};
  }

  // Every rank learns every micro-batch's sum; lanes as in clause 8.
  Result<double> StepLoss(size_t count, std::vector<double> sums) {
    const int dp = context_.place.dp;
    if (dp > 1) {
      std::vector<double> all(count * dp);
      RT_RETURN_IF_ERROR(context_.comm.AllGather(context_.place.dp_group(), sums.data(),
                                                 all.data(), count * sizeof(double)));
      for (size_t i = 0; i < count; ++i) {
        const int lane = static_cast<int>(i % recipe_.topology.lanes);
        sums[i] = all[lane / context_.place.lane_count * count + i];
      }
    }
    return retrace::StepLoss(recipe_, sums);
  }

  const Recipe recipe_;
  const ParameterMap& map_;
  RankContext context_;
  ShardTree shard_tree_, lane_tree_;
  Transformer<T> transformer_;
  Probe* probe_ = nullptr;
  std::vector<ComputeVector<T>> weights_;             // copies, where policy or device need them
  std::vector<std::vector<ComputeVector<T>>> lanes_;  // [lane][slab]
  std::vector<ComputeVector<T>> finished_;            // a micro-batch's gradient before it is added
  std::vector<ComputeVector<float>> gradient_;
};

}  // namespace

std::unique_ptr<StepPass> MakeStepPass(const Recipe& recipe, const ParameterMap& map,
                                       RankContext context) {
  const ComputeScope scope(context.engine.device());
  if (recipe.precision.AnyFp64()) return std::make_unique<TypedPass<double>>(recipe, map, context);
  return std::make_unique<TypedPass<float>>(recipe, map, context);
}

}  // namespace retrace
