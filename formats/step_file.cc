#include "formats/step_file.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <set>
#include <utility>

#include "core/digest.h"
#include "formats/hdf5_image.h"
#include "formats/parallel_work.h"

namespace retrace {
namespace {

constexpr char kIndexPath[] = "/index";

std::string NameStem(int64_t position, int64_t attempt) {
  char text[64];
  std::snprintf(text, sizeof text, "%09lld.a%04lld", static_cast<long long>(position),
                static_cast<long long>(attempt));
  return text;
}

// Takes `prefix` and a decimal number from the front of *text, or nothing.
bool TakeNumber(std::string_view prefix, std::string_view* text, int64_t* number) {
  if (!text->starts_with(prefix)) return false;
  const char* first = text->data() + prefix.size();
  const auto [end, error] = std::from_chars(first, text->data() + text->size(), *number);
  if (error != std::errc() || *number < 0) return false;
  text->remove_prefix(end - text->data());
  return true;
}

// A piece or a chunk of a slab.
struct SlabJob {
  size_t slab = 0;
  size_t index = 0;   // of the piece within the slab, or of the chunk
  int64_t first = 0;  // element
  int64_t count = 0;
};

int64_t ChunkElements(int64_t numel) {
  return std::min<int64_t>(numel, static_cast<int64_t>(kChunkElements));
}

size_t ChunkCount(int64_t numel) {
  const int64_t chunk = ChunkElements(numel);
  return static_cast<size_t>((numel + chunk - 1) / chunk);
}

void AddDigestJobs(const Layout& layout, size_t slab, const SlabId& id,
                   std::vector<SlabJob>* jobs) {
  int64_t first = 0;
  size_t index = 0;
  for (int piece : SlabPieces(layout, id)) {
    const int64_t count = layout.pieces(id.shard)[piece].numel();
    jobs->push_back({slab, index++, first, count});
    first += count;
  }
}

void AddChunkJobs(const Layout& layout, size_t slab, const SlabId& id,
                  std::vector<SlabJob>* jobs) {
  const int64_t numel = SlabNumel(layout, id);
  for (size_t i = 0; i < ChunkCount(numel); ++i) {
    const int64_t first = static_cast<int64_t>(i) * ChunkElements(numel);
    jobs->push_back({slab, i, first, std::min(ChunkElements(numel), numel - first)});
  }
}

Status AddIndex(std::string_view text, Hdf5Builder* builder) {
  ChunkEncoder encoder;
  std::vector<char> memory;
  return builder->AddText(kIndexPath, text.size(), encoder.Compress(text, &memory));
}

// Creates the datasets' groups and the index; datasets follow when their first chunk is there.
Status AddRankHeader(const Layout& layout, const RankFileInfo& info, Hdf5Builder* builder) {
  std::vector<SlabId> ids;
  std::set<int> shards;
  for (const SlabInfo& slab : info.slabs) ids.push_back(slab.id);
  for (const SlabId& id : ids) {
    if (!shards.insert(id.shard).second) continue;
    const std::string path = id.DatasetPath();
    RT_RETURN_IF_ERROR(builder->AddGroup(path.substr(0, path.rfind('/'))));
  }
  return AddIndex(RankFileIndexText(layout, info.position, info.attempt, info.rank, ids), builder);
}

// A chunk to encode or decode, and the pieces that begin in it, to digest while it is in the cache.
struct ChunkJob {
  size_t slab = 0, chunk = 0;
  int64_t first = 0, count = 0;  // elements
  std::vector<std::pair<int64_t, int64_t>> pieces;  // first element, elements
};

std::vector<ChunkJob> ChunkJobs(const Layout& layout, const std::vector<SlabContents>& slabs) {
  std::vector<ChunkJob> jobs;
  for (size_t s = 0; s < slabs.size(); ++s) {
    std::vector<SlabJob> chunks, pieces;
    AddChunkJobs(layout, s, slabs[s].id, &chunks);
    AddDigestJobs(layout, s, slabs[s].id, &pieces);
    size_t next = 0;
    for (const SlabJob& chunk : chunks) {
      ChunkJob job{s, chunk.index, chunk.first, chunk.count, {}};
      while (next < pieces.size() && pieces[next].first < chunk.first + chunk.count) {
        job.pieces.emplace_back(pieces[next].first, pieces[next].count);
        ++next;
      }
      jobs.push_back(std::move(job));
    }
  }
  return jobs;
}

struct EncodedChunk {
  std::vector<char> memory;
  std::string_view bytes;
  std::vector<Digest> digests;
};

Status FillRankFile(const Layout& layout, const std::vector<SlabContents>& slabs, int threads,
                    int level, Hdf5Builder* builder, RankFileInfo* info) {
  const std::vector<ChunkJob> jobs = ChunkJobs(layout, slabs);
  std::vector<ChunkEncoder> encoders(threads);
  const auto make = [&](int worker, size_t i, EncodedChunk* chunk) {
    const ChunkJob& job = jobs[i];
    const float* values = slabs[job.slab].values;
    chunk->digests.clear();
    for (const auto& [first, count] : job.pieces) {
      chunk->digests.push_back(TensorDigest(values + first, count * sizeof(float)));
    }
    const int64_t chunk_elements = ChunkElements(SlabNumel(layout, slabs[job.slab].id));
    chunk->bytes = encoders[worker].Encode(values + job.first, job.count, chunk_elements,
                                           &chunk->memory, level);
  };
  const auto use = [&](size_t i, const EncodedChunk& chunk) -> Status {
    const ChunkJob& job = jobs[i];
    SlabInfo& slab = info->slabs[job.slab];
    slab.digests.insert(slab.digests.end(), chunk.digests.begin(), chunk.digests.end());
    if (job.chunk == 0) {
      const int64_t numel = SlabNumel(layout, slab.id);
      RT_RETURN_IF_ERROR(
          builder->AddFloats(slab.id.DatasetPath(), numel, ChunkElements(numel)));
    }
    RT_ASSIGN_OR_RETURN(const uint64_t place, builder->WriteChunk(job.first, chunk.bytes));
    slab.chunks.push_back({place, chunk.bytes.size()});
    return {};
  };
  return OrderedWork<EncodedChunk>(jobs.size(), threads, make, use);
}

}  // namespace

std::string RankFileName(int64_t position, int64_t attempt, int rank) {
  char text[32];
  std::snprintf(text, sizeof text, ".r%04d.h5", rank);
  return NameStem(position, attempt) + text;
}

std::string MasterFileName(int64_t position, int64_t attempt) {
  return NameStem(position, attempt) + ".h5";
}

bool ParseStepFileName(std::string_view name, StepFileName* parsed) {
  *parsed = {};
  if (name.ends_with(kTemporarySuffix)) {
    parsed->temporary = true;
    name.remove_suffix(kTemporarySuffix.size());
  }
  int64_t rank = -1;
  if (!TakeNumber("", &name, &parsed->position)) return false;
  if (!TakeNumber(".a", &name, &parsed->attempt)) return false;
  if (TakeNumber(".r", &name, &rank)) parsed->rank = static_cast<int>(rank);
  return name == ".h5";
}

Result<RankFile> BuildRankFile(const Layout& layout, int64_t position, int64_t attempt, int rank,
                               const std::vector<SlabContents>& slabs, int threads, int level,
                               Bytes spare) {
  constexpr size_t kIncrement = size_t{1} << 20;  // what is cleared is still in the cache when filled
  RankFile file;
  file.info.position = position;
  file.info.attempt = attempt;
  file.info.rank = rank;
  file.info.name = RankFileName(position, attempt, rank);
  for (const SlabContents& slab : slabs) file.info.slabs.push_back({slab.id, {}, {}});
  RT_ASSIGN_OR_RETURN(Hdf5Builder builder, Hdf5Builder::Make(kIncrement, std::move(spare)));
  RT_RETURN_IF_ERROR(AddRankHeader(layout, file.info, &builder));
  RT_RETURN_IF_ERROR(FillRankFile(layout, slabs, threads, level, &builder, &file.info));
  RT_ASSIGN_OR_RETURN(file.bytes, builder.Finish());
  file.info.size = file.bytes.size;
  file.info.digest = DigestOf(file.bytes.view());
  return file;
}

namespace {

Status ReadSized(const FileOps& ops, const std::string& path, uint64_t size, int threads,
                 Bytes* bytes) {
  if (!ops.Exists(path)) {
    return DamagedError(path + ": missing; expected a file of " + std::to_string(size) +
                        " bytes. Restore it, or rebuild the step from its neighbours");
  }
  RT_RETURN_IF_ERROR(ops.ReadInto(path, threads, bytes));
  if (bytes->size != size) {
    return DamagedError(path + ": expected " + std::to_string(size) + " bytes, got " +
                        std::to_string(bytes->size));
  }
  return {};
}

Status DigestError(const std::string& path, const Digest& expected, const Digest& got) {
  return DamagedError(path + ": expected the digest " + expected.Hex() + ", got " + got.Hex());
}

// Decodes the targets' chunks and digests their pieces, and the file beside them. A piece that lies in
// one chunk is digested while it is in the cache.
class SlabDecoder {
 public:
  SlabDecoder(const Layout& layout, std::string_view bytes, std::vector<const SlabInfo*> infos,
              const std::vector<SlabTarget>& targets, int threads)
      : layout_(layout), bytes_(bytes), infos_(std::move(infos)), targets_(targets),
        threads_(threads) {}

  // -> a text for each damaged piece, and the digest of all bytes.
  std::pair<std::vector<std::string>, Digest> Run() {
    std::vector<SlabContents> slabs;
    for (const SlabTarget& target : targets_) slabs.push_back({target.id, target.values});
    const std::vector<ChunkJob> chunks = ChunkJobs(layout_, slabs);
    std::vector<size_t> first_piece;  // of each chunk's pieces among all
    std::vector<SlabJob> pieces;
    for (size_t t = 0; t < targets_.size(); ++t) {
      AddDigestJobs(layout_, t, targets_[t].id, &pieces);
    }
    for (size_t next = 0; const ChunkJob& chunk : chunks) {
      first_piece.push_back(next);
      next += chunk.pieces.size();
    }
    std::vector<ChunkDecoder> decoders(threads_);
    std::vector<std::string> damage(pieces.size());
    std::vector<size_t> later;  // pieces of several chunks
    for (size_t c = 0; c < chunks.size(); ++c) {
      for (size_t p = 0; p < chunks[c].pieces.size(); ++p) {
        if (!IsWithin(chunks[c], p)) later.push_back(first_piece[c] + p);
      }
    }
    Digest digest;
    ParallelFor(chunks.size() + 1, threads_, [&](int worker, size_t i) {
      if (i == 0) {
        digest = DigestOf(bytes_);
        return;
      }
      const ChunkJob& chunk = chunks[i - 1];
      Decode(chunk, &decoders[worker]);
      for (size_t p = 0; p < chunk.pieces.size(); ++p) {
        const size_t piece = first_piece[i - 1] + p;
        if (IsWithin(chunk, p)) damage[piece] = Verify(pieces[piece]);
      }
    });
    ParallelFor(later.size(), threads_,
                [&](int, size_t i) { damage[later[i]] = Verify(pieces[later[i]]); });
    std::erase(damage, "");
    return {std::move(damage), digest};
  }

 private:
  static bool IsWithin(const ChunkJob& chunk, size_t piece) {
    const auto& [first, count] = chunk.pieces[piece];
    return first + count <= chunk.first + chunk.count;
  }

  // A chunk that can not be decoded becomes zeros, which no digest will accept silently: the digest
  // of zeros is that of the piece only where it was zeros.
  void Decode(const ChunkJob& job, ChunkDecoder* decoder) {
    const ChunkPlace& place = infos_[job.slab]->chunks[job.chunk];
    float* out = targets_[job.slab].values + job.first;
    const int64_t chunk_elements = ChunkElements(SlabNumel(layout_, targets_[job.slab].id));
    const bool inside = place.offset <= bytes_.size() && place.size <= bytes_.size() - place.offset;
    if (!inside || !decoder->Decode(bytes_.substr(place.offset, place.size), chunk_elements, out,
                                    job.count)) {
      std::memset(out, 0, job.count * sizeof(float));
    }
  }

  std::string Verify(const SlabJob& job) {
    const SlabId& id = targets_[job.slab].id;
    const Digest got =
        TensorDigest(targets_[job.slab].values + job.first, job.count * sizeof(float));
    if (got == infos_[job.slab]->digests[job.index]) return "";
    const int piece = SlabPieces(layout_, id)[job.index];
    return layout_.tensors()[layout_.pieces(id.shard)[piece].tensor].name + "#" +
           SlabKindName(id.kind) + " (shard " + std::to_string(id.shard) + ")";
  }

  const Layout& layout_;
  std::string_view bytes_;
  std::vector<const SlabInfo*> infos_;  // one per target
  const std::vector<SlabTarget>& targets_;
  int threads_;
};

// The descriptions of the targets, checked against the layout.
Result<std::vector<const SlabInfo*>> FindSlabs(const std::string& path, const RankFileInfo& info,
                                               const Layout& layout,
                                               const std::vector<SlabTarget>& targets) {
  std::vector<const SlabInfo*> found;
  for (const SlabTarget& target : targets) {
    const auto at = std::find_if(info.slabs.begin(), info.slabs.end(),
                                 [&](const SlabInfo& slab) { return slab.id == target.id; });
    if (at == info.slabs.end()) {
      return DamagedError(path + ": expected " + target.id.DatasetPath() + ", got no such slab");
    }
    if (!FitsLayout(layout, target.id) ||
        at->digests.size() != SlabPieces(layout, target.id).size() ||
        at->chunks.size() != ChunkCount(SlabNumel(layout, target.id))) {
      return DamagedError(path + ": " + target.id.DatasetPath() +
                          ": its pieces or chunks are not those of the recipe's layout");
    }
    found.push_back(&*at);
  }
  return found;
}

std::string ListDamage(const std::vector<std::string>& damage) {
  constexpr size_t kNamed = 4;
  if (damage.empty()) return "; no tensor is hit, the container around them is";
  std::string text = "; damaged: ";
  for (size_t i = 0; i < damage.size() && i < kNamed; ++i) text += (i ? ", " : "") + damage[i];
  if (damage.size() > kNamed) text += " and " + std::to_string(damage.size() - kNamed) + " more";
  return text;
}

}  // namespace

Status ReadRankFile(const FileOps& ops, const std::string& dir, const RankFileInfo& info,
                    const Layout& layout, const std::vector<SlabTarget>& targets, int threads,
                    std::vector<std::string>* damaged_tensors, Bytes* scratch) {
  const std::string path = dir + "/" + info.name;
  RT_ASSIGN_OR_RETURN(auto infos, FindSlabs(path, info, layout, targets));
  Bytes own;
  Bytes& bytes = scratch != nullptr ? *scratch : own;
  RT_RETURN_IF_ERROR(ReadSized(ops, path, info.size, threads, &bytes));
  const auto [damage, digest] =
      SlabDecoder(layout, bytes.view(), std::move(infos), targets, threads).Run();
  if (damaged_tensors) *damaged_tensors = damage;
  if (digest != info.digest) {
    const Status status = DigestError(path, info.digest, digest);
    return DamagedError(status.message() + ListDamage(damage));
  }
  if (!damage.empty()) {
    return DamagedError(path + ": its bytes are as written, but do not decode to what was stored" +
                        ListDamage(damage));
  }
  return {};
}

namespace {

// The pieces of every tensor, per slab kind.
using TensorPieces = std::vector<std::vector<VirtualPiece>>;  // by tensor

void AddPieces(const Layout& layout, const RankFileInfo& file, const SlabId& id,
               TensorPieces* tensors) {
  const int64_t numel = SlabNumel(layout, id);
  int64_t offset = 0;
  for (int index : SlabPieces(layout, id)) {
    const Piece& piece = layout.pieces(id.shard)[index];
    (*tensors)[piece.tensor].push_back(
        {.row_first = piece.row_first, .col_first = piece.col_first, .rows = piece.rows(),
         .cols = piece.cols(), .file = file.name, .dataset = id.DatasetPath(), .offset = offset,
         .dataset_numel = numel});
    offset += piece.numel();
  }
}

Status AddKind(const Layout& layout, const StepIndex& index, SlabKind kind, Hdf5Builder* builder) {
  TensorPieces tensors(layout.tensors().size());
  bool any = false;
  for (const RankFileInfo& file : index.files) {
    for (const SlabInfo& slab : file.slabs) {
      if (slab.id.kind != kind) continue;
      AddPieces(layout, file, slab.id, &tensors);
      any = true;
    }
  }
  if (!any) return {};
  const std::string group = std::string("/") + SlabKindName(kind);
  RT_RETURN_IF_ERROR(builder->AddGroup(group));
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (tensors[t].empty()) continue;
    const TensorSpec& spec = layout.tensors()[t];
    RT_RETURN_IF_ERROR(builder->AddVirtual(group + "/" + spec.name, spec.rows, spec.cols,
                                           spec.vector, tensors[t]));
  }
  return {};
}

}  // namespace

Result<Bytes> BuildMaster(const Layout& layout, const StepIndex& index) {
  RT_ASSIGN_OR_RETURN(Hdf5Builder builder, Hdf5Builder::Make(size_t{1} << 16));
  RT_RETURN_IF_ERROR(AddIndex(StepIndexText(index), &builder));
  for (SlabKind kind : kSlabKinds) RT_RETURN_IF_ERROR(AddKind(layout, index, kind, &builder));
  return builder.Finish();
}

Result<StepIndex> ReadMaster(const FileOps& ops, const std::string& dir, const std::string& name,
                             uint64_t size, const Digest& digest) {
  const std::string path = dir + "/" + name;
  Bytes bytes;
  RT_RETURN_IF_ERROR(ReadSized(ops, path, size, 1, &bytes));
  const Digest got = DigestOf(bytes.view());
  if (got != digest) return DigestError(path, digest, got);
  RT_ASSIGN_OR_RETURN(const std::string text, ReadHdf5Text(bytes.view(), kIndexPath, path));
  Result<StepIndex> index = ParseStepIndex(text);
  if (!index.ok()) return index.status().Within(path + ": " + kIndexPath);
  return index;
}

}  // namespace retrace
