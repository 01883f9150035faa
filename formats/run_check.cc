#include "formats/run_check.h"

#include <algorithm>
#include <set>

#include "core/check.h"
#include "formats/run_dir.h"
#include "formats/step_file.h"

namespace retrace {
namespace {

// What a good line says about kept files; lines around it may be missing.
struct ApplyKept {
  std::map<int64_t, MasterRef>* kept;

  void operator()(const StateLine& line) const {
    if (line.master) (*kept)[line.position()] = *line.master;
  }
  void operator()(const FilesLine& line) const { (*kept)[line.position] = line.master; }
  void operator()(const RetireLine& line) const {
    kept->erase(kept->lower_bound(line.first), kept->upper_bound(line.last));
  }
  void operator()(const OpenLine&) const {}
  void operator()(const AttemptLine&) const {}
};

// Keeps damage as a finding; anything else (a disk that does not read) remains an error.
Status Note(const Status& status, int64_t position, std::vector<std::string> tensors,
            std::vector<Damage>* damage) {
  if (status.ok()) return {};
  if (status.code() != StatusCode::kDamaged) return status;
  damage->push_back({position, status.message(), std::move(tensors)});
  return {};
}

}  // namespace

Result<RunCheck> RunCheck::Open(const std::string& dir, int threads, FileOps ops) {
  RT_CHECK(threads >= 1);
  if (!ops.Exists(dir + "/" + kLedgerName)) {
    return UsageError(dir + ": expected a run directory, but it has no " + kLedgerName);
  }
  RunCheck check(dir, threads, ops);
  RT_RETURN_IF_ERROR(check.ReadLines());
  if (!check.header_) return check;
  std::optional<std::string> manifest;
  RT_RETURN_IF_ERROR(check.ReadFrozen(kRecipeName, check.header_->recipe, &check.recipe_text_));
  RT_RETURN_IF_ERROR(check.ReadFrozen(kManifestName, check.header_->manifest, &manifest));
  return check;
}

std::string RunCheck::StepsDir() const { return dir_ + "/" + kStepsName; }

Status RunCheck::ReadLines() {
  RT_ASSIGN_OR_RETURN(const LedgerScan scan, ScanLedger(ops_, dir_ + "/" + kLedgerName));
  for (const Status& status : scan.damage) RT_RETURN_IF_ERROR(Note(status, -1, {}, &damage_));
  for (const LedgerLine& line : scan.contents.lines) {
    if (const OpenLine* open = std::get_if<OpenLine>(&line)) header_ = *open;
    std::visit(ApplyKept{&kept_}, line);
  }
  ledger_lines_ = std::ssize(scan.contents.lines);
  torn_bytes_ = scan.contents.torn_bytes;
  if (!header_ && damage_.empty()) {
    damage_.push_back({-1, dir_ + "/" + kLedgerName + ": expected an \"open\" line, got none", {}});
  }
  return {};
}

Status RunCheck::ReadFrozen(const char* name, const Digest& digest,
                            std::optional<std::string>* text) {
  const std::string path = dir_ + "/" + name;
  if (!ops_.Exists(path)) {
    damage_.push_back({-1, path + ": missing", {}});
    return {};
  }
  RT_ASSIGN_OR_RETURN(const Bytes bytes, ops_.Read(path));
  const Digest got = DigestOf(bytes.view());
  if (got == digest) {
    *text = std::string(bytes.view());
  } else {
    damage_.push_back({-1,
                       path + ": expected the digest " + digest.Hex() + ", got " + got.Hex() +
                           "; this file is frozen when a run begins",
                       {}});
  }
  return {};
}

Status RunCheck::CheckStep(const Layout* layout, int64_t position, std::vector<Damage>* damage) {
  const MasterRef& master = kept_.at(position);
  Result<StepIndex> index = ReadMaster(ops_, StepsDir(), master.name, master.size, master.digest);
  if (!index.ok()) return Note(index.status(), position, {}, damage);
  for (const RankFileInfo& info : index->files) {
    std::vector<Damage> found;
    RT_RETURN_IF_ERROR(CheckFile(layout, info, &found));
    for (Damage& one : found) {
      one.position = position;
      damage->push_back(std::move(one));
    }
  }
  return {};
}

Status RunCheck::CheckFile(const Layout* layout, const RankFileInfo& info,
                           std::vector<Damage>* damage) {
  const std::string path = StepsDir() + "/" + info.name;
  if (layout == nullptr) return CheckBytes(path, info, damage);
  std::vector<std::vector<float>> values;
  std::vector<SlabTarget> targets;
  for (const SlabInfo& slab : info.slabs) {
    if (!FitsLayout(*layout, slab.id)) {
      damage->push_back({-1, path + ": does not fit the recipe's layout", {}});
      return {};
    }
    targets.push_back({slab.id, values.emplace_back(SlabNumel(*layout, slab.id)).data()});
  }
  std::vector<std::string> tensors;
  const Status status = ReadRankFile(ops_, StepsDir(), info, *layout, targets, threads_, &tensors);
  return Note(status, -1, std::move(tensors), damage);
}

// Without the recipe nobody knows the tensors.
Status RunCheck::CheckBytes(const std::string& path, const RankFileInfo& info,
                            std::vector<Damage>* damage) {
  if (!ops_.Exists(path)) {
    damage->push_back({-1, path + ": missing", {}});
    return {};
  }
  RT_ASSIGN_OR_RETURN(const Bytes bytes, ops_.Read(path));
  const Digest got = DigestOf(bytes.view());
  if (bytes.size == info.size && got == info.digest) return {};
  damage->push_back({-1,
                     path + ": expected " + std::to_string(info.size) + " bytes of the digest " +
                         info.digest.Hex() + ", got " + std::to_string(bytes.size) + " of " +
                         got.Hex(),
                     {}});
  return {};
}

Result<std::vector<std::string>> RunCheck::Orphans() const {
  std::set<std::string> named;
  std::set<int64_t> unreadable;
  for (const auto& [position, master] : kept_) {
    named.insert(master.name);
    const Result<StepIndex> index =
        ReadMaster(ops_, StepsDir(), master.name, master.size, master.digest);
    if (!index.ok()) {
      unreadable.insert(position);
      continue;
    }
    for (const RankFileInfo& info : index->files) named.insert(info.name);
  }
  std::vector<std::string> orphans;
  const Result<std::vector<std::string>> names = ops_.List(StepsDir());
  if (names.status().code() == StatusCode::kDamaged) return orphans;  // every step's finding
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    StepFileName parsed;
    if (named.contains(name)) continue;
    if (ParseStepFileName(name, &parsed) && unreadable.contains(parsed.position)) continue;
    orphans.push_back(name);
  }
  return orphans;
}

}  // namespace retrace
