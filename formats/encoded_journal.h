// EncodedJournal: an update's gradient as it lies in its files, proven by their digests, and decoded
// a chunk at a time by whoever has time. Used by replay/journal_walk.h; who wants a whole gradient
// calls RunReader::ReadJournal.
//
// The digests of single tensors are not looked at: all bytes are those that the master vouches for,
// decoding is a function of them, and who applies such a gradient proves the state that it leads to.
// Where anything is wrong, ReadJournal says what is hit: errors of this header name the file alone.
// Thread-safe but for Read into the same slabs.
#ifndef RETRACE_FORMATS_ENCODED_JOURNAL_H_
#define RETRACE_FORMATS_ENCODED_JOURNAL_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "formats/chunk_codec.h"
#include "formats/chunk_planes.h"
#include "formats/run_dir.h"

namespace retrace {

// What the walk from RUN@(k-1) to RUN@k needs besides a partial keyframe, gradients still in files.
struct EncodedJournal {
  OptimizerBlock optimizer;
  Counters counters;  // of RUN@k
  RuleMemory memory;  // of RUN@k
  int first_shard = 0, shard_count = 0;  // asked for
  std::vector<RankFileInfo> files;       // that hold gradients of these shards

  bool Asks(const SlabId& id) const {
    return id.kind == SlabKind::kG && id.shard >= first_shard && id.shard < first_shard + shard_count;
  }
};

// Reads and proves the master. Errors: as RunReader::ReadJournal.
Result<EncodedJournal> OpenJournal(const RunReader& run, const Layout& layout, int64_t position,
                                   int first_shard, int shard_count);

// Memory to decode a chunk in; one a thread.
class PlanesDecoder {
 public:
  // The planes of `elements` numbers, until the next call; nullptr: not a chunk of that size.
  const unsigned char* Decode(std::string_view encoded, int64_t elements) {
    planes_.resize(static_cast<size_t>(elements) * sizeof(float));
    const bool good =
        decoder_.Decompress(encoded, reinterpret_cast<char*>(planes_.data()), planes_.size());
    return good ? planes_.data() : nullptr;
  }

 private:
  ChunkDecoder decoder_;
  std::vector<unsigned char> planes_;
};

// The gradients of one rank file.
class EncodedSlabs {
 public:
  struct Chunk {
    int shard = 0;
    int64_t first = 0, count = 0;  // elements of the slab
    int64_t elements = 0;          // encoded: `count`, and what fills the chunk up
    ChunkPlace place;
  };

  // File `file` of the journal: size and digest are proven. In place of what was read before, whose
  // memory is used again.
  Status Read(const RunReader& run, const Layout& layout, const EncodedJournal& journal,
              size_t file);

  const std::vector<Chunk>& chunks() const { return chunks_; }

  // visit(first, values, count) for the slab's elements first .. first + count: the chunk in parts
  // that the innermost caches hold. -> false: the bytes are no such chunk; nothing was visited.
  template <class Visit>
  bool Decode(const Chunk& chunk, PlanesDecoder* decoder, const Visit& visit) const {
    const unsigned char* planes = decoder->Decode(BytesOf(chunk), chunk.elements);
    if (planes == nullptr) return false;
    alignas(64) float values[kPartElements];
    for (int64_t at = 0; at < chunk.count; at += kPartElements) {
      const int64_t count = std::min(kPartElements, chunk.count - at);
      UnshufflePart(planes + at, chunk.elements, count, values);
      visit(chunk.first + at, values, count);
    }
    return true;
  }

 private:
  static constexpr int64_t kPartElements = 4096;

  std::string_view BytesOf(const Chunk& chunk) const;  // empty where it lies outside the file

  Bytes bytes_;
  std::vector<Chunk> chunks_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_ENCODED_JOURNAL_H_
