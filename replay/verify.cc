#include "replay/verify.h"

#include <fmt/format.h>

#include <optional>

#include "replay/record.h"
#include "replay/state_digest.h"
#include "replay/timeline.h"

namespace retrace {
namespace {

class Verifier {
 public:
  Verifier(std::string dir, const VerifyOptions& options)
      : dir_(std::move(dir)), options_(options), engine_(options.isa, options.threads) {}

  Result<VerifyReport> Run() {
    RT_ASSIGN_OR_RETURN(RunCheck check, RunCheck::Open(dir_, options_.threads));
    report_.damage = check.damage();
    report_.ledger_lines = check.ledger_lines();
    layout_ = check.FindLayout(&report_.damage);
    if (report_.damage.empty() && layout_) {
      RT_RETURN_IF_ERROR(CheckStates(check));
    } else {
      RT_RETURN_IF_ERROR(CheckFilesAlone(check));
    }
    RT_RETURN_IF_ERROR(Remark(check));
    return std::move(report_);
  }

 private:
  void Damaged(int64_t position, std::string message) {
    report_.damage.push_back({position, std::move(message), {}});
  }

  // Reads and walks every kept position.
  Status CheckStates(RunCheck& check) {
    RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(dir_, options_.threads));
    const RunHistory& history = run.history();
    report_.first_position = history.first_position();
    report_.last_position = history.last_position();
    int64_t done = 0;
    const int64_t total = std::ssize(check.kept());
    for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
      CheckEntry(history, k);
      if (!history.Find(k)->master) {
        state_.reset();
        continue;
      }
      RT_RETURN_IF_ERROR(CheckPosition(run, check, k));
      if (options_.progress) options_.progress(++done, total);
    }
    return {};
  }

  // What the ledger alone says of position k.
  void CheckEntry(const RunHistory& history, int64_t k) {
    const PositionEntry& entry = *history.Find(k);
    const PositionEntry* before = history.Find(k - 1);
    // The position is part of what is digested, so this can only be a state recorded twice.
    if (before != nullptr && before->digest == entry.digest) {
      Damaged(k, fmt::format("{}/{}: positions {} and {} have the same digest {}", dir_,
                             kLedgerName, k - 1, k, entry.digest.Hex()));
    }
    if (before == nullptr) return;
    const Result<UpdateRecord> record = ParseRecord(entry.record);
    if (!record.ok()) {
      Damaged(k, fmt::format("{}/{}: the record of update {}: {}", dir_, kLedgerName, k,
                             record.status().message()));
    } else if (record->update != k) {
      Damaged(k, fmt::format("{}/{}: the record at position {} is of update {}", dir_, kLedgerName,
                             k, record->update));
    }
  }

  // A kept position. Where the way that replay reads it fails, or leaves files unread, every file
  // is looked at, so that all damage is named and not only what came first.
  Status CheckPosition(const RunReader& run, RunCheck& check, int64_t k) {
    const PositionEntry& entry = *run.history().Find(k);
    const size_t damaged_before = report_.damage.size();
    bool all_read = entry.HasJournal() || entry.HasKeyframe();
    const Status journal = entry.HasJournal() ? CheckJournal(run, k, &all_read) : Status();
    if (!journal.ok() || !entry.HasJournal()) state_.reset();
    const Status keyframe = entry.HasKeyframe() ? CheckKeyframe(run, k) : Status();
    for (const Status& status : {journal, keyframe}) {
      if (!status.ok() && status.code() != StatusCode::kDamaged) return status;
    }
    if (!journal.ok() || !keyframe.ok() || !all_read) {
      RT_RETURN_IF_ERROR(check.CheckStep(&*layout_, k, CheckDepth::kDeep, &report_.damage));
    }
    for (const Status& status : {journal, keyframe}) {
      const bool named = report_.damage.size() > damaged_before;
      if (!status.ok() && !named) Damaged(k, status.message());
    }
    if (!state_) unproven_.push_back(k);
    const Result<StepIndex> index = run.ReadIndex(k);
    const std::string remark = index.ok() ? check.CompareWithLast(*index) : "";
    if (!remark.empty()) report_.remarks.push_back(remark);
    return {};
  }

  Status CheckJournal(const RunReader& run, int64_t k, bool* all_read) {
    const Timeline timeline(run, *layout_, engine_);
    if (!state_) {
      Journal journal;
      RT_RETURN_IF_ERROR(run.ReadJournal(*layout_, k, 0, layout_->shards(), &journal));
      ++report_.journals;
      if (run.history().Find(k)->HasPartial()) *all_read = false;
      return {};
    }
    RT_RETURN_IF_ERROR(timeline.Walk(&*state_));
    ++report_.journals;
    const Digest got = StateDigest(engine_, *layout_, *state_), expected = run.history().Find(k)->digest;
    if (got == expected) {
      ++report_.walked;
      return {};
    }
    return DamagedError(
        fmt::format("{}@{}: the journal leads from {}@{} to a state of digest {}, the ledger says "
                    "{}; its files "
                    "are as written",
                    dir_, k, dir_, k - 1, got.Hex(), expected.Hex()));
  }

  Status CheckKeyframe(const RunReader& run, int64_t k) {
    State state;
    RT_RETURN_IF_ERROR(run.ReadKeyframe(*layout_, k, 0, layout_->shards(), &state));
    ++report_.keyframes;
    state_ = std::move(state);
    return {};
  }

  // With a damaged ledger, recipe or manifest nothing can be walked.
  Status CheckFilesAlone(RunCheck& check) {
    int64_t done = 0;
    for (const auto& [k, master] : check.kept()) {
      RT_RETURN_IF_ERROR(check.CheckStep(layout_ ? &*layout_ : nullptr, k, CheckDepth::kDeep,
                                         &report_.damage));
      if (options_.progress) options_.progress(++done, std::ssize(check.kept()));
    }
    report_.remarks.push_back(
        "files were checked one by one; no state was walked, because the ledger, recipe.toml or "
        "manifest.json is damaged");
    return {};
  }

  Status Remark(const RunCheck& check) {
    RT_ASSIGN_OR_RETURN(const std::vector<std::string> of_files, check.Remarks());
    if (!unproven_.empty()) {
      report_.remarks.push_back(
          fmt::format("states that could not be proven, damaged or after damage: {}",
                      fmt::join(unproven_, ", ")));
    }
    report_.remarks.insert(report_.remarks.end(), of_files.begin(), of_files.end());
    return {};
  }

  const std::string dir_;
  const VerifyOptions& options_;
  Engine engine_;
  VerifyReport report_;
  std::optional<Layout> layout_;
  std::optional<State> state_;  // RUN@(k-1), proven
  std::vector<int64_t> unproven_;
};

}  // namespace

Result<VerifyReport> VerifyRun(const std::string& dir, const VerifyOptions& options) {
  return Verifier(dir, options).Run();
}

}  // namespace retrace
