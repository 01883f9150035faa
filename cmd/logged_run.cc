#include "cmd/logged_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace retrace {
namespace {

std::vector<std::string> PathParts(const std::string& path) {
  std::vector<std::string> parts;
  std::string part;
  for (const char c : path + "/") {
    if (c != '/') {
      part += c;
      continue;
    }
    if (!part.empty() && part != ".") parts.push_back(part);
    part.clear();
  }
  if (parts.empty()) parts.push_back(path);
  return parts;
}

std::string LastParts(const std::vector<std::string>& parts, size_t count) {
  const size_t first = parts.size() - std::min(parts.size(), count);
  std::string text = parts[first];
  for (size_t i = first + 1; i < parts.size(); ++i) text += "/" + parts[i];
  return text;
}

}  // namespace

Result<LoggedRun> ReadLog(const std::string& dir, const UpdateRange& view) {
  LoggedRun logged;
  RT_ASSIGN_OR_RETURN(logged.run, OpenedRun::Open(dir));
  const RunHistory& history = logged.run->history();
  const int64_t last = std::min(view.last, history.last_position());
  for (int64_t k = std::max(view.first, history.first_position() + 1); k <= last; ++k) {
    const PositionEntry* entry = history.Find(k);
    Result<UpdateRecord> record = ParseRecord(entry->record);
    if (!record.ok()) return record.status().Within(fmt::format("{}@{}", dir, k));
    if (record->tensor_norms.size() != logged.run->layout().tensors().size()) {
      return DamagedError(fmt::format("{}@{}: expected tensor_norms of {} tensors, got {}", dir, k,
                                      logged.run->layout().tensors().size(),
                                      record->tensor_norms.size()));
    }
    logged.records.push_back(std::move(record).value());
    logged.entries.push_back(entry);
  }
  return logged;
}

bool AllEvaluated(const std::vector<LoggedRun>& runs) {
  for (const LoggedRun& run : runs) {
    for (const UpdateRecord& r : run.records) {
      if (!r.evaluation_loss) return false;
    }
  }
  return true;
}

Curve LossCurve(const LoggedRun& run, bool evaluation) {
  Curve curve;
  for (const UpdateRecord& r : run.records) {
    curve.emplace_back(r.update, evaluation ? *r.evaluation_loss : r.loss);
  }
  return curve;
}

Curve NormCurve(const LoggedRun& run) {
  Curve curve;
  for (const UpdateRecord& r : run.records) curve.emplace_back(r.update, r.gradient_norm);
  return curve;
}

CurveFacts FactsOf(const Curve& curve) {
  CurveFacts facts;
  for (const auto& [update, value] : curve) {
    if (!std::isfinite(value)) continue;
    if (facts.low && value - facts.low->second > facts.rise) {
      facts.rise = value - facts.low->second;
      facts.rise_low = facts.low->second;
      facts.rise_from = facts.low->first;
      facts.rise_to = update;
    }
    if (!facts.low || value < facts.low->second) facts.low = {update, value};
    if (!facts.high || value > facts.high->second) facts.high = {update, value};
  }
  return facts;
}

std::vector<std::string> DistinctNames(const std::vector<std::string>& dirs) {
  std::vector<std::vector<std::string>> parts;
  size_t longest = 1;
  for (const std::string& dir : dirs) {
    parts.push_back(PathParts(dir));
    longest = std::max(longest, parts.back().size());
  }
  std::vector<size_t> used(dirs.size(), 1);
  std::vector<std::string> names(dirs.size());
  for (size_t round = 0; round <= longest; ++round) {
    std::map<std::string, std::vector<size_t>> same;
    for (size_t i = 0; i < dirs.size(); ++i) {
      names[i] = LastParts(parts[i], used[i]);
      same[names[i]].push_back(i);
    }
    for (const auto& [name, members] : same) {
      const bool one_dir = std::all_of(members.begin(), members.end(),
                                       [&](size_t i) { return parts[i] == parts[members[0]]; });
      if (!one_dir) {
        for (const size_t i : members) ++used[i];
      }
    }
  }
  return names;
}

std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

}  // namespace retrace
