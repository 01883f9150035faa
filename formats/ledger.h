// Ledger: the run's append-only list of what happened, one JSON object a line. A step is committed
// by its line and by nothing else. Used by run_dir.h. FORMAT.md, "Ledger".
//
// A line ends with its own digest, over its bytes before that member; the next line repeats it as
// "previous". So a changed, lost or swapped line shows, with its number. A last line that was torn by
// a crash is not part of the ledger: readers ignore it, the writer cuts it before it appends.
// Not thread-safe: one writer (RunLock), one thread.
#ifndef RETRACE_FORMATS_LEDGER_H_
#define RETRACE_FORMATS_LEDGER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/digest.h"
#include "core/state.h"
#include "core/status.h"
#include "formats/file_ops.h"
#include "formats/step_index.h"

namespace retrace {

// Where a branch comes from.
struct Lineage {
  std::string parent;         // path of the parent run
  Digest parent_run;          // digest of the parent's first ledger line
  int64_t position = 0;       // RUN@k of the parent ...
  Digest state;               // ... and its digest
  std::string interventions;  // canonical text

  bool operator==(const Lineage&) const = default;
};

// "open": always the first line, and only there.
struct OpenLine {
  int format = 0;
  std::string version, numerics;
  Digest recipe, manifest;  // of recipe.toml and manifest.json
  int64_t first_position = 0;
  int64_t virtual_shards = 0;
  std::optional<Lineage> lineage;
};

// "attempt": a process opened the run for writing.
struct AttemptLine {
  int64_t attempt = 0;  // 1, 2, ...
  std::string host, version;
  int64_t pid = 0;
};

// A master file, and what kinds of slabs its step holds.
struct MasterRef {
  std::string name;
  uint64_t size = 0;
  Digest digest;
  std::vector<SlabKind> kinds;
};

// "start" (the first position's state) or "update" (k): positions follow one another.
struct StateLine {
  bool start = false;
  Counters counters;  // position is k
  Digest digest;      // of RUN@k
  std::optional<MasterRef> master;
  std::string record = "{}";  // JSON object, one line

  int64_t position() const { return counters.position; }
};

// "files": the step's files are now these; any earlier ones no longer belong to it.
struct FilesLine {
  int64_t position = 0;
  MasterRef master;
};

// "retire": positions first..last keep no files.
struct RetireLine {
  int64_t first = 0, last = 0;
};

// "keep": positions first..last stay, whatever the recipe's policy says; last may lie ahead.
struct KeepLine {
  int64_t first = 0, last = 0;
  int64_t update = 0;   // at which it was decided
  std::string trigger;  // "loss", "norm", "update_rms", "non_finite", "file", "signal"; "densify"
  std::string reason;   // a sentence

  bool operator==(const KeepLine&) const = default;
};
inline constexpr char kDensifyTrigger[] = "densify";

using LedgerLine =
    std::variant<OpenLine, AttemptLine, StateLine, FilesLine, RetireLine, KeepLine>;

struct LedgerContents {
  std::vector<LedgerLine> lines;
  std::vector<Digest> digests;  // of each line
  uint64_t size_bytes = 0;      // of the whole lines
  uint64_t torn_bytes = 0;      // after them: a line that a crash, or a writer at work, left unfinished
};

// Errors: kDamaged with the line's number; kUnsupported for a newer format.
Result<LedgerContents> ReadLedger(const FileOps& ops, const std::string& path);

// A ledger read past its damage: the lines that are as written, and an error for each other one.
struct LedgerScan {
  LedgerContents contents;     // may lack lines, the first one too: no history to build on
  std::vector<Status> damage;  // in the order of lines; messages name them
};

// For verify, which names all damage; everything else refuses a damaged ledger (ReadLedger).
// Errors: kFailed where the file can not be read.
Result<LedgerScan> ScanLedger(const FileOps& ops, const std::string& path);

// The line that follows one with digest `previous`, newline included. *digest: its own.
// Errors: kUsage where record is not a JSON object.
Result<std::string> LedgerLineText(const LedgerLine& line, const Digest& previous, Digest* digest);

class LedgerWriter {
 public:
  // Opens the ledger whose contents were read. A torn line is cut before the first append.
  static Result<LedgerWriter> Open(const FileOps& ops, const std::string& path,
                                   const LedgerContents& contents);

  // Durable when it returns, with `sync`; otherwise with the next line that is. After an error try
  // again, with this line or another: everything that is not known to be durable is written anew,
  // because a failed fsync may have dropped it. Until then the line may or may not be there.
  Status Append(const LedgerLine& line, bool sync);
  Status Sync();

 private:
  LedgerWriter(File file, const LedgerContents& contents)
      : file_(std::move(file)), durable_bytes_(contents.size_bytes),
        previous_(contents.digests.back()), rewrite_(contents.torn_bytes > 0) {}
  Status Write(const std::string& text, bool sync);

  File file_;
  uint64_t durable_bytes_;
  std::string pending_;  // whole lines after durable_bytes_
  Digest previous_;
  bool rewrite_;  // what lies after durable_bytes_ is not pending_
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_LEDGER_H_
