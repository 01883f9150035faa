// RankWriter: every rank's way to keep parts of a step. The training thread pays one copy; the rest
// (digests, compression, writing, fsync) happens behind it. Used by replay's recorder.
//
// A file that RankWriter published is no part of the run until rank 0 commits it (RunWriter).
// Memory: two staging buffers of the largest step, and one finished file. One calling thread.
#ifndef RETRACE_FORMATS_RANK_WRITER_H_
#define RETRACE_FORMATS_RANK_WRITER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/status.h"
#include "formats/file_ops.h"
#include "formats/job_thread.h"
#include "formats/step_file.h"
#include "formats/step_index.h"

namespace retrace {

// A whole slab of a shard, and what to keep of it: everything or, for a partial kind, some pieces.
struct SlabSource {
  SlabId id;
  const float* slab = nullptr;  // Layout::slab_numel(id.shard) elements
};

class RankWriter {
 public:
  // `attempt` is RunWriter::attempt() of rank 0. Errors: kFailed where this rank does not see that
  // attempt: the run directory is not one shared file system, or a later attempt began.
  static Result<std::unique_ptr<RankWriter>> Open(const Layout& layout, const std::string& run_dir,
                                                  int64_t attempt, int rank, int threads,
                                                  FileOps ops = FileOps());
  ~RankWriter();  // finishes what was begun

  // Copies the slabs; they may change as soon as it returns. -> seconds waited for storage to catch
  // up (both staging buffers were in use).
  double Snapshot(int64_t position, const std::vector<SlabSource>& slabs);

  // The outcome of the oldest Snapshot not yet asked for, in order. Poll: nullopt where it is not
  // ready. Wait: waits for it; there must be one. After an error the same step may be tried again.
  std::optional<Result<RankFileInfo>> Poll();
  Result<RankFileInfo> Wait();
  size_t pending() const { return pending_.size(); }

 private:
  struct Staging;
  RankWriter(const Layout& layout, const std::string& run_dir, int64_t attempt, int rank,
             int threads, FileOps ops);
  Staging* TakeStaging();
  void GiveBack(Staging* staging);
  Result<RankFileInfo> Publish(int64_t position, const std::vector<SlabContents>& slabs);
  Status CheckAttempt() const;

  const Layout layout_;
  const std::string run_dir_;
  const int64_t attempt_;
  const int rank_, threads_;
  const FileOps ops_;
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::vector<std::unique_ptr<Staging>> staging_;
  std::vector<Staging*> free_;
  std::deque<std::future<Result<RankFileInfo>>> pending_;
  Bytes spare_;       // the last finished file's memory; writer_'s
  JobThread writer_;  // last: its jobs use the members above
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_RANK_WRITER_H_
