#include "formats/step_index.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "core/version.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

// A reader of one JSON value that remembers the first thing that is wrong: every getter answers
// something, the caller asks `status` once at the end.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : root_(Json::parse(text, nullptr, false)) {
    if (root_.is_discarded()) Fail("", "JSON");
  }

  const Json& root() const { return root_; }
  const Status& status() const { return status_; }

  const Json& Member(const Json& object, const char* name) {
    static const Json kNone;
    if (object.is_object()) {
      const auto at = object.find(name);
      if (at != object.end()) return *at;
    }
    Fail(name, "a member of that name");
    return kNone;
  }

  int64_t Int(const Json& value, const char* name, int64_t first, int64_t last) {
    if (value.is_number_integer()) {
      const bool huge = value.is_number_unsigned() && value.get<uint64_t>() > uint64_t{INT64_MAX};
      const int64_t number = huge ? -1 : value.get<int64_t>();
      if (!huge && number >= first && number <= last) return number;
    }
    Fail(name, "an integer of [" + std::to_string(first) + ", " + std::to_string(last) + "]");
    return first;
  }

  int64_t Int(const Json& object, const char* name) {
    return Int(Member(object, name), name, 0, INT64_MAX);
  }

  std::string Text(const Json& object, const char* name) {
    const Json& value = Member(object, name);
    if (value.is_string()) return value.get<std::string>();
    Fail(name, "a string");
    return "";
  }

  const Json& Array(const Json& object, const char* name) {
    static const Json kEmpty = Json::array();
    const Json& value = Member(object, name);
    if (value.is_array()) return value;
    Fail(name, "a list");
    return kEmpty;
  }

  Digest ReadDigest(std::string_view hex, const char* name) {
    const Result<Digest> digest = ParseDigest(hex);
    if (digest.ok()) return *digest;
    Fail(name, "a digest of 32 hexadecimal digits");
    return {};
  }

  void Fail(const char* name, const std::string& expected) {
    if (status_.ok()) {
      status_ = DamagedError("member '" + std::string(name) + "': expected " + expected);
    }
  }

 private:
  Json root_;
  Status status_;
};

constexpr int64_t kIntMax = INT32_MAX;
constexpr int64_t kTensorsMax = 1 << 24;

// Never throws: bytes that are not UTF-8 are replaced.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string DigestsText(const std::vector<Digest>& digests) {
  std::string text;
  for (const Digest& digest : digests) text += digest.Hex();
  return text;
}

std::vector<Digest> ReadDigests(JsonReader* reader, const Json& object) {
  const std::string text = reader->Text(object, "digests");
  if (text.size() % 32 != 0) reader->Fail("digests", "32 digits a digest");
  std::vector<Digest> digests;
  for (size_t at = 0; at + 32 <= text.size(); at += 32) {
    digests.push_back(reader->ReadDigest(std::string_view(text).substr(at, 32), "digests"));
  }
  return digests;
}

Json CountersJson(const Counters& counters) {
  const std::vector<int64_t>& t = counters.adam_t;
  const bool same = std::all_of(t.begin(), t.end(), [&](int64_t x) { return x == t[0]; });
  Json json = {{"position", counters.position},
               {"schedule_index", counters.schedule_index},
               {"data_cursor", counters.data_cursor},
               {"tensors", t.size()}};
  if (same && !t.empty()) {
    json["adam_t"] = t[0];
  } else {
    json["adam_t"] = t;
  }
  return json;
}

Counters ReadCounters(JsonReader* reader, const Json& json) {
  Counters counters;
  counters.position = reader->Int(json, "position");
  counters.schedule_index = reader->Int(json, "schedule_index");
  counters.data_cursor = reader->Int(json, "data_cursor");
  const int64_t tensors = reader->Int(reader->Member(json, "tensors"), "tensors", 0, kTensorsMax);
  const Json& t = reader->Member(json, "adam_t");
  if (t.is_array()) {
    for (const Json& value : t) {
      counters.adam_t.push_back(reader->Int(value, "adam_t", 0, INT64_MAX));
    }
    if (static_cast<int64_t>(t.size()) != tensors) reader->Fail("adam_t", "one number a tensor");
  } else if (reader->status().ok()) {
    counters.adam_t.assign(tensors, reader->Int(t, "adam_t", 0, INT64_MAX));
  }
  return counters;
}

Json MemoryJson(const RuleMemory& memory) {
  Json json = Json::object();
  for (const auto& [name, values] : memory) {
    Json bits = Json::array();
    for (double value : values) bits.push_back(std::bit_cast<uint64_t>(value));
    json[name] = std::move(bits);
  }
  return json;
}

RuleMemory ReadMemory(JsonReader* reader, const Json& json) {
  RuleMemory memory;
  if (!json.is_object()) reader->Fail("memory", "an object");
  for (const auto& [name, bits] : json.items()) {
    std::vector<double>& values = memory[name];
    if (!bits.is_array()) reader->Fail("memory", "lists of bits");
    for (const Json& value : bits) {
      if (!value.is_number_unsigned()) reader->Fail("memory", "64 bits as an integer");
      values.push_back(std::bit_cast<double>(
          value.is_number_unsigned() ? value.get<uint64_t>() : uint64_t{0}));
    }
  }
  return memory;
}

// The float members of a row, in the order of FORMAT.md.
constexpr float OptimizerRow::* kRowFloats[] = {
    &OptimizerRow::lr,  &OptimizerRow::beta1,           &OptimizerRow::one_minus_beta1,
    &OptimizerRow::beta2, &OptimizerRow::one_minus_beta2, &OptimizerRow::bias_correction1,
    &OptimizerRow::bias_correction2, &OptimizerRow::eps, &OptimizerRow::weight_decay,
    &OptimizerRow::clip, &OptimizerRow::update_clip};

Json OptimizerJson(const OptimizerBlock& block) {
  Json rows = Json::array(), clips = Json::array();
  for (const OptimizerRow& row : block.rows) {
    Json json = {static_cast<uint32_t>(row.action), row.t};
    for (const auto member : kRowFloats) json.push_back(std::bit_cast<uint32_t>(row.*member));
    rows.push_back(std::move(json));
  }
  for (const std::vector<float>& factors : block.row_clips) {
    Json json = Json::array();
    for (float factor : factors) json.push_back(std::bit_cast<uint32_t>(factor));
    clips.push_back(std::move(json));
  }
  return {{"rows", std::move(rows)}, {"row_clips", std::move(clips)}};
}

float ReadFloatBits(JsonReader* reader, const Json& value) {
  return std::bit_cast<float>(
      static_cast<uint32_t>(reader->Int(value, "optimizer", 0, UINT32_MAX)));
}

OptimizerBlock ReadOptimizer(JsonReader* reader, const Json& json) {
  OptimizerBlock block;
  for (const Json& value : reader->Array(json, "rows")) {
    if (!value.is_array() || value.size() != 2 + std::size(kRowFloats)) {
      reader->Fail("rows", "13 numbers a row");
      break;
    }
    OptimizerRow row;
    row.action = static_cast<TensorAction>(reader->Int(value[0], "action", 0, 2));
    row.t = reader->Int(value[1], "t", 0, INT64_MAX);
    for (size_t i = 0; i < std::size(kRowFloats); ++i) {
      row.*kRowFloats[i] = ReadFloatBits(reader, value[2 + i]);
    }
    block.rows.push_back(row);
  }
  for (const Json& value : reader->Array(json, "row_clips")) {
    if (!value.is_array()) reader->Fail("row_clips", "lists");
    std::vector<float>& factors = block.row_clips.emplace_back();
    for (const Json& factor : value) factors.push_back(ReadFloatBits(reader, factor));
  }
  return block;
}

Json InfoJson(const RankFileInfo& info) {
  Json slabs = Json::array();
  for (const SlabInfo& slab : info.slabs) {
    Json json = {{"shard", slab.id.shard}, {"kind", SlabKindName(slab.id.kind)}};
    if (IsPartial(slab.id.kind)) json["pieces"] = slab.id.pieces;
    json["digests"] = DigestsText(slab.digests);
    Json& chunks = json["chunks"] = Json::array();
    for (const ChunkPlace& place : slab.chunks) {
      chunks.push_back(place.offset);
      chunks.push_back(place.size);
    }
    slabs.push_back(std::move(json));
  }
  return {{"position", info.position}, {"attempt", info.attempt}, {"rank", info.rank},
          {"name", info.name},         {"size", info.size},       {"digest", info.digest.Hex()},
          {"slabs", std::move(slabs)}};
}

SlabKind ReadKind(JsonReader* reader, const Json& object) {
  const std::string name = reader->Text(object, "kind");
  for (SlabKind kind : kSlabKinds) {
    if (name == SlabKindName(kind)) return kind;
  }
  reader->Fail("kind", "g, p, m, v or partial_p, _m, _v");
  return SlabKind::kG;
}

SlabInfo ReadSlab(JsonReader* reader, const Json& json) {
  SlabInfo slab;
  slab.id.shard = static_cast<int>(reader->Int(reader->Member(json, "shard"), "shard", 0, kIntMax));
  slab.id.kind = ReadKind(reader, json);
  if (IsPartial(slab.id.kind)) {
    for (const Json& piece : reader->Array(json, "pieces")) {
      slab.id.pieces.push_back(static_cast<int>(reader->Int(piece, "pieces", 0, kIntMax)));
    }
  }
  slab.digests = ReadDigests(reader, json);
  const Json& chunks = reader->Array(json, "chunks");
  if (chunks.size() % 2 != 0) reader->Fail("chunks", "offset and size of each");
  for (size_t i = 0; i + 1 < chunks.size(); i += 2) {
    slab.chunks.push_back(
        {static_cast<uint64_t>(reader->Int(chunks[i], "chunks", 0, INT64_MAX / 2)),
         static_cast<uint64_t>(reader->Int(chunks[i + 1], "chunks", 0, INT64_MAX / 2))});
  }
  return slab;
}

RankFileInfo ReadInfo(JsonReader* reader, const Json& json) {
  RankFileInfo info;
  info.position = reader->Int(json, "position");
  info.attempt = reader->Int(json, "attempt");
  info.rank = static_cast<int>(reader->Int(reader->Member(json, "rank"), "rank", 0, kIntMax));
  info.name = reader->Text(json, "name");
  if (info.name.find('/') != std::string::npos) reader->Fail("name", "a name without '/'");
  info.size = static_cast<uint64_t>(reader->Int(json, "size"));
  info.digest = reader->ReadDigest(reader->Text(json, "digest"), "digest");
  for (const Json& slab : reader->Array(json, "slabs")) {
    info.slabs.push_back(ReadSlab(reader, slab));
  }
  return info;
}

}  // namespace

const char* SlabKindName(SlabKind kind) {
  static constexpr const char* kNames[] = {"g", "p", "m", "v", "partial_p", "partial_m", "partial_v"};
  return kNames[static_cast<int>(kind)];
}

std::string SlabId::DatasetPath() const {
  char text[32];
  std::snprintf(text, sizeof text, "/shard_%04d/%s", shard, SlabKindName(kind));
  return text;
}

bool FitsLayout(const Layout& layout, const SlabId& id) {
  if (id.shard < 0 || id.shard >= layout.shards()) return false;
  int next = 0;
  for (int piece : id.pieces) {
    if (piece < next || piece >= static_cast<int>(layout.pieces(id.shard).size())) return false;
    next = piece + 1;
  }
  return IsPartial(id.kind) != id.pieces.empty();
}

std::vector<int> SlabPieces(const Layout& layout, const SlabId& id) {
  if (IsPartial(id.kind)) return id.pieces;
  std::vector<int> all(layout.pieces(id.shard).size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  return all;
}

int64_t SlabNumel(const Layout& layout, const SlabId& id) {
  int64_t numel = 0;
  for (int piece : SlabPieces(layout, id)) numel += layout.pieces(id.shard)[piece].numel();
  return numel;
}

std::string RankFileInfoText(const RankFileInfo& info) { return Dump(InfoJson(info)); }

Result<RankFileInfo> ParseRankFileInfo(std::string_view text) {
  JsonReader reader(text);
  RankFileInfo info = ReadInfo(&reader, reader.root());
  if (!reader.status().ok()) return reader.status();
  return info;
}

std::string StepIndexText(const StepIndex& index) {
  Json files = Json::array();
  for (const RankFileInfo& file : index.files) files.push_back(InfoJson(file));
  const Json json = {{"format", kFormatId},
                     {"position", index.position},
                     {"attempt", index.attempt},
                     {"counters", CountersJson(index.counters)},
                     {"memory", MemoryJson(index.memory)},
                     {"optimizer", index.optimizer ? OptimizerJson(*index.optimizer) : Json()},
                     {"files", std::move(files)}};
  return Dump(json);
}

Result<StepIndex> ParseStepIndex(std::string_view text) {
  JsonReader reader(text);
  StepIndex index;
  reader.Int(reader.Member(reader.root(), "format"), "format", 1, kFormatId);
  index.position = reader.Int(reader.root(), "position");
  index.attempt = reader.Int(reader.root(), "attempt");
  index.counters = ReadCounters(&reader, reader.Member(reader.root(), "counters"));
  index.memory = ReadMemory(&reader, reader.Member(reader.root(), "memory"));
  const Json& optimizer = reader.Member(reader.root(), "optimizer");
  if (!optimizer.is_null()) index.optimizer = ReadOptimizer(&reader, optimizer);
  for (const Json& file : reader.Array(reader.root(), "files")) {
    index.files.push_back(ReadInfo(&reader, file));
  }
  if (!reader.status().ok()) return reader.status();
  return index;
}

std::string CountersText(const Counters& counters) { return Dump(CountersJson(counters)); }

Result<Counters> ParseCounters(std::string_view text) {
  JsonReader reader(text);
  Counters counters = ReadCounters(&reader, reader.root());
  if (!reader.status().ok()) return reader.status();
  return counters;
}

std::string RankFileIndexText(const Layout& layout, int64_t position, int64_t attempt, int rank,
                              const std::vector<SlabId>& slabs) {
  std::map<int, Json> tables;  // per shard
  Json list = Json::array();
  for (const SlabId& id : slabs) {
    list.push_back({{"shard", id.shard}, {"kind", SlabKindName(id.kind)},
                    {"dataset", id.DatasetPath()}, {"pieces", SlabPieces(layout, id)}});
    Json& table = tables[id.shard];
    if (!table.is_null()) continue;
    table = Json::array();
    for (const Piece& piece : layout.pieces(id.shard)) {
      table.push_back({layout.tensors()[piece.tensor].name, piece.row_first, piece.row_last,
                       piece.col_first, piece.col_last});
    }
  }
  Json shards = Json::object();
  for (auto& [shard, table] : tables) shards[std::to_string(shard)] = std::move(table);
  const Json json = {{"format", kFormatId}, {"position", position}, {"attempt", attempt},
                     {"rank", rank}, {"slabs", std::move(list)}, {"shards", std::move(shards)}};
  return Dump(json);
}

}  // namespace retrace
