#include <algorithm>

#include "core/check.h"
#include "core/huge_pages.h"
#include "formats/run_dir.h"
#include "formats/step_file.h"

namespace retrace {
namespace {

// Reads a frozen file of the run and checks it against the digest in the ledger's first line.
Result<std::string> ReadFrozen(const FileOps& ops, const std::string& path, const Digest& digest) {
  if (!ops.Exists(path)) return DamagedError(path + ": missing");
  RT_ASSIGN_OR_RETURN(const Bytes bytes, ops.Read(path));
  const Digest got = DigestOf(bytes.view());
  if (got != digest) {
    return DamagedError(path + ": expected the digest " + digest.Hex() + ", got " + got.Hex() +
                        "; this file is frozen when a run begins");
  }
  return std::string(bytes.view());
}

// Gives `state` the shape that is asked for; its memory is kept where it fits.
void Shape(const Layout& layout, int first_shard, int shard_count, State* state) {
  bool fits = state->first_shard == first_shard && std::ssize(state->shards) == shard_count;
  for (int i = 0; fits && i < shard_count; ++i) {
    for (const auto& slab : state->shards[i].slabs) {
      fits = fits && std::ssize(slab) == layout.slab_numel(first_shard + i);
    }
  }
  if (!fits) *state = MakeState(layout, first_shard, shard_count);
}

int ComponentOf(SlabKind kind) {
  for (int c = 0; c < kNumComponents; ++c) {
    const Component component = static_cast<Component>(c);
    if (kind == WholeKind(component) || kind == PartialKind(component)) return c;
  }
  return -1;
}

// The digest that the index says the state has. Errors: kDamaged where it lacks a shard.
Result<Digest> IndexedDigest(const Layout& layout, const StepIndex& index) {
  std::vector<ShardDigests> shards(layout.shards());
  int slabs = 0;
  for (const RankFileInfo& file : index.files) {
    for (const SlabInfo& slab : file.slabs) {
      const int c = ComponentOf(slab.id.kind);
      if (c < 0 || IsPartial(slab.id.kind)) continue;
      if (!FitsLayout(layout, slab.id) ||
          slab.digests.size() != layout.pieces(slab.id.shard).size()) {
        return DamagedError(file.name + ": does not fit the recipe's layout");
      }
      shards[slab.id.shard].resize(slab.digests.size());
      for (size_t i = 0; i < slab.digests.size(); ++i) {
        shards[slab.id.shard][i][c] = slab.digests[i];
      }
      ++slabs;
    }
  }
  if (slabs != layout.shards() * kNumComponents) {
    return DamagedError("position " + std::to_string(index.position) + ": a keyframe of " +
                        std::to_string(slabs) + " slabs, expected " +
                        std::to_string(layout.shards() * kNumComponents));
  }
  return StateDigest(index.counters, index.memory, shards);
}

}  // namespace

Result<RunReader> RunReader::Open(const std::string& dir, int threads, FileOps ops) {
  RT_CHECK(threads >= 1);
  const std::string path = dir + "/" + kLedgerName;
  if (!ops.Exists(path)) {
    return UsageError(dir + ": expected a run directory, but it has no " + kLedgerName);
  }
  RunReader reader(dir, threads, ops);
  RT_ASSIGN_OR_RETURN(const LedgerContents ledger, ReadLedger(ops, path));
  RT_ASSIGN_OR_RETURN(reader.history_, RunHistory::From(ledger, path));
  const OpenLine& header = reader.history_.header;
  RT_ASSIGN_OR_RETURN(reader.recipe_text_,
                      ReadFrozen(ops, dir + "/" + kRecipeName, header.recipe));
  RT_ASSIGN_OR_RETURN(reader.manifest_text_,
                      ReadFrozen(ops, dir + "/" + kManifestName, header.manifest));
  return reader;
}

Status RunReader::CheckLayout(const Layout& layout) const {
  if (layout.shards() == history_.header.virtual_shards) return {};
  return UsageError(dir_ + ": expected a layout of " +
                    std::to_string(history_.header.virtual_shards) + " virtual shards, got " +
                    std::to_string(layout.shards()));
}

Result<StepIndex> RunReader::ReadIndex(int64_t position) const {
  const PositionEntry* entry = history_.Find(position);
  return ReadIndexWith(position, entry != nullptr && entry->master, "files");
}

Result<StepIndex> RunReader::ReadIndexWith(int64_t position, bool has, const char* what) const {
  if (!has) {
    return UsageError(dir_ + "@" + std::to_string(position) + ": the run keeps no " + what +
                      " there; it goes from " + std::to_string(history_.first_position()) +
                      " to " + std::to_string(history_.last_position()));
  }
  const MasterRef& master = *history_.Find(position)->master;
  RT_ASSIGN_OR_RETURN(StepIndex index, ReadMaster(ops_, dir_ + "/" + kStepsName, master.name,
                                                  master.size, master.digest));
  if (index.position != position || index.counters != history_.Find(position)->counters) {
    return DamagedError(dir_ + "/" + kStepsName + "/" + master.name +
                        ": its position or counters are not those of the ledger's line");
  }
  return index;
}

Status RunReader::ReadSlabs(const Layout& layout, const StepIndex& index,
                            const std::function<float*(const SlabId&)>& target,
                            Bytes* scratch) const {
  for (const RankFileInfo& file : index.files) {
    std::vector<SlabTarget> targets;
    for (const SlabInfo& slab : file.slabs) {
      if (!FitsLayout(layout, slab.id)) {
        return DamagedError(file.name + ": does not fit the recipe's layout");
      }
      if (float* values = target(slab.id)) targets.push_back({slab.id, values});
    }
    if (targets.empty()) continue;
    RT_RETURN_IF_ERROR(
        ReadRankFile(ops_, dir_ + "/" + kStepsName, file, layout, targets, threads_, nullptr,
                     scratch));
  }
  return {};
}

Result<StepContents> RunReader::ReadStep(const Layout& layout, int64_t position) const {
  RT_RETURN_IF_ERROR(CheckLayout(layout));
  StepContents step;
  RT_ASSIGN_OR_RETURN(step.index, ReadIndex(position));
  RT_RETURN_IF_ERROR(ReadSlabs(layout, step.index, [&](const SlabId& id) -> float* {
    step.slabs.push_back(id);
    return step.values.emplace_back(SlabNumel(layout, id)).data();
  }));
  const PositionEntry& entry = *history_.Find(position);
  if (!entry.HasKeyframe()) return step;
  RT_ASSIGN_OR_RETURN(const Digest digest, IndexedDigest(layout, step.index));
  if (digest == entry.digest) return step;
  return DamagedError(dir_ + "@" + std::to_string(position) + ": the ledger has the digest " +
                      entry.digest.Hex() + ", its keyframe has " + digest.Hex());
}

std::vector<SlabContents> StepContents::views() const {
  std::vector<SlabContents> views;
  for (size_t i = 0; i < slabs.size(); ++i) views.push_back({slabs[i], values[i].data()});
  return views;
}

void RunReader::Forget(int64_t position) {
  if (PositionEntry* entry = history_.Find(position)) entry->master.reset();
}

Status RunReader::ReadKeyframe(const Layout& layout, int64_t position, int first_shard,
                               int shard_count, State* state) const {
  RT_RETURN_IF_ERROR(CheckLayout(layout));
  RT_CHECK(first_shard >= 0 && shard_count > 0 && first_shard + shard_count <= layout.shards());
  const PositionEntry* entry = history_.Find(position);
  RT_ASSIGN_OR_RETURN(
      StepIndex index,
      ReadIndexWith(position, entry != nullptr && entry->HasKeyframe(), "keyframe"));
  RT_ASSIGN_OR_RETURN(const Digest digest, IndexedDigest(layout, index));
  if (digest != entry->digest) {
    return DamagedError(dir_ + "@" + std::to_string(position) + ": the ledger has the digest " +
                        entry->digest.Hex() + ", its keyframe has " + digest.Hex());
  }
  Shape(layout, first_shard, shard_count, state);
  state->counters = index.counters;
  state->memory = index.memory;
  return ReadSlabs(layout, index, [&](const SlabId& id) -> float* {
    const int i = id.shard - first_shard, c = ComponentOf(id.kind);
    if (i < 0 || i >= shard_count || c < 0 || IsPartial(id.kind)) return nullptr;
    return state->shards[i].slabs[c].data();
  });
}

Status RunReader::ReadJournal(const Layout& layout, int64_t position, int first_shard,
                              int shard_count, Journal* journal) const {
  RT_RETURN_IF_ERROR(CheckLayout(layout));
  RT_CHECK(first_shard >= 0 && shard_count > 0 && first_shard + shard_count <= layout.shards());
  const PositionEntry* entry = history_.Find(position);
  RT_ASSIGN_OR_RETURN(
      StepIndex index,
      ReadIndexWith(position, entry != nullptr && entry->HasJournal(), "journal"));
  if (!index.optimizer || index.optimizer->rows.size() != layout.tensors().size()) {
    return DamagedError(dir_ + "@" + std::to_string(position) +
                        ": expected an optimizer row for each of " +
                        std::to_string(layout.tensors().size()) + " tensors");
  }
  journal->optimizer = *std::move(index.optimizer);
  journal->counters = index.counters;
  journal->memory = index.memory;
  journal->gradients.resize(shard_count);
  int found = 0;
  RT_RETURN_IF_ERROR(ReadSlabs(layout, index, [&](const SlabId& id) -> float* {
    const int i = id.shard - first_shard;
    if (i < 0 || i >= shard_count || id.kind != SlabKind::kG) return nullptr;
    ++found;
    ResizeInHugePages(&journal->gradients[i], layout.slab_numel(id.shard));
    return journal->gradients[i].data();
  }, &journal->scratch));
  if (found == shard_count) return {};
  return DamagedError(dir_ + "@" + std::to_string(position) + ": expected gradients of " +
                      std::to_string(shard_count) + " shards, got " + std::to_string(found));
}

Result<std::vector<SlabId>> RunReader::ReadPartial(const Layout& layout, int64_t position,
                                                   State* state) const {
  RT_RETURN_IF_ERROR(CheckLayout(layout));
  const PositionEntry* entry = history_.Find(position);
  RT_ASSIGN_OR_RETURN(
      const StepIndex index,
      ReadIndexWith(position, entry != nullptr && entry->HasPartial(), "partial keyframe"));
  std::vector<SlabId> ids;
  std::vector<std::vector<float>> values;
  RT_RETURN_IF_ERROR(ReadSlabs(layout, index, [&](const SlabId& id) -> float* {
    const int i = id.shard - state->first_shard;
    if (!IsPartial(id.kind) || i < 0 || i >= std::ssize(state->shards)) return nullptr;
    ids.push_back(id);
    return values.emplace_back(SlabNumel(layout, id)).data();
  }));
  // Only now, so that an error leaves the state as it was.
  for (size_t s = 0; s < ids.size(); ++s) {
    ShardState& shard = state->shards[ids[s].shard - state->first_shard];
    std::vector<float>& slab = shard.slabs[ComponentOf(ids[s].kind)];
    const float* from = values[s].data();
    for (int index_of_piece : ids[s].pieces) {
      const Piece& piece = layout.pieces(ids[s].shard)[index_of_piece];
      std::copy_n(from, piece.numel(), slab.begin() + piece.offset);
      from += piece.numel();
    }
  }
  return ids;
}

}  // namespace retrace
