// RunCheck: are the bytes of a run as they were written? Looks past damage, so that all of it is
// named. Used by replay/verify.h, which adds whether the states follow from one another.
//
// Reads and never writes; sees the run as it is when opened. A run that is being written meanwhile
// may lose files to a retire line between two calls: verify a run that rests. Not thread-safe.
#ifndef RETRACE_FORMATS_RUN_CHECK_H_
#define RETRACE_FORMATS_RUN_CHECK_H_

#include <cstdint>
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

  // Reads the master and every rank file of a kept position, all of their bytes and, with a layout,
  // every tensor. Adds what is wrong to *damage, nothing where all is well.
  Status CheckStep(const Layout* layout, int64_t position, std::vector<Damage>* damage);

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
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_RUN_CHECK_H_
