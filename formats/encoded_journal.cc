#include "formats/encoded_journal.h"

#include <utility>

#include "core/check.h"

namespace retrace {
namespace {

// The chunks of a slab. Errors: kDamaged where they are not those of the layout.
Status AddChunks(const std::string& path, const Layout& layout, const SlabInfo& slab,
                 std::vector<EncodedSlabs::Chunk>* chunks) {
  const int64_t numel = FitsLayout(layout, slab.id) ? SlabNumel(layout, slab.id) : 0;
  const int64_t elements = std::min(numel, static_cast<int64_t>(kChunkElements));
  const int64_t count = elements == 0 ? 0 : (numel + elements - 1) / elements;
  if (count == 0 || count != std::ssize(slab.chunks)) {
    return DamagedError(path + ": " + slab.id.DatasetPath() +
                        ": its chunks are not those of the recipe's layout");
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = i * elements;
    chunks->push_back({slab.id.shard, first, std::min(elements, numel - first), elements,
                       slab.chunks[static_cast<size_t>(i)]});
  }
  return {};
}

}  // namespace

Result<EncodedJournal> OpenJournal(const RunReader& run, const Layout& layout, int64_t position,
                                   int first_shard, int shard_count) {
  RT_CHECK(first_shard >= 0 && shard_count > 0 && first_shard + shard_count <= layout.shards());
  RT_ASSIGN_OR_RETURN(StepIndex index, run.ReadIndex(position));
  const std::string where = run.dir() + "@" + std::to_string(position);
  if (!index.optimizer || index.optimizer->rows.size() != layout.tensors().size()) {
    return DamagedError(where + ": expected an optimizer row for each of " +
                        std::to_string(layout.tensors().size()) + " tensors");
  }
  EncodedJournal journal;
  journal.optimizer = *std::move(index.optimizer);
  journal.counters = std::move(index.counters);
  journal.memory = std::move(index.memory);
  journal.first_shard = first_shard;
  journal.shard_count = shard_count;
  std::vector<char> found(shard_count, 0);
  for (RankFileInfo& file : index.files) {
    bool asked = false;
    for (const SlabInfo& slab : file.slabs) {
      if (!journal.Asks(slab.id)) continue;
      asked = true;
      ++found[slab.id.shard - first_shard];
    }
    if (asked) journal.files.push_back(std::move(file));
  }
  if (std::count(found.begin(), found.end(), 1) == shard_count) return journal;
  return DamagedError(where + ": expected one gradient of each of " + std::to_string(shard_count) +
                      " shards");
}

Status EncodedSlabs::Read(const RunReader& run, const Layout& layout,
                          const EncodedJournal& journal, size_t file) {
  const RankFileInfo& info = journal.files[file];
  const std::string path = run.dir() + "/" + kStepsName + "/" + info.name;
  chunks_.clear();
  for (const SlabInfo& slab : info.slabs) {
    if (journal.Asks(slab.id)) RT_RETURN_IF_ERROR(AddChunks(path, layout, slab, &chunks_));
  }
  RT_RETURN_IF_ERROR(FileOps().ReadInto(path, 1, &bytes_));
  if (bytes_.size == info.size && DigestOf(bytes_.view()) == info.digest) return {};
  return DamagedError(path + ": its size or digest is not that of the master");
}

std::string_view EncodedSlabs::BytesOf(const Chunk& chunk) const {
  const auto& [offset, size] = chunk.place;
  const bool inside = offset <= bytes_.size && size <= bytes_.size - offset;
  return inside ? bytes_.view().substr(offset, size) : std::string_view();
}

}  // namespace retrace
