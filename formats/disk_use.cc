#include "formats/disk_use.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "formats/step_file.h"

namespace retrace {
namespace {

double Sum(const KindBytes& kinds) { return std::accumulate(kinds.begin(), kinds.end(), 0.0); }

// Divides a slab's chunks among its pieces by elements.
void AddSlab(const Layout& layout, const SlabInfo& slab, StepUse* step,
             std::vector<KindBytes>* tensors) {
  const size_t kind = static_cast<size_t>(slab.id.kind);
  const std::vector<int> indices = SlabPieces(layout, slab.id);
  const int64_t numel = SlabNumel(layout, slab.id);
  size_t next = 0;        // of indices
  int64_t piece_end = 0;  // element at which the piece before `next` ends
  int64_t chunk_first = 0;
  for (const ChunkPlace& chunk : slab.chunks) {
    step->kinds[kind] += static_cast<double>(chunk.size);
    const int64_t chunk_last = std::min(numel, chunk_first + static_cast<int64_t>(kChunkElements));
    const double per_element =
        static_cast<double>(chunk.size) / static_cast<double>(chunk_last - chunk_first);
    for (int64_t at = chunk_first; at < chunk_last;) {
      if (at == piece_end) {
        piece_end += layout.pieces(slab.id.shard)[indices[next++]].numel();
      }
      const int tensor = layout.pieces(slab.id.shard)[indices[next - 1]].tensor;
      const int64_t end = std::min(piece_end, chunk_last);
      (*tensors)[tensor][kind] += per_element * static_cast<double>(end - at);
      at = end;
    }
    chunk_first = chunk_last;
  }
}

double SizeOf(const FileOps& ops, const std::string& path) {
  return static_cast<double>(std::max<int64_t>(0, ops.Size(path)));
}

}  // namespace

double StepUse::total() const { return Sum(kinds) + container + master; }

double DiskUse::total() const {
  double total = ledger + frozen + unnamed;
  for (const StepUse& step : steps) total += step.total();
  return total;
}

KindBytes DiskUse::kinds() const {
  KindBytes all{};
  for (const StepUse& step : steps) {
    for (size_t i = 0; i < all.size(); ++i) all[i] += step.kinds[i];
  }
  return all;
}

Result<DiskUse> MeasureDiskUse(const RunReader& run, const Layout& layout, FileOps ops) {
  DiskUse use;
  use.tensors.resize(layout.tensors().size());
  use.ledger = SizeOf(ops, run.dir() + "/" + kLedgerName);
  use.frozen = static_cast<double>(run.recipe_text().size() + run.manifest_text().size());
  std::set<std::string> named;
  const RunHistory& history = run.history();
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    const PositionEntry& entry = *history.Find(k);
    if (!entry.master) continue;
    RT_ASSIGN_OR_RETURN(const StepIndex index, run.ReadIndex(k));
    StepUse step{.position = k, .master = static_cast<double>(entry.master->size)};
    named.insert(entry.master->name);
    for (const RankFileInfo& file : index.files) {
      named.insert(file.name);
      const double before = Sum(step.kinds);
      for (const SlabInfo& slab : file.slabs) {
        if (!FitsLayout(layout, slab.id)) {
          return DamagedError(file.name + ": does not fit the recipe's layout");
        }
        AddSlab(layout, slab, &step, &use.tensors);
      }
      step.container += static_cast<double>(file.size) - (Sum(step.kinds) - before);
    }
    use.steps.push_back(step);
  }
  const std::string steps = run.dir() + "/" + kStepsName;
  if (!ops.Exists(steps)) return use;
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ops.List(steps));
  for (const std::string& name : names) {
    if (!named.contains(name)) use.unnamed += SizeOf(ops, steps + "/" + name);
  }
  return use;
}

}  // namespace retrace
