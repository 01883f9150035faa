#include <algorithm>

#include "formats/run_dir.h"

namespace retrace {
namespace {

// Applies one line to the history so far. -> empty, or what is wrong.
struct Apply {
  RunHistory* history;

  std::string operator()(const OpenLine& line) const {
    history->header = line;
    return "";
  }
  std::string operator()(const AttemptLine& line) const {
    if (line.attempt != history->attempts + 1) {
      return "expected attempt " + std::to_string(history->attempts + 1) + ", got " +
             std::to_string(line.attempt);
    }
    ++history->attempts;
    return "";
  }
  std::string operator()(const StateLine& line) const {
    const int64_t next = history->last_position() + 1;
    if (line.position() != next || line.start != history->positions.empty()) {
      return "expected position " + std::to_string(next) + ", got " +
             std::to_string(line.position());
    }
    history->positions.push_back({line.digest, line.counters, line.record, line.master});
    return "";
  }
  std::string operator()(const FilesLine& line) const {
    PositionEntry* entry = history->Find(line.position);
    if (entry == nullptr) return "no position " + std::to_string(line.position) + " before it";
    entry->master = line.master;
    return "";
  }
  std::string operator()(const RetireLine& line) const {
    const int64_t last = std::min(line.last, history->last_position());
    for (int64_t k = std::max(line.first, history->first_position()); k <= last; ++k) {
      history->Find(k)->master.reset();
    }
    return "";
  }
  std::string operator()(const KeepLine& line) const {
    history->keeps.push_back(line);
    return "";
  }
};

}  // namespace

bool PositionEntry::Has(SlabKind kind) const {
  return master && std::count(master->kinds.begin(), master->kinds.end(), kind) > 0;
}

bool PositionEntry::HasPartial() const {
  return master && std::any_of(master->kinds.begin(), master->kinds.end(), IsPartial);
}

Result<RunHistory> RunHistory::From(const LedgerContents& ledger, const std::string& path) {
  RunHistory history;
  history.run = ledger.digests.front();
  for (size_t i = 0; i < ledger.lines.size(); ++i) {
    const std::string wrong = std::visit(Apply{&history}, ledger.lines[i]);
    if (!wrong.empty()) {
      return DamagedError(path + ": line " + std::to_string(i + 1) + ": " + wrong);
    }
  }
  return history;
}

bool RunHistory::IsHeld(int64_t position) const {
  return std::any_of(keeps.begin(), keeps.end(), [position](const KeepLine& line) {
    return position >= line.first && position <= line.last;
  });
}

PositionEntry* RunHistory::Find(int64_t position) {
  const bool there = position >= first_position() && position <= last_position();
  return there ? &positions[position - first_position()] : nullptr;
}

const PositionEntry* RunHistory::Find(int64_t position) const {
  return const_cast<RunHistory*>(this)->Find(position);
}

std::optional<int64_t> RunHistory::NearestKeyframe(int64_t position) const {
  for (int64_t k = position; Find(k) != nullptr; --k) {
    if (Find(k)->HasKeyframe()) return k;
    if (!Find(k)->HasJournal()) break;
  }
  return std::nullopt;
}

bool RunHistory::HasJournals(int64_t first, int64_t last) const {
  for (int64_t k = first; k <= last; ++k) {
    if (Find(k) == nullptr || !Find(k)->HasJournal()) return false;
  }
  return true;
}

}  // namespace retrace
