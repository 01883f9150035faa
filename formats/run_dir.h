// The run directory: recipe, ledger and the files of every step that is kept. Used by replay and cmd.
// RunWriter (rank 0 of a run being written) commits steps; RunReader reads any run, also one that is
// being written, from a read-only directory too. FORMAT.md describes every byte.
//
//   RUN/recipe.toml  manifest.json  ledger.jsonl  lock  steps/
//
// Invariant: a step is part of the run exactly when its ledger line is whole. Whatever else lies in
// steps/ belongs to no step, and is removed by the next opening for write.
#ifndef RETRACE_FORMATS_RUN_DIR_H_
#define RETRACE_FORMATS_RUN_DIR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/optimizer_block.h"
#include "core/state.h"
#include "core/status.h"
#include "core/version.h"
#include "formats/file_ops.h"
#include "formats/job_thread.h"
#include "formats/ledger.h"
#include "formats/run_lock.h"
#include "formats/step_file.h"
#include "formats/step_index.h"

namespace retrace {

inline constexpr char kRecipeName[] = "recipe.toml";
inline constexpr char kManifestName[] = "manifest.json";
inline constexpr char kLedgerName[] = "ledger.jsonl";
inline constexpr char kLockName[] = "lock";
inline constexpr char kStepsName[] = "steps";

// A position that the run has.
struct PositionEntry {
  Digest digest;  // of RUN@k
  Counters counters;
  std::string record;               // JSON object; of update k ("{}" for the first position)
  std::optional<MasterRef> master;  // the step's files, where any are kept

  bool Has(SlabKind kind) const;
  bool HasKeyframe() const { return Has(SlabKind::kP); }
  bool HasJournal() const { return Has(SlabKind::kG); }
  bool HasPartial() const;
};

// What a ledger says, replayed to its end.
struct RunHistory {
  OpenLine header;
  Digest run;  // of the open line: names this run
  int64_t attempts = 0;
  std::vector<PositionEntry> positions;  // first_position, first_position + 1, ...
  std::vector<KeepLine> keeps;

  // Errors: kDamaged with the line's number.
  static Result<RunHistory> From(const LedgerContents& ledger, const std::string& path);

  int64_t first_position() const { return header.first_position; }
  int64_t last_position() const { return first_position() + std::ssize(positions) - 1; }
  const PositionEntry* Find(int64_t position) const;  // nullptr: the run has no such position
  PositionEntry* Find(int64_t position);

  // The last keyframe at or before `position` from which journals lead there without a gap.
  std::optional<int64_t> NearestKeyframe(int64_t position) const;
  // Whether a "keep" line says that the position stays.
  bool IsHeld(int64_t position) const;
  // Whether updates first..last all have journals.
  bool HasJournals(int64_t first, int64_t last) const;
};

// What a run is made from; frozen at Create.
struct RunPlan {
  std::string recipe_text;                // recipe.toml
  std::string device, isa, libraries;     // manifest.json: where it was made
  std::string driver, level = "portable";  // the same
  std::string numerics = kNumericsId;      // what its bits depend on besides recipe and dataset
  int64_t first_position = 0;             // a branch's first state is RUN@k of its parent, edited
  std::optional<Lineage> lineage;
};

// A step to commit: RUN@k and what is kept of update k.
struct StepCommit {
  Digest digest;  // of RUN@k
  Counters counters;  // position is k
  RuleMemory memory;
  std::string record = "{}";  // JSON object
  std::vector<RankFileInfo> files;          // of all ranks, or none
  std::optional<OptimizerBlock> optimizer;  // exactly where journals (kG) are among the files
};

// Upkeep rearranges what is stored and computes nothing, so the run may be of another numerics id.
enum class OpenFor { kGoingOn, kUpkeep };

class RunWriter {
 public:
  // Makes the run and opens it. DIR may exist where no state was ever recorded in it (its first
  // attempt failed, say for want of memory): that run is replaced.
  // Errors: kUsage where there is a run already.
  static Result<std::unique_ptr<RunWriter>> Create(const std::string& dir, const Layout& layout,
                                                   const RunPlan& plan, FileOps ops = FileOps());
  // Opens an existing run to go on: takes the lock, adds an attempt, cuts a torn line, removes files
  // that no line names. Errors: kUsage where another process writes it or there is no run;
  // kUnsupported where it was made under another numerics id than `numerics`; kDamaged.
  static Result<std::unique_ptr<RunWriter>> Open(const std::string& dir, const Layout& layout,
                                                 FileOps ops = FileOps(),
                                                 OpenFor purpose = OpenFor::kGoingOn,
                                                 const std::string& numerics = kNumericsId);
  ~RunWriter();  // finishes commits, syncs the ledger, frees the lock

  int64_t attempt() const { return attempt_; }
  const std::vector<std::string>& notices() const { return notices_; }  // for the user
  const RunHistory& history() const { return history_; }  // Drain first after CommitLater

  // Commits the next position. Durable on return where the step has files; a line alone at the
  // latest 64 lines later. A position that the run has already (a resume from an earlier keyframe)
  // is compared: it must have the same digest; its files, if given, become the step's files.
  // Errors: kUsage for a step that does not fit (coverage, order, record); kFailed for a different
  // digest or a failing disk. After an error the same step may be committed again.
  Status CommitStep(const StepCommit& step);

  // The same behind the caller's back, in order. The first error is kept for Drain; steps after it
  // are not committed.
  void CommitLater(StepCommit step);
  // Waits for CommitLater's steps, makes all lines durable. -> the first error, once.
  Status Drain();

  // Positions first..last keep no files: says so in the ledger, then removes them.
  Status Retire(int64_t first, int64_t last);
  // Positions of the line stay: for Retire's callers to heed.
  Status Hold(const KeepLine& line);
  // The same two behind the caller's back, in order with CommitLater. Not done where a step before
  // them failed: what is retired may be the only way back if its successor is not there.
  void RetireLater(int64_t first, int64_t last);
  void HoldLater(KeepLine line);

 private:
  RunWriter(const std::string& dir, const Layout& layout, FileOps ops, RunLock lock,
            LedgerWriter ledger, RunHistory history);
  static Result<std::unique_ptr<RunWriter>> OpenLocked(const std::string& dir,
                                                       const Layout& layout, FileOps ops,
                                                       RunLock lock, OpenFor purpose,
                                                       const std::string& numerics);
  Status Begin();
  Status CheckStep(const StepCommit& step) const;
  Status CheckFiles(const StepCommit& step) const;
  Result<MasterRef> PublishMaster(const StepCommit& step);
  Status CommitNext(const StepCommit& step, std::optional<MasterRef> master);
  Status CommitAgain(const StepCommit& step, std::optional<MasterRef> master);
  Status RetireNow(int64_t first, int64_t last);
  Status HoldNow(const KeepLine& line);
  void Later(std::function<Status()> work);
  Status RemoveUnnamed();
  Status RemoveIf(const std::function<bool(const StepFileName&)>& unwanted);

  const std::string dir_;
  const Layout layout_;
  const FileOps ops_;
  std::mutex mutex_;  // the committer's and the caller's commits
  RunLock lock_;
  LedgerWriter ledger_;
  RunHistory history_;
  int64_t attempt_ = 0;
  int unsynced_lines_ = 0;
  std::vector<std::string> notices_;
  Status later_error_;
  JobThread committer_;  // last: its jobs use the members above
};

// What the walk from RUN@(k-1) to RUN@k needs besides a partial keyframe.
struct Journal {
  std::vector<std::vector<float>> gradients;  // slab of each shard asked for
  OptimizerBlock optimizer;
  Counters counters;  // of RUN@k
  RuleMemory memory;  // of RUN@k
  Bytes scratch;      // the last file read: a Journal that is read into again uses its memory again
};

// All that a step keeps.
struct StepContents {
  StepIndex index;
  std::vector<SlabId> slabs;               // in the order of the files
  std::vector<std::vector<float>> values;  // of each

  std::vector<SlabContents> views() const;
};

// Reads; never writes. Sees the run as it was when opened; open again to see more. Thread-safe.
class RunReader {
 public:
  // Errors: kUsage where `dir` holds no run; kDamaged; kUnsupported for a newer format.
  // threads: for decoding and digests.
  static Result<RunReader> Open(const std::string& dir, int threads = 1, FileOps ops = FileOps());

  const std::string& dir() const { return dir_; }
  const std::string& recipe_text() const { return recipe_text_; }
  const std::string& manifest_text() const { return manifest_text_; }
  const RunHistory& history() const { return history_; }

  // RUN@k's shards [first_shard, first_shard + shard_count) with counters and memory. Every byte is
  // verified by digest, and so is that the step's digests make up the state digest in the ledger.
  // Errors: kUsage where k has no keyframe or the layout is not the run's; kDamaged, located.
  Status ReadKeyframe(const Layout& layout, int64_t position, int first_shard, int shard_count,
                      State* state) const;
  Status ReadJournal(const Layout& layout, int64_t position, int first_shard, int shard_count,
                     Journal* journal) const;
  // Overwrites the pieces of `state` that the partial keyframe of `position` holds (those of the
  // state's shards): the state before update `position`, after surgery. -> ids of what was read.
  Result<std::vector<SlabId>> ReadPartial(const Layout& layout, int64_t position,
                                          State* state) const;
  // All that is kept of a step besides slabs.
  Result<StepIndex> ReadIndex(int64_t position) const;
  // All of it, verified as by the functions above.
  Result<StepContents> ReadStep(const Layout& layout, int64_t position) const;

  // From here on as if the position kept no files: for repair, which goes around damage.
  void Forget(int64_t position);

 private:
  RunReader(std::string dir, int threads, FileOps ops)
      : dir_(std::move(dir)), threads_(threads), ops_(ops) {}
  Status CheckLayout(const Layout& layout) const;
  Result<StepIndex> ReadIndexWith(int64_t position, bool has, const char* what) const;
  // Reads the slabs whose target is not null.
  Status ReadSlabs(const Layout& layout, const StepIndex& index,
                   const std::function<float*(const SlabId&)>& target,
                   Bytes* scratch = nullptr) const;

  std::string dir_;
  int threads_;
  FileOps ops_;
  std::string recipe_text_, manifest_text_;
  RunHistory history_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_RUN_DIR_H_
