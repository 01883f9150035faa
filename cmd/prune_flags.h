// The policy that `retrace prune` and `pack` go by, and how what goes is shown.
#ifndef RETRACE_CMD_PRUNE_FLAGS_H_
#define RETRACE_CMD_PRUNE_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "formats/disk_use.h"
#include "replay/prune.h"

namespace CLI {
class App;
}

namespace retrace {

struct PruneFlags {
  std::string window;
  int64_t every = 0, keep_last = 0;
  bool given = false;  // any of the three: they take the place of the recipe's policy
  bool release_held = false;
};

void AddPruneFlags(CLI::App* command, PruneFlags* flags);

// Errors: kUsage for a bad window.
// Without flags a run's policy is its recipe's; a branch was told what to keep when it was made, so
// all of it.
Result<PrunePolicy> PrunePolicyOf(const PruneFlags& flags, const OpenedRun& run);

// What goes, with the bytes that it takes.
struct Pruned {
  std::vector<PositionRange> ranges;
  std::vector<int64_t> positions;  // that have files
  double bytes = 0;
};
Pruned PrunedOf(const std::vector<PositionRange>& ranges, const DiskUse& use);

}  // namespace retrace

#endif  // RETRACE_CMD_PRUNE_FLAGS_H_
