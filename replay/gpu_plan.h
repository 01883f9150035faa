// GpuPlan: what a recipe asks of a cluster of GPUs, on paper: memory of each, bytes to storage, the
// time that training waits for it, and what an update costs, live or replayed, at best. Used by
// `retrace plan --gpus`. Pure; no GPU is looked at, and none has been measured: times are a roofline,
// which no program beats and none reaches.
//
// Memory is that of recipe_plan.h, with staging in the hosts' memory instead of the GPUs'. A rank is
// a GPU; neighbouring ranks share a node, so tensor-parallel groups do.
#ifndef RETRACE_REPLAY_GPU_PLAN_H_
#define RETRACE_REPLAY_GPU_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/recipe.h"
#include "core/status.h"
#include "replay/recipe_plan.h"

namespace retrace {

// Peak figures of one GPU and its node: operations (a multiply-add is two) or bytes a second, in one
// direction. The defaults are an H100 SXM's by NVIDIA's data sheet (dense, at boost clock), in a
// DGX H100: NVLink 4 has 900 GB/s in both directions together, PCIe 5 x16 has 128, each GPU has a
// 400 Gb/s network card. Storage and encoding are no product's: what one node writes to a shared file
// system, and what its processors compress; both are to be measured (`fio`, `retrace bench store`).
struct GpuPeaks {
  double fp32 = 66.9e12;         // SIMT
  double fp64 = 33.5e12;         // SIMT
  double bf16_tensor = 989.4e12;
  double fp64_tensor = 66.9e12;
  double memory = 3.35e12;       // HBM3
  double link = 450e9;           // NVLink, each GPU
  double network = 50e9;         // between nodes, each GPU
  double host_link = 64e9;       // PCIe, each GPU
  double storage = 4e9;          // each node
  double encode = 4e9;           // each node
};

struct GpuPlanOptions {
  int tp = 1, dp = 1;
  int gpus_per_node = 8;
  int64_t gpu_memory = 80'000'000'000;
  // Of it not the recipe's: the driver's context, NCCL's buffers, workspaces. Assumed.
  int64_t reserve = 2'000'000'000;
  GpuPeaks peaks = {};
};

// One update at one level.
struct LevelCost {
  std::string level;         // "portable", "native"
  double arithmetic_s = 0;   // matrix products at the peak of the unit that computes them
  double memory_s = 0;       // bytes that have to pass the GPU's memory
  double exchange_s = 0;     // bytes between ranks, not overlapped with anything
  // Waiting for storage, per update, where every update keeps a journal and each
  // store.keyframe_every-th a keyframe.
  double stall_s = 0;

  double update_s() const { return (arithmetic_s > memory_s ? arithmetic_s : memory_s) + exchange_s; }
};

// A way to carry a recipe that fits.
struct GpuFit {
  int tp = 1, dp = 1;
  int64_t virtual_shards = 1, lanes = 1;
  bool recompute = false;
  int64_t bytes = 0;  // of the fullest GPU
  bool same_bits = true;  // else the recipe has other virtual shards or lanes: a run of its own
};

struct GpuPlan {
  RecipePlan recipe;
  int nodes = 1;
  int64_t gpu_bytes = 0;   // of the fullest GPU, without the reserve
  int64_t room_bytes = 0;  // gpu_memory - reserve
  int64_t staging_node_bytes = 0;  // host memory of the node that writes most
  int64_t keyframe_node_bytes = 0, journal_node_bytes = 0;  // uncompressed; of the same node
  std::vector<LevelCost> levels;
  double walk_s = 0;  // one journal applied on the way to a state: read, decoded, AdamW
  std::vector<GpuFit> fits;  // where it does not fit: what would, fewest GPUs first; may be empty

  bool Fits() const { return gpu_bytes <= room_bytes; }
};

// Errors: kUsage as PlanRecipe.
Result<GpuPlan> PlanOnGpus(const Recipe& recipe, const GpuPlanOptions& options);

}  // namespace retrace

#endif  // RETRACE_REPLAY_GPU_PLAN_H_
