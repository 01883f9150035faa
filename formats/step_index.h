// What the files of a step say about themselves, as values and as JSON text. Used by step_file.h,
// ledger.h and run_dir.h; ranks send RankFileInfo to rank 0 in this text. FORMAT.md, "Index".
//
// Numbers that are bits (floats, doubles) stand in JSON as their bits, so nothing is rounded.
// Readers check every type and length: errors are kDamaged and name the member.
#ifndef RETRACE_FORMATS_STEP_INDEX_H_
#define RETRACE_FORMATS_STEP_INDEX_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/digest.h"
#include "core/layout.h"
#include "core/optimizer_block.h"
#include "core/state.h"
#include "core/status.h"

namespace retrace {

// What a slab dataset holds. A partial one holds only the pieces that surgery touched, as they are
// after the edit and before the update.
enum class SlabKind { kG, kP, kM, kV, kPartialP, kPartialM, kPartialV };
inline constexpr std::array<SlabKind, 7> kSlabKinds = {
    SlabKind::kG,        SlabKind::kP,        SlabKind::kM,       SlabKind::kV,
    SlabKind::kPartialP, SlabKind::kPartialM, SlabKind::kPartialV};

const char* SlabKindName(SlabKind kind);  // "g", "p", "m", "v", "partial_p", ...
inline bool IsPartial(SlabKind kind) { return kind >= SlabKind::kPartialP; }
inline SlabKind WholeKind(Component c) { return kSlabKinds[1 + static_cast<int>(c)]; }
inline SlabKind PartialKind(Component c) { return kSlabKinds[4 + static_cast<int>(c)]; }

struct SlabId {
  int shard = 0;
  SlabKind kind = SlabKind::kG;
  std::vector<int> pieces;  // partial: ascending indices into Layout::pieces(shard); else empty

  bool operator==(const SlabId&) const = default;
  std::string DatasetPath() const;  // "/shard_0003/g"
};

// Whether the shard and every piece exist, pieces in ascending order.
bool FitsLayout(const Layout& layout, const SlabId& id);

// The pieces of Layout::pieces(shard) that the slab holds, in its order.
std::vector<int> SlabPieces(const Layout& layout, const SlabId& id);
int64_t SlabNumel(const Layout& layout, const SlabId& id);

struct ChunkPlace {
  uint64_t offset = 0, size = 0;  // bytes in the file
  bool operator==(const ChunkPlace&) const = default;
};

struct SlabInfo {
  SlabId id;
  std::vector<Digest> digests;  // TensorDigest of each piece
  std::vector<ChunkPlace> chunks;

  bool operator==(const SlabInfo&) const = default;
};

struct RankFileInfo {
  int64_t position = 0, attempt = 0;
  int rank = 0;
  std::string name;  // within steps/
  uint64_t size = 0;
  Digest digest;  // of all bytes
  std::vector<SlabInfo> slabs;

  bool operator==(const RankFileInfo&) const = default;
};

std::string RankFileInfoText(const RankFileInfo& info);
Result<RankFileInfo> ParseRankFileInfo(std::string_view text);

// The master's index: all that is kept of a step besides the slabs.
struct StepIndex {
  int64_t position = 0, attempt = 0;
  Counters counters;
  RuleMemory memory;
  std::optional<OptimizerBlock> optimizer;  // with journals
  std::vector<RankFileInfo> files;
};

std::string StepIndexText(const StepIndex& index);
Result<StepIndex> ParseStepIndex(std::string_view text);

// {"position":..,"schedule_index":..,"data_cursor":..,"adam_t":T or [T, ...],"tensors":N}
std::string CountersText(const Counters& counters);
Result<Counters> ParseCounters(std::string_view text);

// The index of a rank file: its slabs and the table of their pieces, for readers of the file alone.
std::string RankFileIndexText(const Layout& layout, int64_t position, int64_t attempt, int rank,
                              const std::vector<SlabId>& slabs);

}  // namespace retrace

#endif  // RETRACE_FORMATS_STEP_INDEX_H_
