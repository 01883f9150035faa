#include "formats/ledger.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/version.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

// A line is BODY + kDigestMember + 32 digits + kLineEnd.
constexpr std::string_view kDigestMember = ",\"digest\":\"";
constexpr std::string_view kLineEnd = "\"}";
constexpr size_t kTailBytes = kDigestMember.size() + 32 + kLineEnd.size();

Json MasterJson(const MasterRef& master) {
  Json kinds = Json::array();
  for (SlabKind kind : master.kinds) kinds.push_back(SlabKindName(kind));
  return {{"name", master.name}, {"size", master.size}, {"digest", master.digest.Hex()},
          {"kinds", std::move(kinds)}};
}

struct ToJson {
  Json operator()(const OpenLine& line) const {
    Json json = {{"kind", "open"}, {"format", line.format}, {"version", line.version},
                 {"numerics", line.numerics}, {"recipe", line.recipe.Hex()},
                 {"manifest", line.manifest.Hex()}, {"first", line.first_position},
                 {"shards", line.virtual_shards}};
    if (line.lineage) {
      json["lineage"] = {{"parent", line.lineage->parent},
                         {"parent_run", line.lineage->parent_run.Hex()},
                         {"position", line.lineage->position},
                         {"state", line.lineage->state.Hex()},
                         {"interventions", line.lineage->interventions}};
    }
    return json;
  }
  Json operator()(const AttemptLine& line) const {
    return {{"kind", "attempt"}, {"attempt", line.attempt}, {"host", line.host},
            {"pid", line.pid}, {"version", line.version}};
  }
  Json operator()(const StateLine& line) const {
    Json json = {{"kind", line.start ? "start" : "update"}, {"k", line.position()},
                 {"state", line.digest.Hex()},
                 {"counters", Json::parse(CountersText(line.counters))}};
    if (line.master) json["master"] = MasterJson(*line.master);
    json["record"] = Json::parse(line.record, nullptr, false);
    return json;
  }
  Json operator()(const FilesLine& line) const {
    return {{"kind", "files"}, {"k", line.position}, {"master", MasterJson(line.master)}};
  }
  Json operator()(const RetireLine& line) const {
    return {{"kind", "retire"}, {"first", line.first}, {"last", line.last}};
  }
  Json operator()(const KeepLine& line) const {
    return {{"kind", "keep"},     {"first", line.first},     {"last", line.last},
            {"update", line.update}, {"trigger", line.trigger}, {"reason", line.reason}};
  }
};

// Reads one line whose digest is right, so what it lacks was never there: it throws within this file
// (Json's exceptions for a wrong type or a missing member), and ParseLine catches.
Digest GetDigest(const Json& json, const char* name) {
  const Result<Digest> digest = ParseDigest(json.at(name).get<std::string>());
  if (!digest.ok()) throw std::runtime_error(std::string(name) + ": " + digest.status().message());
  return *digest;
}

MasterRef GetMaster(const Json& json) {
  MasterRef master{json.at("name"), json.at("size"), GetDigest(json, "digest"), {}};
  for (const Json& name : json.at("kinds")) {
    for (SlabKind kind : kSlabKinds) {
      if (name == SlabKindName(kind)) master.kinds.push_back(kind);
    }
  }
  return master;
}

OpenLine GetOpen(const Json& json) {
  OpenLine line{json.at("format"), json.at("version"), json.at("numerics"),
                GetDigest(json, "recipe"), GetDigest(json, "manifest"),
                json.at("first"), json.at("shards"), {}};
  if (json.contains("lineage")) {
    const Json& from = json.at("lineage");
    line.lineage = Lineage{from.at("parent"), GetDigest(from, "parent_run"), from.at("position"),
                           GetDigest(from, "state"), from.at("interventions")};
  }
  return line;
}

StateLine GetState(const Json& json, bool start) {
  StateLine line;
  line.start = start;
  line.digest = GetDigest(json, "state");
  const Result<Counters> counters = ParseCounters(json.at("counters").dump());
  if (!counters.ok()) throw std::runtime_error("counters: " + counters.status().message());
  line.counters = *counters;
  if (json.at("k") != line.position()) throw std::runtime_error("k is not the counters' position");
  if (json.contains("master")) line.master = GetMaster(json.at("master"));
  line.record = json.at("record").dump();
  return line;
}

LedgerLine GetLine(const Json& json) {
  const std::string kind = json.at("kind");
  if (kind == "open") return GetOpen(json);
  if (kind == "attempt") {
    return AttemptLine{json.at("attempt"), json.at("host"), json.at("version"), json.at("pid")};
  }
  if (kind == "start" || kind == "update") return GetState(json, kind == "start");
  if (kind == "files") return FilesLine{json.at("k"), GetMaster(json.at("master"))};
  if (kind == "retire") return RetireLine{json.at("first"), json.at("last")};
  if (kind == "keep") {
    return KeepLine{json.at("first"), json.at("last"), json.at("update"), json.at("trigger"),
                    json.at("reason")};
  }
  throw std::runtime_error("a kind that this version does not know: " + kind);
}

// Whether `line` (no newline) is whole: its digest is that of its body.
bool IsWhole(std::string_view line, Digest* digest) {
  if (line.size() < kTailBytes) return false;
  const std::string_view body = line.substr(0, line.size() - kTailBytes);
  *digest = DigestOf(body);
  return line.substr(body.size()) ==
         std::string(kDigestMember) + digest->Hex() + std::string(kLineEnd);
}

// What the library writes, it writes by recursion: a record of a hundred thousand brackets, under a
// right digest, would overflow the stack.
bool IsNestedTooDeeply(std::string_view text) {
  constexpr int kMost = 64;
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && (text[i] == '{' || text[i] == '[')) {
      if (++depth > kMost) return true;
    } else if (!quoted && (text[i] == '}' || text[i] == ']')) {
      --depth;
    }
  }
  return false;
}

// `previous`: the digest of the line before; nullopt where that is damaged.
Result<LedgerLine> ParseLine(std::string_view text, const std::optional<Digest>& previous) {
  try {
    if (IsNestedTooDeeply(text)) return DamagedError("not a ledger line: nested too deeply");
    const Json json = Json::parse(text);
    if (previous && GetDigest(json, "previous") != *previous) {
      return DamagedError("does not follow the line before it: a line is missing or was moved");
    }
    if (json.at("kind") == "open" && json.at("format") > kFormatId) {
      return UnsupportedError("format " + json.at("format").dump() + " is newer than this program's (" +
                              std::to_string(kFormatId) + "); use a newer retrace");
    }
    return GetLine(json);
  } catch (const std::exception& error) {
    return DamagedError(std::string("not a ledger line: ") + error.what());
  }
}

// Whether a block of `rest`, which begins at byte `offset` of the file, never reached the disk though
// later ones did: zeros from the beginning of a line or block to the end of a block. JSON has no NUL
// and a flipped bit makes none of a line's first '{', so no other damage looks like this.
bool HasLostBlock(std::string_view rest, size_t offset) {
  constexpr size_t kBlock = 512;  // the least that a disk writes at once
  size_t end = 0;
  for (size_t at; (at = rest.find('\0', end)) != std::string_view::npos;) {
    end = std::min(rest.find_first_not_of('\0', at), rest.size());
    const bool begins = at == 0 || rest[at - 1] == '\n' || (offset + at) % kBlock == 0;
    if (begins && (offset + end) % kBlock == 0) return true;
  }
  return false;
}

// Whether all of `rest` may be what was not fsynced when the power went: at most as many lines as
// RunWriter leaves unsynced, and one that was being synced; of them only the last names files.
bool MayBeUnsynced(std::string_view rest) {
  constexpr int kLinesMax = 65;
  int lines = 0;
  for (size_t at = 0; at < rest.size(); ++lines) {
    const size_t end = std::min(rest.find('\n', at), rest.size());
    const bool names_files = rest.substr(at, end - at).find("\"master\"") != std::string_view::npos;
    if (names_files && end + 1 < rest.size()) return false;
    at = end + 1;
  }
  return lines <= kLinesMax;
}

// Bytes at the end of `rest` (from the first line that is not whole) that a crash may have left: no
// newline ends them, or the file was made longer before its bytes arrived, so it ends in zeros or a
// block of it is missing.
bool IsTorn(std::string_view rest, size_t offset) {
  if (HasLostBlock(rest, offset)) return MayBeUnsynced(rest);
  const size_t end = rest.find_last_not_of('\0');
  const bool zeros = end == std::string_view::npos || end + 1 < rest.size();
  if (zeros) return rest.substr(0, end + 1).find('\n') == std::string_view::npos;
  if (rest.find('\n') != std::string_view::npos) return false;
  // A whole line and one byte more had its newline, which is damaged now.
  Digest digest;
  return !IsWhole(rest.substr(0, rest.size() - 1), &digest);
}

std::string Place(const std::string& path, size_t index) {
  return path + ": line " + std::to_string(index + 1);
}

}  // namespace

Result<LedgerScan> ScanLedger(const FileOps& ops, const std::string& path) {
  RT_ASSIGN_OR_RETURN(const Bytes bytes, ops.Read(path));
  const std::string_view text = bytes.view();
  LedgerScan scan;
  LedgerContents& contents = scan.contents;
  std::optional<Digest> previous = Digest();  // nullopt: that of a damaged line
  size_t at = 0;
  for (size_t number = 0; at < text.size(); ++number) {
    const std::string_view rest = text.substr(at);
    const std::string_view line = rest.substr(0, rest.find('\n'));
    const std::string place = Place(path, number);
    Digest digest;
    if (line.size() == rest.size() || !IsWhole(line, &digest)) {
      if (IsTorn(rest, at)) {
        contents.torn_bytes = rest.size();
        break;
      }
      scan.damage.push_back(DamagedError(
          place + ": its digest does not match its text. " +
          (scan.damage.empty() ? "Lines before it are good" : "It is not the first such line")));
      previous.reset();
      at += std::min(line.size() + 1, rest.size());
      continue;
    }
    at += line.size() + 1;
    Result<LedgerLine> parsed = ParseLine(line, previous);
    previous = digest;
    if (!parsed.ok()) {
      scan.damage.push_back(parsed.status().Within(place));
      continue;
    }
    if (std::holds_alternative<OpenLine>(*parsed) != (number == 0)) {
      scan.damage.push_back(
          DamagedError(place + ": expected \"open\" as the first line and nowhere else"));
      continue;
    }
    contents.lines.push_back(*std::move(parsed));
    contents.digests.push_back(digest);
  }
  contents.size_bytes = at;
  return scan;
}

Result<LedgerContents> ReadLedger(const FileOps& ops, const std::string& path) {
  RT_ASSIGN_OR_RETURN(LedgerScan scan, ScanLedger(ops, path));
  if (!scan.damage.empty()) return scan.damage.front();
  if (scan.contents.lines.empty()) {
    return DamagedError(path + ": expected an \"open\" line, got none");
  }
  return std::move(scan.contents);
}

Result<std::string> LedgerLineText(const LedgerLine& line, const Digest& previous, Digest* digest) {
  Json json = std::visit(ToJson(), line);
  if (std::holds_alternative<StateLine>(line) && !json["record"].is_object()) {
    return UsageError("a record must be a JSON object");
  }
  json["previous"] = previous.Hex();
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.pop_back();  // the object's end; its last member follows
  *digest = DigestOf(text);
  text.append(kDigestMember).append(digest->Hex()).append(kLineEnd).push_back('\n');
  return text;
}

Result<LedgerWriter> LedgerWriter::Open(const FileOps& ops, const std::string& path,
                                        const LedgerContents& contents) {
  RT_ASSIGN_OR_RETURN(File file, ops.OpenAppend(path));
  return LedgerWriter(std::move(file), contents);
}

Status LedgerWriter::Append(const LedgerLine& line, bool sync) {
  Digest digest;
  RT_ASSIGN_OR_RETURN(const std::string text, LedgerLineText(line, previous_, &digest));
  const Status status = Write(text, sync);
  if (!status.ok()) {
    rewrite_ = true;
    return status;
  }
  if (!sync) pending_ += text;
  if (sync) durable_bytes_ += text.size();
  previous_ = digest;
  return {};
}

Status LedgerWriter::Write(const std::string& text, bool sync) {
  if (rewrite_) {
    RT_RETURN_IF_ERROR(file_.Truncate(durable_bytes_));
    RT_RETURN_IF_ERROR(file_.Write(pending_));
    rewrite_ = false;
  }
  RT_RETURN_IF_ERROR(file_.Write(text));
  if (!sync) return {};
  RT_RETURN_IF_ERROR(file_.Sync());
  durable_bytes_ += pending_.size();
  pending_.clear();
  return {};
}

Status LedgerWriter::Sync() {
  if (pending_.empty()) return {};
  const Status status = Write("", true);
  rewrite_ = !status.ok();
  return status;
}

}  // namespace retrace
