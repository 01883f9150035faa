// RunCheck: are the bytes of a run as they were written? Looks past damage, so that all of it is
// named. Used by `retrace fsck` and `repair`, and by replay/verify.h, which adds whether the states
// follow from one another.
//
// Reads and never writes; sees the run as it is when opened. A run that is being written meanwhile
// may lose files to a retire line between two calls: verify a run that rests. Not thread-safe.
#ifndef RETRACE_FORMATS_RUN_CHECK_H_
#define RETRACE_FORMATS_RUN_CHECK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/status.h"
#include "formats/file_ops.h"
#include "formats/ledger.h"

namespace retrace {

// One thing that is not as it was written.
struct Damage {
  int64_t position = -1;             // of the step it belongs to; -1: of the run as a whole
  std::string message;               // a sentence that begins with the file's path
  std::vector<std::string> tensors;  // all that are hit: "NAME#KIND (shard S)"
};

// Quick: the master whole, rank files by their sizes. Deep: all bytes and, with a layout, tensors.
enum class CheckDepth { kQuick, kDeep };

class RunCheck {
 public:
  // Reads the ledger and the frozen files. Errors: kUsage where `dir` holds no run; kUnsupported
  // for a newer format; kFailed where a file can not be read.
  static Result<RunCheck> Open(const std::string& dir, int threads, FileOps ops = FileOps());

  // Of the ledger, recipe.toml and manifest.json.
  const std::vector<Damage>& damage() const { return damage_; }
  int64_t ledger_lines() const { return ledger_lines_; }  // that are as written
  uint64_t torn_bytes() const { return torn_bytes_; }
  // The recipe as frozen; nullopt where it is damaged.
  const std::optional<std::string>& recipe_text() const { return recipe_text_; }
  const std::optional<OpenLine>& header() const { return header_; }
  // The steps that keep files, as far as the ledger's good lines say.
  const std::map<int64_t, MasterRef>& kept() const { return kept_; }

  // Looks at the master and every rank file of a kept position. Adds what is wrong to *damage,
  // nothing where all is well.
  Status CheckStep(const Layout* layout, int64_t position, CheckDepth depth,
                   std::vector<Damage>* damage);

  // Remembers what a step's index says; positions in ascending order. -> a remark where all its
  // gradients, or all its parameters, have the digests of the position before: two batches never
  // give one gradient, and a writer that stored a step twice looks like this. "": nothing to say.
  // CheckStep calls it by itself (Remarks()).
  std::string CompareWithLast(const StepIndex& index);

  // The run's layout, as the recipe says; where that is damaged, why (nullopt and a damage).
  std::optional<Layout> FindLayout(std::vector<Damage>* damage) const;

  // What is no damage but worth knowing: files that belong to no step, a torn line, another
  // numerics id, and what CheckStep found.
  Result<std::vector<std::string>> Remarks() const;

  // Names in steps/ that none of the masters of kept positions mentions. A master that can not be
  // read names nothing: its files are not orphans, those of its position are passed over.
  Result<std::vector<std::string>> Orphans() const;

 private:
  RunCheck(std::string dir, int threads, FileOps ops)
      : dir_(std::move(dir)), threads_(threads), ops_(ops) {}
  std::string StepsDir() const;
  Status ReadLines();
  Status ReadFrozen(const char* name, const Digest& digest, std::optional<std::string>* text);
  Status CheckFile(const Layout* layout, const RankFileInfo& info, std::vector<Damage>* damage);
  void CheckSize(const RankFileInfo& info, std::vector<Damage>* damage) const;
  Status CheckBytes(const std::string& path, const RankFileInfo& info, std::vector<Damage>* damage);

  std::string dir_;
  int threads_;
  FileOps ops_;
  std::vector<Damage> damage_;
  int64_t ledger_lines_ = 0;
  uint64_t torn_bytes_ = 0;
  std::optional<std::string> recipe_text_;
  std::optional<OpenLine> header_;
  std::map<int64_t, MasterRef> kept_;
  std::vector<std::string> remarks_;
  int64_t last_position_ = -1;  // of CompareWithLast
  std::map<SlabKind, std::vector<Digest>> last_digests_;
};

struct FileReport {
  int64_t ledger_lines = 0;  // as written
  int64_t steps = 0;         // that keep files
  std::vector<Damage> damage;
  std::vector<std::string> remarks;

  bool fine() const { return damage.empty(); }
};

// The ledger, the frozen files and every step, as deep as asked for. `progress`: how many steps of how
// many. Errors: those of RunCheck::Open.
Result<FileReport> CheckRunFiles(const std::string& dir, CheckDepth depth, int threads,
                                 const std::function<void(int64_t done, int64_t total)>& progress,
                                 FileOps ops = FileOps());

}  // namespace retrace

#endif  // RETRACE_FORMATS_RUN_CHECK_H_
