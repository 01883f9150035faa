#include "replay/gpu_plan.h"

#include <algorithm>
#include <optional>

#include "core/layout.h"
#include "core/recipe_check.h"

namespace retrace {
namespace {

// What lies in a GPU's memory; staging is the host's.
int64_t GpuBytes(const RecipePlan& plan) {
  int64_t most = 0;
  for (const RankPlan& rank : plan.ranks) most = std::max(most, rank.update_bytes());
  return most;
}

class Roofline {
 public:
  Roofline(const Recipe& recipe, const GpuPlanOptions& options, const GpuPlan& plan)
      : recipe_(recipe), options_(options), plan_(plan), rank_(plan.recipe.ranks[0]) {}

  LevelCost Cost(bool native) const {
    LevelCost cost;
    cost.level = native ? "native" : "portable";
    const int gpus = options_.tp * options_.dp;
    cost.arithmetic_s = plan_.recipe.flops / gpus / Peak(native);
    cost.memory_s = MemoryBytes(native) / options_.peaks.memory;
    cost.exchange_s = ExchangeSeconds(native);
    cost.stall_s = StallSeconds(cost.update_s());
    return cost;
  }

  // Encoded bytes from storage, decoded; then AdamW: 28 bytes a parameter through the memory of the
  // GPU that has most of them.
  double WalkSeconds() const {
    const double node = static_cast<double>(plan_.journal_node_bytes);
    const double read = node * kJournalFileBytes / 4 / options_.peaks.storage;
    const double decoded = node / options_.peaks.encode;
    const double adam = 28.0 * static_cast<double>(rank_.parameters) / options_.peaks.memory;
    return std::max(read, decoded) + adam;
  }

 private:
  bool Bf16() const { return recipe_.precision.Forward(Point::kQkv) == Format::kBf16; }
  bool Fp64() const { return recipe_.precision.AnyFp64(); }

  // The portable order of additions is a chain of fused multiply-adds, which tensor cores do not
  // have; native has them in BF16 and FP64, and no TF32.
  double Peak(bool native) const {
    const GpuPeaks& peaks = options_.peaks;
    if (Fp64()) return native ? peaks.fp64_tensor : peaks.fp64;
    return native && Bf16() ? peaks.bf16_tensor : peaks.fp32;
  }

  double ElementBytes(bool native) const {
    if (Fp64()) return 8;
    return native && Bf16() ? 2 : 4;
  }

  double MicroBatches() const {  // of one rank's lanes
    return static_cast<double>(recipe_.data.micro_batches) / options_.dp;
  }

  // Each micro-batch: its weights once forward, once for the gradients of inputs, and once more where
  // activations are recomputed; its weight gradient written, and read and added to its lane; each
  // kept activation written and read forward, read and its gradient written backward. Once an update:
  // AdamW and norm, 32 bytes a parameter, and the digest, 12.
  double MemoryBytes(bool native) const {
    const double held = static_cast<double>(rank_.parameters + rank_.replicas);
    const double wide = ElementBytes(native);
    const double passes = recipe_.execution.recompute_activations ? 3 : 2;
    const double accumulate = Fp64() ? 8 : 4;
    const double activations =
        static_cast<double>(rank_.activation_bytes) / (Fp64() ? 8 : 4) * wide;
    const double each = held * (passes * wide + 4 * accumulate) + 4 * activations;
    return MicroBatches() * each + 44 * held;
  }

  // Hidden-sized sums over shards: attention's and the MLP's outputs, and the gradients of their
  // inputs, in each layer; those of embedding and head. One gradient over data-parallel ranks.
  double ExchangeSeconds(bool native) const {
    const double hidden =
        static_cast<double>(recipe_.data.micro_batch_size * recipe_.data.sequence_length *
                            recipe_.model.hidden_size) *
        ElementBytes(native);
    const double sums =
        static_cast<double>(recipe_.model.layers) *
            (recipe_.execution.recompute_activations ? 6 : 4) + 2;
    const int node = options_.gpus_per_node;
    const double tp = MicroBatches() * sums *
                      SumSeconds(hidden, options_.tp, std::min(options_.tp, node));
    const double gradient = static_cast<double>(rank_.parameters + rank_.replicas) * 4;
    const int copies = std::min(options_.dp, std::max(1, node / options_.tp));
    return tp + SumSeconds(gradient, options_.dp, copies);
  }

  // To add up `bytes` that each of n ranks has, `here` of which share a node (clause 10): 1/n goes to
  // each of the others, and comes back added. Links and network work at the same time.
  double SumSeconds(double bytes, int n, int here) const {
    const double part = 2 * bytes / n;
    return std::max(part * (here - 1) / options_.peaks.link,
                    part * (n - here) / options_.peaks.network);
  }

  // The copy to the host is waited for; encoding and writing overlap the next update.
  double StallSeconds(double update_s) const {
    const GpuPeaks& peaks = options_.peaks;
    const double share = 1.0 / static_cast<double>(recipe_.store.keyframe_every);
    const double raw = share * static_cast<double>(plan_.keyframe_node_bytes) +
                       (1 - share) * static_cast<double>(plan_.journal_node_bytes);
    const double files =
        share * static_cast<double>(plan_.keyframe_node_bytes) * kKeyframeFileBytes / 12 +
        (1 - share) * static_cast<double>(plan_.journal_node_bytes) * kJournalFileBytes / 4;
    const double copied = static_cast<double>(rank_.parameters) * (12 * share + 4 * (1 - share));
    const double behind = std::max(raw / peaks.encode, files / peaks.storage) - update_s;
    return copied / peaks.host_link + std::max(0.0, behind);
  }

  const Recipe& recipe_;
  const GpuPlanOptions& options_;
  const GpuPlan& plan_;
  const RankPlan& rank_;  // the first owns the KV heads that shards share, so most parameters
};

// Data-parallel rank 0's GPUs write; they fill nodes from the first on.
void CountNodes(const GpuPlanOptions& options, GpuPlan* plan) {
  const std::vector<RankPlan>& ranks = plan->recipe.ranks;
  const int gpus = options.tp * options.dp;
  plan->nodes = (gpus + options.gpus_per_node - 1) / options.gpus_per_node;
  for (int first = 0; first < options.tp; first += options.gpus_per_node) {
    int64_t parameters = 0, staging = 0;
    for (int r = first; r < std::min(options.tp, first + options.gpus_per_node); ++r) {
      parameters += ranks[r].parameters;
      staging += ranks[r].staging_bytes;
    }
    plan->staging_node_bytes = std::max(plan->staging_node_bytes, staging);
    plan->keyframe_node_bytes = std::max(plan->keyframe_node_bytes, kNumComponents * 4 * parameters);
    plan->journal_node_bytes = std::max(plan->journal_node_bytes, 4 * parameters);
  }
}

// The fewest GPUs that carry the recipe with V shards and G lanes, activations recomputed or not as
// it needs.
std::optional<GpuFit> FewestGpus(Recipe recipe, int64_t room) {
  if (!CheckRecipe(recipe).ok()) return std::nullopt;
  std::optional<GpuFit> best;
  const bool recomputed = recipe.execution.recompute_activations;
  for (const bool recompute : {false, true}) {
    if (recomputed && !recompute) continue;
    recipe.execution.recompute_activations = recompute;
    for (int tp = 1; tp <= recipe.topology.virtual_shards; tp *= 2) {
      for (int64_t dp = 1; dp <= recipe.topology.lanes && dp <= 65536; dp *= 2) {
        const int64_t gpus = tp * dp;
        if (best && gpus >= int64_t{best->tp} * best->dp) break;
        const Result<RecipePlan> plan = PlanRecipe(recipe, tp, static_cast<int>(dp));
        if (!plan.ok() || GpuBytes(*plan) > room) continue;
        best = {.tp = tp,
                .dp = static_cast<int>(dp),
                .virtual_shards = recipe.topology.virtual_shards,
                .lanes = recipe.topology.lanes,
                .recompute = recompute,
                .bytes = GpuBytes(*plan)};
        break;
      }
    }
  }
  return best;
}

// First with the recipe's bits; then with more shards, each with the recipe's lanes and with one.
std::vector<GpuFit> FindFits(const Recipe& recipe, int64_t room) {
  std::vector<GpuFit> fits;
  if (const std::optional<GpuFit> fit = FewestGpus(recipe, room)) return {*fit};
  Recipe other = recipe;
  for (int64_t shards = recipe.topology.virtual_shards; shards <= 256 && fits.empty(); shards *= 2) {
    for (const int64_t lanes : {int64_t{1}, recipe.topology.lanes}) {
      if (!fits.empty() && lanes == fits.back().lanes) continue;
      other.topology.virtual_shards = shards;
      other.topology.lanes = lanes;
      std::optional<GpuFit> fit = FewestGpus(other, room);
      if (!fit) continue;
      fit->same_bits = false;
      fits.push_back(*fit);
    }
  }
  return fits;
}

}  // namespace

Result<GpuPlan> PlanOnGpus(const Recipe& recipe, const GpuPlanOptions& options) {
  GpuPlan plan;
  RT_ASSIGN_OR_RETURN(plan.recipe, PlanRecipe(recipe, options.tp, options.dp));
  CountNodes(options, &plan);
  plan.gpu_bytes = GpuBytes(plan.recipe);
  plan.room_bytes = options.gpu_memory - options.reserve;
  const Roofline roofline(recipe, options, plan);
  plan.levels = {roofline.Cost(false), roofline.Cost(true)};
  plan.walk_s = roofline.WalkSeconds();
  if (!plan.Fits()) plan.fits = FindFits(recipe, plan.room_bytes);
  return plan;
}

}  // namespace retrace
