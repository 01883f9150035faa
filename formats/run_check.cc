#include "formats/run_check.h"

#include <algorithm>
#include <set>

#include "core/check.h"
#include "core/recipe_toml.h"
#include "core/version.h"
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
  void operator()(const KeepLine&) const {}
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

Status RunCheck::CheckStep(const Layout* layout, int64_t position, CheckDepth depth,
                           std::vector<Damage>* damage) {
  const MasterRef& master = kept_.at(position);
  Result<StepIndex> index = ReadMaster(ops_, StepsDir(), master.name, master.size, master.digest);
  if (!index.ok()) return Note(index.status(), position, {}, damage);
  const std::string remark = CompareWithLast(*index);
  if (!remark.empty()) remarks_.push_back(remark);
  for (const RankFileInfo& info : index->files) {
    std::vector<Damage> found;
    if (depth == CheckDepth::kQuick) {
      CheckSize(info, &found);
    } else {
      RT_RETURN_IF_ERROR(CheckFile(layout, info, &found));
    }
    for (Damage& one : found) {
      one.position = position;
      damage->push_back(std::move(one));
    }
  }
  return {};
}

std::string RunCheck::CompareWithLast(const StepIndex& index) {
  std::map<SlabKind, std::vector<Digest>> digests;
  for (const RankFileInfo& file : index.files) {
    for (const SlabInfo& slab : file.slabs) {
      std::vector<Digest>& of_kind = digests[slab.id.kind];
      of_kind.insert(of_kind.end(), slab.digests.begin(), slab.digests.end());
    }
  }
  const bool neighbours = last_position_ == index.position - 1;
  const auto repeated = [&](SlabKind kind) {
    return neighbours && digests.contains(kind) && last_digests_.contains(kind) &&
           digests[kind] == last_digests_[kind];
  };
  const std::string last = std::to_string(index.position - 1);
  const std::string position = std::to_string(index.position);
  std::string remark;
  if (repeated(SlabKind::kG)) {
    remark = "updates " + last + " and " + position +
             " have the same gradient, bit for bit, in every tensor";
  } else if (repeated(SlabKind::kP)) {
    remark = "positions " + last + " and " + position +
             " have the same parameters, bit for bit, in every tensor";
  }
  last_position_ = index.position;
  last_digests_ = std::move(digests);
  return remark;
}

void RunCheck::CheckSize(const RankFileInfo& info, std::vector<Damage>* damage) const {
  const std::string path = StepsDir() + "/" + info.name;
  const int64_t size = ops_.Size(path);
  if (size == static_cast<int64_t>(info.size)) return;
  damage->push_back({-1,
                     size < 0 ? path + ": missing; expected a file of " +
                                    std::to_string(info.size) + " bytes"
                              : path + ": expected " + std::to_string(info.size) +
                                    " bytes, got " + std::to_string(size),
                     {}});
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

std::optional<Layout> RunCheck::FindLayout(std::vector<Damage>* damage) const {
  if (!recipe_text_ || !header_) return std::nullopt;
  const Result<Recipe> recipe = ParseRecipe(*recipe_text_, dir_ + "/" + kRecipeName);
  Status status = recipe.status();
  if (recipe.ok()) {
    Result<Layout> layout = Layout::Make(recipe->model, header_->virtual_shards);
    if (layout.ok()) return std::move(layout).value();
    status = layout.status();
  }
  damage->push_back({-1, status.message(), {}});
  return std::nullopt;
}

Result<std::vector<std::string>> RunCheck::Remarks() const {
  std::vector<std::string> remarks = remarks_;
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> orphans, Orphans());
  for (const std::string& name : orphans) {
    remarks.push_back(StepsDir() + "/" + name +
                      ": belongs to no step; the next 'retrace train --resume " + dir_ +
                      "' removes it");
  }
  if (torn_bytes_ > 0) {
    remarks.push_back(dir_ + "/" + kLedgerName + ": ends in " + std::to_string(torn_bytes_) +
                      " bytes of a line that was never finished; it is not part of the run");
  }
  if (header_ && header_->numerics != kNumericsId &&
      !header_->numerics.starts_with(std::string(kNumericsId) + " ")) {
    remarks.push_back(dir_ + ": made under " + header_->numerics + ", this program is " +
                      kNumericsId);
  }
  return remarks;
}

Result<FileReport> CheckRunFiles(const std::string& dir, CheckDepth depth, int threads,
                                 const std::function<void(int64_t done, int64_t total)>& progress,
                                 FileOps ops) {
  RT_ASSIGN_OR_RETURN(RunCheck check, RunCheck::Open(dir, threads, ops));
  FileReport report;
  report.damage = check.damage();
  report.ledger_lines = check.ledger_lines();
  const std::optional<Layout> layout = check.FindLayout(&report.damage);
  for (const auto& [position, master] : check.kept()) {
    RT_RETURN_IF_ERROR(
        check.CheckStep(layout ? &*layout : nullptr, position, depth, &report.damage));
    ++report.steps;
    if (progress) progress(report.steps, std::ssize(check.kept()));
  }
  RT_ASSIGN_OR_RETURN(report.remarks, check.Remarks());
  return report;
}

}  // namespace retrace
