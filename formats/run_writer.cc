#include <filesystem>
#include <algorithm>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"
#include "core/version.h"
#include "formats/run_dir.h"
#include "formats/step_file.h"

namespace retrace {
namespace {

constexpr int kUnsyncedLinesMax = 64;

std::string ManifestText(const RunPlan& plan) {
  const nlohmann::ordered_json json = {
      {"format", kFormatId},       {"version", kVersion},   {"numerics", plan.numerics},
      {"level", plan.level},       {"device", plan.device}, {"driver", plan.driver},
      {"isa", plan.isa},           {"libraries", plan.libraries}};
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string ParentDir(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Replaces what a creation that never finished may have left under this name.
Status WriteFresh(const FileOps& ops, const std::string& dir, const char* name,
                  const std::string& text) {
  RT_RETURN_IF_ERROR(ops.Remove(dir + "/" + name));
  return PublishFile(ops, dir, name, text);
}

Status WriteNewRun(const FileOps& ops, const std::string& dir, const Layout& layout,
                   const RunPlan& plan) {
  RT_RETURN_IF_ERROR(ops.MakeDir(dir + "/" + kStepsName));
  const std::string manifest = ManifestText(plan);
  RT_RETURN_IF_ERROR(WriteFresh(ops, dir, kRecipeName, plan.recipe_text));
  RT_RETURN_IF_ERROR(WriteFresh(ops, dir, kManifestName, manifest));
  OpenLine open;
  open.format = kFormatId;
  open.version = kVersion;
  open.numerics = plan.numerics;
  open.recipe = DigestOf(plan.recipe_text);
  open.manifest = DigestOf(manifest);
  open.first_position = plan.first_position;
  open.virtual_shards = layout.shards();
  open.lineage = plan.lineage;
  Digest digest;
  RT_ASSIGN_OR_RETURN(const std::string line, LedgerLineText(open, Digest(), &digest));
  RT_RETURN_IF_ERROR(PublishFile(ops, dir, kLedgerName, line));
  return ops.SyncDir(ParentDir(dir));
}

// False too where the ledger is damaged: it may have held anything.
bool NothingRecorded(const FileOps& ops, const std::string& ledger_path) {
  const Result<LedgerContents> contents = ReadLedger(ops, ledger_path);
  return contents.ok() &&
         std::none_of(contents->lines.begin(), contents->lines.end(), [](const LedgerLine& line) {
           return std::holds_alternative<StateLine>(line);
         });
}

Status CheckHeader(const OpenLine& header, const Layout& layout, const std::string& dir,
                   OpenFor purpose, const std::string& numerics) {
  if (header.numerics != numerics && purpose == OpenFor::kGoingOn) {
    return UnsupportedError(dir + ": made under " + header.numerics + ", this program computes " +
                            numerics + "; going on would mix the two. Branch from it instead");
  }
  if (header.virtual_shards != layout.shards()) {
    return UsageError(dir + ": expected a layout of " + std::to_string(header.virtual_shards) +
                      " virtual shards, got " + std::to_string(layout.shards()));
  }
  return {};
}

}  // namespace

RunWriter::RunWriter(const std::string& dir, const Layout& layout, FileOps ops, RunLock lock,
                     LedgerWriter ledger, RunHistory history)
    : dir_(dir), layout_(layout), ops_(ops), lock_(std::move(lock)), ledger_(std::move(ledger)),
      history_(std::move(history)) {}

RunWriter::~RunWriter() { (void)Drain(); }

Result<std::unique_ptr<RunWriter>> RunWriter::Create(const std::string& dir, const Layout& layout,
                                                     const RunPlan& plan, FileOps ops) {
  // Folders on the way are the user's, not the run's: no crash there concerns the run.
  std::error_code ignored;  // MakeDir says what is wrong
  std::filesystem::create_directories(std::filesystem::path(dir).parent_path(), ignored);
  RT_RETURN_IF_ERROR(ops.MakeDir(dir));
  RT_ASSIGN_OR_RETURN(RunLock lock, RunLock::Take(ops, dir + "/" + kLockName));
  const std::string ledger_path = dir + "/" + kLedgerName;
  if (ops.Exists(ledger_path)) {
    if (!NothingRecorded(ops, ledger_path)) {
      return UsageError(dir + ": there is a run already; resume it, or choose another directory");
    }
    RT_RETURN_IF_ERROR(ops.Remove(ledger_path));
    RT_RETURN_IF_ERROR(ops.SyncDir(dir));
  }
  RT_RETURN_IF_ERROR(WriteNewRun(ops, dir, layout, plan));
  return OpenLocked(dir, layout, ops, std::move(lock), OpenFor::kGoingOn,
                    plan.numerics);  // never free in between: the run is ours
}

Result<std::unique_ptr<RunWriter>> RunWriter::Open(const std::string& dir, const Layout& layout,
                                                   FileOps ops, OpenFor purpose,
                                                   const std::string& numerics) {
  const std::string ledger_path = dir + "/" + kLedgerName;
  if (!ops.Exists(ledger_path)) {
    return UsageError(dir + ": expected a run directory, but it has no " + kLedgerName);
  }
  RT_ASSIGN_OR_RETURN(RunLock lock, RunLock::Take(ops, dir + "/" + kLockName));
  return OpenLocked(dir, layout, ops, std::move(lock), purpose, numerics);
}

Result<std::unique_ptr<RunWriter>> RunWriter::OpenLocked(const std::string& dir,
                                                         const Layout& layout, FileOps ops,
                                                         RunLock lock, OpenFor purpose,
                                                         const std::string& numerics) {
  const std::string ledger_path = dir + "/" + kLedgerName;
  RT_ASSIGN_OR_RETURN(const LedgerContents contents, ReadLedger(ops, ledger_path));
  RT_ASSIGN_OR_RETURN(RunHistory history, RunHistory::From(contents, ledger_path));
  RT_RETURN_IF_ERROR(CheckHeader(history.header, layout, dir, purpose, numerics));
  RT_ASSIGN_OR_RETURN(LedgerWriter ledger, LedgerWriter::Open(ops, ledger_path, contents));
  std::unique_ptr<RunWriter> writer(new RunWriter(dir, layout, ops, std::move(lock),
                                                  std::move(ledger), std::move(history)));
  if (contents.torn_bytes > 0) {
    writer->notices_.push_back(ledger_path + ": cut a torn last line of " +
                               std::to_string(contents.torn_bytes) + " bytes");
  }
  RT_RETURN_IF_ERROR(writer->Begin());
  return writer;
}

Status RunWriter::Begin() {
  if (!lock_.notice().empty()) notices_.push_back(lock_.notice());
  attempt_ = history_.attempts + 1;
  RT_RETURN_IF_ERROR(lock_.Announce(attempt_));
  const LockHolder self = ThisProcess();
  RT_RETURN_IF_ERROR(
      ledger_.Append(AttemptLine{attempt_, self.host, kVersion, self.pid}, /*sync=*/true));
  history_.attempts = attempt_;
  return RemoveUnnamed();
}

Status RunWriter::RemoveUnnamed() {
  return RemoveIf([this](const StepFileName& file) {
    const PositionEntry* entry = history_.Find(file.position);
    return file.temporary || entry == nullptr || !entry->master ||
           entry->master->name != MasterFileName(file.position, file.attempt);
  });
}

Status RunWriter::RemoveIf(const std::function<bool(const StepFileName&)>& unwanted) {
  const std::string steps = dir_ + "/" + kStepsName;
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> names, ops_.List(steps));
  for (const std::string& name : names) {
    StepFileName file;
    if (!ParseStepFileName(name, &file) || !unwanted(file)) continue;
    RT_RETURN_IF_ERROR(ops_.Remove(steps + "/" + name));
  }
  return {};
}

// ---- commit ----

Status RunWriter::CommitStep(const StepCommit& step) {
  const std::lock_guard lock(mutex_);
  RT_RETURN_IF_ERROR(CheckStep(step));
  std::optional<MasterRef> master;
  if (!step.files.empty()) {
    RT_ASSIGN_OR_RETURN(master, PublishMaster(step));
  }
  const bool again = step.counters.position <= history_.last_position();
  return again ? CommitAgain(step, std::move(master)) : CommitNext(step, std::move(master));
}

Status RunWriter::CheckStep(const StepCommit& step) const {
  const int64_t position = step.counters.position, next = history_.last_position() + 1;
  if (position < history_.first_position() || position > next) {
    return UsageError(dir_ + ": expected position " + std::to_string(next) +
                      " to be committed next, got " + std::to_string(position));
  }
  const PositionEntry* entry = history_.Find(position);
  if (entry != nullptr && entry->digest != step.digest) {
    return FailedError(dir_ + "@" + std::to_string(position) + ": the run recorded the digest " +
                       entry->digest.Hex() + ", this attempt computed " + step.digest.Hex() +
                       "; nothing was written. Find the first difference with `retrace bisect`");
  }
  return step.files.empty() ? Status() : CheckFiles(step);
}

namespace {

std::string StepPlace(const StepCommit& step, SlabKind kind) {
  return "position " + std::to_string(step.counters.position) + ", " + SlabKindName(kind);
}

// The slabs of one kind by shard. Errors: kUsage where a shard comes twice or does not fit.
Result<std::map<int, const SlabInfo*>> SlabsOfKind(const StepCommit& step, const Layout& layout,
                                                   SlabKind kind) {
  std::map<int, const SlabInfo*> slabs;
  for (const RankFileInfo& file : step.files) {
    for (const SlabInfo& slab : file.slabs) {
      if (slab.id.kind != kind) continue;
      if (!FitsLayout(layout, slab.id) ||
          slab.digests.size() != SlabPieces(layout, slab.id).size()) {
        return UsageError(StepPlace(step, kind) + ": " + file.name + " does not fit the layout");
      }
      if (!slabs.emplace(slab.id.shard, &slab).second) {
        return UsageError(StepPlace(step, kind) + ": shard " + std::to_string(slab.id.shard) +
                          " comes from more than one rank");
      }
    }
  }
  return slabs;
}

// Whole kinds: every shard. Partial kinds: every shard's piece of each tensor that is touched.
Status CheckCoverage(const StepCommit& step, const Layout& layout, SlabKind kind,
                     const std::map<int, const SlabInfo*>& slabs) {
  std::set<int> touched;
  for (const auto& [shard, slab] : slabs) {
    for (int piece : slab->id.pieces) touched.insert(layout.pieces(shard)[piece].tensor);
  }
  for (int shard = 0; shard < layout.shards(); ++shard) {
    const auto at = slabs.find(shard);
    bool covered = IsPartial(kind) || at != slabs.end();
    const auto& pieces = layout.pieces(shard);
    for (int i = 0; IsPartial(kind) && i < static_cast<int>(pieces.size()); ++i) {
      if (touched.count(pieces[i].tensor) == 0) continue;
      covered = covered && at != slabs.end() &&
                std::binary_search(at->second->id.pieces.begin(), at->second->id.pieces.end(), i);
    }
    if (!covered) {
      return UsageError(StepPlace(step, kind) + ": expected every virtual shard once, got none of " +
                        "shard " + std::to_string(shard));
    }
  }
  return {};
}

// The digest of a state of which every shard's digests are there.
Digest DigestOfSlabs(const Layout& layout, const Counters& counters, const RuleMemory& memory,
                     const std::vector<RankFileInfo>& files) {
  std::vector<ShardDigests> shards(layout.shards());
  for (int s = 0; s < layout.shards(); ++s) shards[s].resize(layout.pieces(s).size());
  for (const RankFileInfo& file : files) {
    for (const SlabInfo& slab : file.slabs) {
      for (int c = 0; c < kNumComponents; ++c) {
        if (slab.id.kind != WholeKind(static_cast<Component>(c))) continue;
        for (size_t i = 0; i < slab.digests.size(); ++i) {
          shards[slab.id.shard][i][c] = slab.digests[i];
        }
      }
    }
  }
  return StateDigest(counters, memory, shards);
}

}  // namespace

Status RunWriter::CheckFiles(const StepCommit& step) const {
  for (const RankFileInfo& file : step.files) {
    const int64_t position = step.counters.position;
    if (file.name != RankFileName(position, attempt_, file.rank)) {
      return UsageError(dir_ + ": expected rank files of position " + std::to_string(position) +
                        ", attempt " + std::to_string(attempt_) + ", got " + file.name);
    }
    const std::string path = dir_ + "/" + kStepsName + "/" + file.name;
    if (ops_.Size(path) != static_cast<int64_t>(file.size)) {
      return FailedError(path + ": rank " + std::to_string(file.rank) + " wrote " +
                         std::to_string(file.size) + " bytes, which are not seen here; " + dir_ +
                         " must be one shared file system");
    }
  }
  std::set<SlabKind> kinds;
  for (SlabKind kind : kSlabKinds) {
    RT_ASSIGN_OR_RETURN(const auto slabs, SlabsOfKind(step, layout_, kind));
    if (slabs.empty()) continue;
    RT_RETURN_IF_ERROR(CheckCoverage(step, layout_, kind, slabs));
    kinds.insert(kind);
  }
  const size_t components = kinds.count(SlabKind::kP) + kinds.count(SlabKind::kM) +
                            kinds.count(SlabKind::kV);
  if (components != 0 && components != 3) {
    return UsageError(StepPlace(step, SlabKind::kP) + ": a keyframe needs p, m and v");
  }
  if ((kinds.count(SlabKind::kG) > 0) != step.optimizer.has_value()) {
    return UsageError(StepPlace(step, SlabKind::kG) +
                      ": a journal is gradients and an optimizer block, got only one of them");
  }
  if (components == 3 &&
      DigestOfSlabs(layout_, step.counters, step.memory, step.files) != step.digest) {
    return FailedError(dir_ + "@" + std::to_string(step.counters.position) +
                       ": the keyframe's bytes are not those of the state's digest; the state "
                       "changed between its digest and its snapshot");
  }
  return {};
}

Result<MasterRef> RunWriter::PublishMaster(const StepCommit& step) {
  StepIndex index;
  index.position = step.counters.position;
  index.attempt = attempt_;
  index.counters = step.counters;
  index.memory = step.memory;
  index.optimizer = step.optimizer;
  index.files = step.files;
  RT_ASSIGN_OR_RETURN(const Bytes bytes, BuildMaster(layout_, index));
  MasterRef master;
  master.name = MasterFileName(index.position, attempt_);
  master.size = bytes.size;
  master.digest = DigestOf(bytes.view());
  std::set<SlabKind> kinds;
  for (const RankFileInfo& file : step.files) {
    for (const SlabInfo& slab : file.slabs) kinds.insert(slab.id.kind);
  }
  master.kinds.assign(kinds.begin(), kinds.end());
  RT_RETURN_IF_ERROR(PublishFile(ops_, dir_ + "/" + kStepsName, master.name, bytes.view()));
  return master;
}

Status RunWriter::CommitNext(const StepCommit& step, std::optional<MasterRef> master) {
  StateLine line;
  line.start = history_.positions.empty();
  line.counters = step.counters;
  line.digest = step.digest;
  line.master = std::move(master);
  line.record = step.record;
  const bool sync = line.master.has_value() || unsynced_lines_ + 1 >= kUnsyncedLinesMax;
  RT_RETURN_IF_ERROR(ledger_.Append(line, sync));
  unsynced_lines_ = sync ? 0 : unsynced_lines_ + 1;
  history_.positions.push_back({line.digest, line.counters, line.record, line.master});
  return {};
}

Status RunWriter::CommitAgain(const StepCommit& step, std::optional<MasterRef> master) {
  if (!master) return {};
  PositionEntry* entry = history_.Find(step.counters.position);
  const std::optional<MasterRef> old = std::exchange(entry->master, std::nullopt);
  const Status status = ledger_.Append(FilesLine{step.counters.position, *master}, /*sync=*/true);
  if (!status.ok()) {
    entry->master = old;
    return status;
  }
  entry->master = std::move(master);
  if (!old || old->name == entry->master->name) return {};
  return RemoveIf([&](const StepFileName& file) {
    return MasterFileName(file.position, file.attempt) == old->name;
  });
}

Status RunWriter::Retire(int64_t first, int64_t last) {
  RT_RETURN_IF_ERROR(Drain());
  return RetireNow(first, last);
}

Status RunWriter::Hold(const KeepLine& line) {
  RT_RETURN_IF_ERROR(Drain());
  return HoldNow(line);
}

Status RunWriter::HoldNow(const KeepLine& line) {
  const std::lock_guard lock(mutex_);
  RT_RETURN_IF_ERROR(ledger_.Append(line, /*sync=*/true));
  history_.keeps.push_back(line);
  return {};
}

Status RunWriter::RetireNow(int64_t first, int64_t last) {
  const std::lock_guard lock(mutex_);
  std::set<std::string> masters;
  for (int64_t k = first; k <= last && k <= history_.last_position(); ++k) {
    PositionEntry* entry = history_.Find(k);
    if (entry != nullptr && entry->master) masters.insert(entry->master->name);
  }
  if (masters.empty()) return {};
  RT_RETURN_IF_ERROR(ledger_.Append(RetireLine{first, last}, /*sync=*/true));
  for (int64_t k = first; k <= last && k <= history_.last_position(); ++k) {
    if (PositionEntry* entry = history_.Find(k)) entry->master.reset();
  }
  return RemoveIf([&](const StepFileName& file) {
    return masters.count(MasterFileName(file.position, file.attempt)) > 0;
  });
}

// ---- behind the caller's back ----

void RunWriter::Later(std::function<Status()> work) {
  committer_.Post([this, work = std::move(work)] {
    if (!later_error_.ok()) return;
    try {
      later_error_ = work();
    } catch (...) {
      later_error_ = CaughtError(dir_);
    }
  });
}

void RunWriter::CommitLater(StepCommit step) {
  Later([this, step = std::make_shared<StepCommit>(std::move(step))] { return CommitStep(*step); });
}

void RunWriter::RetireLater(int64_t first, int64_t last) {
  Later([this, first, last] { return RetireNow(first, last); });
}

void RunWriter::HoldLater(KeepLine line) {
  Later([this, line = std::move(line)] { return HoldNow(line); });
}

Status RunWriter::Drain() {
  std::promise<Status> done;
  committer_.Post([this, &done] {
    const Status error = std::exchange(later_error_, Status());
    const std::lock_guard lock(mutex_);
    const Status synced = ledger_.Sync();
    if (synced.ok()) unsynced_lines_ = 0;
    done.set_value(error.ok() ? synced : error);
  });
  return done.get_future().get();
}

}  // namespace retrace
