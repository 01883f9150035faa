#include "formats/trace_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "formats/json_names.h"
#include "formats/mapped_file.h"
#include "formats/pending_file.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kHeaderName[] = "retrace_trace";
constexpr char kOpsName[] = "retrace_ops";
constexpr std::string_view kLinesBegin = "{\"retrace_trace\"";
constexpr int64_t kNumelMax = int64_t{1} << 48;

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// `ops`: how many follow, so that a file that was cut is known.
Json HeaderJson(const TraceHeader& header, size_t ops) {
  return {{"format", 1},
          {"ops", ops},
          {"producer", header.producer},
          {"run", header.run},
          {"update", header.update},
          {"state", header.state},
          {"recorded", header.recorded},
          {"recipe", header.recipe}};
}

Json OpJson(const TraceOp& op) {
  const auto number = [](double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); };
  Json json = {{"op", op.name},
               {"shape", {op.rows, op.cols}},
               {"type", TensorTypeName(op.type)},
               {"l2", number(op.l2)},
               {"max", number(op.max)}};
  if (op.digest) json["xxh3"] = op.digest->Hex();
  return json;
}

// Fields that must be there, of their types.
template <class T>
Status Take(const Json& json, const char* field, bool (Json::*is)() const noexcept, T* value) {
  const auto found = json.find(field);
  if (found == json.end() || !((*found).*is)()) {
    return DamagedError(fmt::format("expected a field '{}' of another type, or at all", field));
  }
  *value = found->template get<T>();
  return {};
}

Result<TensorType> TypeOf(const std::string& name) {
  for (const TensorType type :
       {TensorType::kF64, TensorType::kF32, TensorType::kF16, TensorType::kBf16}) {
    if (name == TensorTypeName(type)) return type;
  }
  return DamagedError("expected type F64, F32, F16 or BF16, got '" + name + "'");
}

Result<TraceOp> ParseOp(const Json& json) {
  TraceOp op;
  if (!json.is_object()) return DamagedError("expected a JSON object");
  RT_RETURN_IF_ERROR(Take(json, "op", &Json::is_string, &op.name));
  const auto control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  if (std::any_of(op.name.begin(), op.name.end(), control)) {
    return DamagedError("an op's name has control characters");
  }
  const Json shape = json.value("shape", Json());
  const bool two = shape.is_array() && shape.size() == 2 && shape[0].is_number_integer() &&
                   shape[1].is_number_integer();
  if (!two) return DamagedError(op.name + ": expected a shape of two whole numbers");
  op.rows = shape[0].get<int64_t>();
  op.cols = shape[1].get<int64_t>();
  if (op.rows < 0 || op.cols < 0 || (op.cols > 0 && op.rows > kNumelMax / op.cols)) {
    return DamagedError(fmt::format("{}: a shape of {} rows and {} columns", op.name, op.rows,
                                    op.cols));
  }
  std::string type;
  RT_RETURN_IF_ERROR(Take(json, "type", &Json::is_string, &type).Within(op.name));
  RT_ASSIGN_OR_RETURN(op.type, TypeOf(type));
  if (json.contains("xxh3")) {
    std::string hex;
    RT_RETURN_IF_ERROR(Take(json, "xxh3", &Json::is_string, &hex).Within(op.name));
    RT_ASSIGN_OR_RETURN(op.digest, ParseDigest(hex));
  }
  const auto number = [&](const char* field) {
    const auto found = json.find(field);
    return found != json.end() && found->is_number() ? found->get<double>()
                                                     : std::numeric_limits<double>::quiet_NaN();
  };
  op.l2 = number("l2");
  op.max = number("max");
  return op;
}

}  // namespace

uint64_t TraceOp::size_bytes() const {
  return static_cast<uint64_t>(numel()) * TensorTypeBytes(type);
}

Status WriteTraceDigests(const std::string& path, const TraceHeader& header,
                         const std::vector<TraceOp>& ops) {
  std::string text = Dump({{kHeaderName, HeaderJson(header, ops.size())}}) + "\n";
  for (const TraceOp& op : ops) text += Dump(OpJson(op)) + "\n";
  return PublishFile(path, text);
}

Status WriteTraceTensors(const std::string& path, const TraceHeader& header,
                         const std::vector<TraceOp>& ops, std::vector<TensorSource> tensors) {
  Json list = Json::array();
  for (const TraceOp& op : ops) list.push_back(OpJson(op));
  return WriteSafetensors(path, tensors,
                          {{kHeaderName, Dump(HeaderJson(header, ops.size()))}, {kOpsName, Dump(list)}});
}

bool TraceFile::IsOne(const std::string& path) {
  const Result<MappedFile> file = MappedFile::Open(path);
  if (!file.ok()) return false;
  const std::string_view text(reinterpret_cast<const char*>(file->data()), file->size_bytes());
  if (text.starts_with(kLinesBegin)) return true;
  if (text.size() < 8 || text.substr(8, 1) != "{") return false;
  const Result<SafetensorsFile> tensors = SafetensorsFile::Open(path);
  return tensors.ok() && tensors->metadata().contains(kHeaderName);
}

Result<TraceFile> TraceFile::Open(const std::string& path) {
  TraceFile trace;
  trace.path_ = path;
  RT_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size_bytes());
  RT_RETURN_IF_ERROR(text.starts_with(kLinesBegin) ? trace.ReadLines() : trace.ReadSafetensors());
  if (trace.announced_ && *trace.announced_ != std::ssize(trace.ops_)) {
    return DamagedError(fmt::format("{}: expected {} ops, as its header says, got {}", path,
                                    *trace.announced_, trace.ops_.size()));
  }
  RT_RETURN_IF_ERROR(trace.CheckDigests());
  return trace;
}

const TraceOp* TraceFile::Find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &ops_[found->second];
}

bool TraceFile::HasTensor(const std::string& name) const {
  return file_ && file_->tensors().contains(name);
}

Status TraceFile::ParseHeader(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) return DamagedError(path_ + ": the trace's header is no JSON object");
  int64_t format = 0;
  RT_RETURN_IF_ERROR(Take(json, "format", &Json::is_number_integer, &format).Within(path_));
  if (format != 1) {
    return UnsupportedError(fmt::format("{}: a trace of format {}; this program reads 1", path_,
                                        format));
  }
  const std::pair<const char*, std::string*> texts[] = {{"producer", &header_.producer},
                                                        {"run", &header_.run},
                                                        {"state", &header_.state},
                                                        {"recorded", &header_.recorded},
                                                        {"recipe", &header_.recipe}};
  for (const auto& [field, value] : texts) {
    RT_RETURN_IF_ERROR(Take(json, field, &Json::is_string, value).Within(path_ + ": header"));
  }
  if (json.contains("ops")) {
    int64_t announced = 0;
    RT_RETURN_IF_ERROR(
        Take(json, "ops", &Json::is_number_integer, &announced).Within(path_ + ": header"));
    announced_ = announced;
  }
  return Take(json, "update", &Json::is_number_integer, &header_.update)
      .Within(path_ + ": header");
}

Status TraceFile::AddOp(std::string_view text, const std::string& where) {
  if (const auto twice = RepeatedName(text)) {
    return DamagedError(where + ": the field '" + *twice + "' stands there twice");
  }
  Result<TraceOp> op = ParseOp(Json::parse(text, nullptr, false));
  RT_RETURN_IF_ERROR(op.status().Within(where));
  if (!index_.emplace(op->name, ops_.size()).second) {
    return DamagedError(fmt::format("{}: the op '{}' stands there twice", where, op->name));
  }
  ops_.push_back(std::move(op).value());
  return {};
}

Status TraceFile::ReadLines() {
  RT_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path_));
  const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size_bytes());
  if (!text.ends_with('\n')) return DamagedError(path_ + ": the last line has no end");
  int64_t line = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    const std::string_view words = text.substr(at, end - at);
    at = end + 1;
    if (++line > 1) {
      RT_RETURN_IF_ERROR(AddOp(words, fmt::format("{}: line {}", path_, line)));
      continue;
    }
    const Json json = Json::parse(words, nullptr, false);
    if (!json.is_object()) return DamagedError(path_ + ": the first line is no JSON object");
    RT_RETURN_IF_ERROR(ParseHeader(Dump(json[kHeaderName])));
  }
  return {};
}

Status TraceFile::ReadSafetensors() {
  RT_ASSIGN_OR_RETURN(file_, SafetensorsFile::Open(path_));
  const auto header = file_->metadata().find(kHeaderName);
  if (header == file_->metadata().end()) {
    return UsageError(path_ + ": is no trace: its metadata have no '" + kHeaderName + "'");
  }
  RT_RETURN_IF_ERROR(ParseHeader(header->second));
  if (const auto listed = file_->metadata().find(kOpsName); listed != file_->metadata().end()) {
    const Json list = Json::parse(listed->second, nullptr, false);
    if (!list.is_array()) return DamagedError(path_ + ": '" + kOpsName + "' is no JSON array");
    for (const Json& op : list) RT_RETURN_IF_ERROR(AddOp(Dump(op), path_ + ": " + kOpsName));
  }
  std::vector<std::pair<uint64_t, std::string>> others;  // by place in the file
  for (const auto& [name, tensor] : file_->tensors()) {
    const int64_t cols = tensor.shape.empty() ? 1 : tensor.shape.back();
    if (const TraceOp* op = Find(name)) {
      if (op->cols == cols && op->numel() == tensor.numel() && op->type == tensor.type) continue;
      return DamagedError(fmt::format("{}: the tensor '{}' is not what the list of ops says", path_,
                                      name));
    }
    others.emplace_back(tensor.offset_bytes, name);
  }
  std::sort(others.begin(), others.end());
  for (const auto& [offset, name] : others) {
    const StoredTensor& tensor = file_->tensors().find(name)->second;
    RT_RETURN_IF_ERROR(TypeOf(TensorTypeName(tensor.type)).status().Within(path_ + ": " + name));
    TraceOp op;
    op.name = name;
    op.type = tensor.type;
    op.cols = tensor.shape.empty() ? 1 : tensor.shape.back();
    op.rows = op.cols == 0 ? 0 : tensor.numel() / op.cols;
    op.l2 = op.max = std::numeric_limits<double>::quiet_NaN();
    index_.emplace(name, ops_.size());
    ops_.push_back(std::move(op));
  }
  return {};
}

// Elements against the digests beside them.
Status TraceFile::CheckDigests() const {
  for (const TraceOp& op : ops_) {
    if (!op.digest || !HasTensor(op.name)) continue;
    Digest got;
    if (op.type == TensorType::kF64) {
      RT_ASSIGN_OR_RETURN(const std::vector<double> values, file_->ReadDouble(op.name));
      got = TensorDigest(values.data(), values.size() * sizeof(double));
    } else if (op.type == TensorType::kF32) {
      RT_ASSIGN_OR_RETURN(const std::vector<float> values, file_->ReadFloat(op.name));
      got = TensorDigest(values.data(), values.size() * sizeof(float));
    } else {
      continue;  // no digest is defined of other types
    }
    if (got == *op.digest) continue;
    return DamagedError(fmt::format("{}: {}: the elements have the digest {}, the list of ops says {}",
                                    path_, op.name, got.Hex(), op.digest->Hex()));
  }
  return {};
}

Result<std::vector<double>> TraceFile::Read(const TraceOp& op) const {
  if (!HasTensor(op.name)) {
    return UsageError(fmt::format("{}: has no elements of '{}': 'retrace trace --tensors' keeps them",
                                  path_, op.name));
  }
  if (op.type == TensorType::kF64) return file_->ReadDouble(op.name);
  RT_ASSIGN_OR_RETURN(const std::vector<float> values, file_->ReadFloat(op.name));
  return std::vector<double>(values.begin(), values.end());
}

}  // namespace retrace
