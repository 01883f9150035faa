// The files of one step: rank files hold slabs, the master says what they are. Used by
// rank_writer.h and run_dir.h. FORMAT.md, "Rank file" and "Master".
//
// Rank files and masters are HDF5, for h5py users. retrace reads slabs by the chunk places that the
// master lists, so HDF5 never parses a rank file and a damaged one is decoded far enough to say which
// tensors are hit. Functions of this header are thread-safe.
#ifndef RETRACE_FORMATS_STEP_FILE_H_
#define RETRACE_FORMATS_STEP_FILE_H_

#include <string>
#include <string_view>
#include <vector>

#include "core/layout.h"
#include "core/status.h"
#include "formats/chunk_codec.h"
#include "formats/file_ops.h"
#include "formats/step_index.h"

namespace retrace {

// Names within steps/: POSITION.aATTEMPT.rRANK.h5 and, for the master, POSITION.aATTEMPT.h5.
std::string RankFileName(int64_t position, int64_t attempt, int rank);
std::string MasterFileName(int64_t position, int64_t attempt);

struct StepFileName {
  int64_t position = 0, attempt = 0;
  int rank = -1;  // -1: the master
  bool temporary = false;
};
// -> false: not a name of a step's file.
bool ParseStepFileName(std::string_view name, StepFileName* parsed);

// What a slab dataset is to hold: the pieces of `id`, one after another.
struct SlabContents {
  SlabId id;
  const float* values = nullptr;
};

struct RankFile {
  Bytes bytes;
  RankFileInfo info;
};

// Compresses and digests on `threads` threads. Equal arguments (threads apart) give equal bytes.
// Memory: the finished file, and a few chunks a thread. level: of zstd. spare: an earlier file's
// memory, which is used again.
Result<RankFile> BuildRankFile(const Layout& layout, int64_t position, int64_t attempt, int rank,
                               const std::vector<SlabContents>& slabs, int threads,
                               int level = kChunkLevel, Bytes spare = Bytes());

// Where a slab's values go: the pieces of `id`, one after another.
struct SlabTarget {
  SlabId id;
  float* values = nullptr;
};

// Reads slabs of one rank file, verified: size, digest of the file, digest of every piece.
// Errors: kDamaged, naming the file and the damaged tensors (the first few; *damaged_tensors gets
// all, as "NAME#KIND (shard S)"); kFailed where it can not be read. scratch: memory for the file,
// used again.
Status ReadRankFile(const FileOps& ops, const std::string& dir, const RankFileInfo& info,
                    const Layout& layout, const std::vector<SlabTarget>& targets, int threads,
                    std::vector<std::string>* damaged_tensors = nullptr,
                    Bytes* scratch = nullptr);

Result<Bytes> BuildMaster(const Layout& layout, const StepIndex& index);

// Reads and verifies the master `name` of `dir`.
Result<StepIndex> ReadMaster(const FileOps& ops, const std::string& dir, const std::string& name,
                             uint64_t size, const Digest& digest);

}  // namespace retrace

#endif  // RETRACE_FORMATS_STEP_FILE_H_
