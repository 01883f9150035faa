#include "replay/recipe_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/layout.h"

namespace retrace {
namespace {

// Element counts of one rank's activations, in the names of transformer.h.
class Activations {
 public:
  Activations(const Recipe& recipe, int64_t shards)
      : recipe_(recipe),
        model_(recipe.model),
        V_(recipe.topology.virtual_shards),
        n_(shards),
        S_(recipe.data.sequence_length),
        T_(recipe.data.micro_batch_size * S_),
        TH_(T_ * model_.hidden_size),
        inner_(model_.intermediate_size / V_) {}

  int64_t Elements() const {
    const bool recompute = recipe_.execution.recompute_activations;
    int64_t sum = (model_.layers + 1) * TH_ + Head() + Scratch() + Rope();
    std::vector<int64_t> largest;  // recompute: one layer's buffers, each as large as any layer's
    for (int64_t l = 0; l < model_.layers; ++l) {
      const std::vector<int64_t> saved = Saved(l);
      largest.resize(saved.size());
      for (size_t i = 0; i < saved.size(); ++i) {
        if (!recompute) sum += saved[i];
        largest[i] = std::max(largest[i], saved[i]);
      }
    }
    for (int64_t elements : largest) sum += recompute ? elements : 0;
    return sum;
  }

 private:
  int64_t QueryHeads() const { return model_.query_heads / V_; }
  int64_t KvHeads(int64_t l) const { return std::max<int64_t>(1, model_.KvHeads(l) / V_); }
  int64_t QueryColumns(int64_t l) const { return QueryHeads() * model_.HeadDim(l); }
  int64_t KvColumns(int64_t l) const { return KvHeads(l) * model_.HeadDim(l); }
  bool Materialised() const { return model_.attention == AttentionKind::kMaterialised; }
  int64_t Square() const { return T_ * QueryHeads() * S_; }  // all scores of one shard

  // LayerSaved: hidden-sized buffers, their row scales, then those of each shard.
  std::vector<int64_t> Saved(int64_t l) const {
    const int64_t q = n_ * T_ * QueryColumns(l), kv = n_ * T_ * KvColumns(l);
    const int64_t q_rows = n_ * T_ * QueryHeads(), kv_rows = n_ * T_ * KvHeads(l);
    const int64_t row_scales = 2 * (model_.AppliesPreNorm() ? T_ : 0) + 2 * (model_.AppliesPostNorm() ? T_ : 0);
    return {5 * TH_ + row_scales,  // h, o, mid, h2, down
            3 * q,                 // q_raw, q, attended
            (model_.HasValueProjection(l) ? 4 : 3) * kv,
            model_.AppliesQkNorm() ? q_rows : 0,
            (model_.AppliesQkNorm() ? kv_rows : 0) + (model_.v_norm ? kv_rows : 0),
            3 * n_ * T_ * inner_,  // gate, up, act
            Materialised() ? n_ * Square() : 2 * q_rows};
  }

  int64_t Head() const {
    const int64_t logits = n_ * T_ * (model_.vocab_size / V_);
    return TH_ + 3 * T_ + 2 * n_ * T_ + logits * (model_.final_logit_softcapping > 0 ? 2 : 1);
  }

  // What all layers share: d, dy, dh, branch, partial, embedded, and the gradients of a layer.
  int64_t Scratch() const {
    int64_t q = 0, kv = 0, group = 0;
    for (int64_t l = 0; l < model_.layers; ++l) {
      q = std::max(q, T_ * QueryColumns(l));
      kv = std::max(kv, T_ * KvColumns(l));
      const bool grouped = QueryHeads() > KvHeads(l);
      if (grouped) group = std::max(group, 2 * T_ * QueryColumns(l));  // dk_head, dv_head
    }
    const bool rounded = recipe_.precision.Forward(Point::kSoftmax) == Format::kBf16;
    const int64_t attention =
        Materialised() ? Square() * (rounded ? 2 : 1) : T_ * QueryHeads();  // dp, p_rounded; dot
    return (model_.AppliesPostNorm() ? 4 : 3) * TH_ + 2 * n_ * TH_ +
           n_ * (q + 2 * kv + std::max(q, T_ * inner_) + 2 * T_ * inner_) + attention + group;
  }

  int64_t Rope() const { return S_ * (model_.head_dim + model_.global_head_dim); }

  const Recipe& recipe_;
  const ModelRecipe& model_;
  const int64_t V_, n_, S_, T_, TH_, inner_;
};

int64_t ComputeBytes(const Recipe& recipe) { return recipe.precision.AnyFp64() ? 8 : 4; }

}  // namespace

RankPlan PlanRank(const Recipe& recipe, const ParameterMap& map, const RankPlace& place) {
  RankPlan plan;
  plan.tp_rank = place.tp_rank;
  for (int i = 0; i < place.shard_count; ++i) plan.parameters += map.slab_numel(i);
  plan.replicas = map.slab_numel(place.shard_count);
  const int64_t held = plan.parameters + plan.replicas, wide = ComputeBytes(recipe);
  plan.state_bytes = kNumComponents * held * 4;
  // A gradient for each lane, one more where a lane adds up micro-batches, and the step's in FP32.
  const bool adds = recipe.data.micro_batches > recipe.topology.lanes;
  plan.gradient_bytes = held * ((place.lane_count + (adds ? 1 : 0)) * wide + 4);
  const bool own_weights = recipe.precision.Forward(Point::kWeights) == Format::kFp32;
  plan.weight_copy_bytes = own_weights ? 0 : held * wide;
  plan.activation_bytes = Activations(recipe, place.shard_count).Elements() * wide;
  // Two buffers, each of the largest step: a keyframe.
  plan.staging_bytes = 2 * kNumComponents * plan.parameters * 4;
  return plan;
}

namespace {

// Multiply-adds of the forward products for one token: matrices, and scores and values over as many
// keys as are computed with.
double ForwardProducts(const Recipe& recipe, const Layout& layout) {
  const ModelRecipe& model = recipe.model;
  double products = 0;
  for (const TensorSpec& tensor : layout.tensors()) {
    const bool looked_up = tensor.name == "model.embed_tokens.weight" && !model.tie_word_embeddings;
    if (!tensor.vector && !looked_up) products += static_cast<double>(tensor.numel());
  }
  const double length = static_cast<double>(recipe.data.sequence_length);
  for (int64_t l = 0; l < model.layers; ++l) {
    double keys = length;
    if (model.attention == AttentionKind::kBlockwise) {
      const double window = static_cast<double>(model.sliding_window);
      keys = model.IsFull(l) ? length / 2 : std::min(length / 2, window);
    }
    products += 2 * keys * static_cast<double>(model.query_heads * model.HeadDim(l));
  }
  return products;
}

double UpdateFlops(const Recipe& recipe, const Layout& layout) {
  const double tokens =
      static_cast<double>(recipe.data.SamplesPerStep() * recipe.data.sequence_length);
  const double passes = recipe.execution.recompute_activations ? 4 : 3;  // backward: two forwards
  const double evaluated =
      static_cast<double>(recipe.data.evaluation_samples * recipe.data.sequence_length);
  return 2 * ForwardProducts(recipe, layout) * (passes * tokens + evaluated);
}

// first, first + step, ... up to last; empty where last < first.
struct Progression {
  int64_t first = 0, step = 1, last = -1;

  int64_t Count() const { return last < first ? 0 : (last - first) / step + 1; }
};

// x with base * x = 1 modulo `modulus`, of which base is prime to; by Euclid's algorithm.
int64_t InverseModulo(int64_t base, int64_t modulus) {
  int64_t r0 = modulus, r1 = base % modulus, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const int64_t quotient = r0 / r1;
    r0 = std::exchange(r1, r0 - quotient * r1);
    t0 = std::exchange(t1, t0 - quotient * t1);
  }
  return (t0 % modulus + modulus) % modulus;
}

// What is in both: again a progression, with the least common multiple as its step.
Progression Both(const Progression& a, const Progression& b) {
  const int64_t common = std::gcd(a.step, b.step);
  if (a.Count() == 0 || b.Count() == 0 || (b.first - a.first) % common != 0) return {};
  const int64_t from = std::max(a.first, b.first), last = std::min(a.last, b.last);
  const int64_t start = a.first + (from - a.first + a.step - 1) / a.step * a.step;
  // The i-th member of a from `start` on is in b where start + i * a.step = b.first modulo b.step.
  const int64_t cycle = b.step / common;
  const int64_t gap = (((b.first - start) / common) % cycle + cycle) % cycle;
  const __int128 i = static_cast<__int128>(gap) * InverseModulo(a.step / common, cycle) % cycle;
  const __int128 first = start + i * a.step;
  if (first > last) return {};
  const __int128 step = static_cast<__int128>(a.step) * cycle;
  return {static_cast<int64_t>(first),
          static_cast<int64_t>(std::min<__int128>(step, int64_t{1} << 62)), last};
}

int64_t CountOfUnion(const Progression& a, const Progression& b, const Progression& c) {
  const Progression ab = Both(a, b);
  return a.Count() + b.Count() + c.Count() - ab.Count() - Both(a, c).Count() -
         Both(b, c).Count() + Both(ab, c).Count();
}

// As KeepOf (retention.h) decides for positions 0 .. steps; by formula, since a recipe may name 2^40
// steps. tests/recipe_plan_test.cc counts with KeepOf.
void CountKept(const Recipe& recipe, RecipePlan* plan) {
  const StoreRecipe& store = recipe.store;
  const int64_t steps = recipe.steps;
  // The first state is a keyframe whatever the policy.
  const Progression every = {0, store.every > 0 ? store.every : steps + 1, steps};
  const int64_t begin = std::max<int64_t>(0, store.window_first);
  const Progression window = {begin, store.keyframe_every, std::min(steps, store.window_last)};
  const Progression ring = {0, store.keyframe_every, store.HasRing() ? steps : -1};
  plan->keyframes = CountOfUnion(every, window, ring);
  const int64_t kept = store.HasRing()
                           ? steps + 1
                           : CountOfUnion(every, {window.first, 1, window.last}, {});
  plan->journals = kept - plan->keyframes;
  const bool last_kept = store.HasRing() || (window.Count() > 0 && window.last == steps) ||
                         (store.every > 0 && steps % store.every == 0) || steps == 0;
  if (!last_kept) ++plan->keyframes;
}

}  // namespace

Result<RecipePlan> PlanRecipe(const Recipe& recipe, int tp, int dp) {
  RT_ASSIGN_OR_RETURN(const Layout layout,
                      Layout::Make(recipe.model, recipe.topology.virtual_shards));
  RecipePlan plan;
  plan.parameters = layout.parameters();
  plan.tensors = std::ssize(layout.tensors());
  plan.tokens = recipe.data.SamplesPerStep() * recipe.data.sequence_length;
  plan.flops = UpdateFlops(recipe, layout);
  for (int rank = 0; rank < tp; ++rank) {
    RT_ASSIGN_OR_RETURN(const RankPlace place, RankPlace::Make(recipe.topology, tp, dp, rank));
    const ParameterMap map(layout, place.first_shard, place.shard_count);
    plan.ranks.push_back(PlanRank(recipe, map, place));
  }
  plan.keyframe_bytes = kNumComponents * plan.parameters * 4;
  plan.journal_bytes = plan.parameters * 4;
  CountKept(recipe, &plan);
  return plan;
}

int64_t PlannedSamples(const Recipe& recipe) {
  return recipe.steps * recipe.data.SamplesPerStep();
}

int64_t UpdatesLeft(const Recipe& recipe, int64_t data_cursor) {
  return std::max<int64_t>(0, PlannedSamples(recipe) - data_cursor) / recipe.data.SamplesPerStep();
}

}  // namespace retrace
