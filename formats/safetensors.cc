#include "formats/safetensors.h"

#include <bit>
#include <cstring>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace retrace {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kHeaderMax = 100'000'000;  // as the reference reader

struct TypeName {
  const char* name;
  TensorType type;
  uint64_t bytes;
};
constexpr TypeName kTypes[] = {
    {"F64", TensorType::kF64, 8}, {"F32", TensorType::kF32, 4},   {"F16", TensorType::kF16, 2},
    {"BF16", TensorType::kBf16, 2}, {"I64", TensorType::kI64, 8}, {"I32", TensorType::kI32, 4},
    {"I16", TensorType::kI16, 2}, {"I8", TensorType::kI8, 1},     {"U8", TensorType::kU8, 1},
    {"BOOL", TensorType::kBool, 1}};

const TypeName* FindType(const std::string& name) {
  for (const TypeName& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

const char* NameOf(TensorType wanted) {
  for (const TypeName& type : kTypes) {
    if (type.type == wanted) return type.name;
  }
  return "?";
}

// JSON allows a name twice and keeps the last; here that is damage.
Result<Json> ParseUnique(std::string_view text) {
  std::vector<std::set<std::string>> open;
  std::string twice;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key && !open.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  Json json = Json::parse(text, watch, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return DamagedError("expected a JSON object as header, got something else");
  }
  if (!twice.empty()) return DamagedError("the header names '" + twice + "' twice");
  return json;
}

// Elements of a shape, or nullopt on overflow or a bad entry.
std::optional<uint64_t> ElementsOf(const Json& shape, std::vector<int64_t>* out) {
  uint64_t elements = 1;
  for (const Json& entry : shape) {
    if (!entry.is_number_unsigned()) return std::nullopt;
    const uint64_t size = entry.get<uint64_t>();
    if (size > (uint64_t{1} << 48)) return std::nullopt;
    if (__builtin_mul_overflow(elements, size, &elements)) return std::nullopt;
    out->push_back(static_cast<int64_t>(size));
  }
  return elements;
}

Result<StoredTensor> ParseTensor(const Json& entry, uint64_t data_first, uint64_t data_bytes) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !entry.contains("shape") || !entry["shape"].is_array() || !entry.contains("data_offsets") ||
      !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2 ||
      !entry["data_offsets"][0].is_number_unsigned() ||
      !entry["data_offsets"][1].is_number_unsigned()) {
    return DamagedError("expected dtype, shape and data_offsets [first, last]");
  }
  const std::string dtype = entry["dtype"].get<std::string>();
  const TypeName* type = FindType(dtype);
  if (type == nullptr) return DamagedError("unknown dtype '" + dtype + "'");
  StoredTensor tensor;
  tensor.type = type->type;
  const std::optional<uint64_t> elements = ElementsOf(entry["shape"], &tensor.shape);
  if (!elements) return DamagedError("shape: expected sizes that fit into memory");
  const uint64_t first = entry["data_offsets"][0], last = entry["data_offsets"][1];
  if (first > last || last > data_bytes) {
    return DamagedError(fmt::format("data_offsets [{}, {}]: expected within [0, {}]", first, last,
                                    data_bytes));
  }
  uint64_t expected;
  if (__builtin_mul_overflow(*elements, type->bytes, &expected) || expected != last - first) {
    return DamagedError(fmt::format("data_offsets hold {} bytes, shape and dtype {} need {}",
                                    last - first, dtype, *elements * type->bytes));
  }
  tensor.offset_bytes = data_first + first;
  tensor.size_bytes = last - first;
  return tensor;
}

}  // namespace

int64_t StoredTensor::numel() const {
  int64_t elements = 1;
  for (int64_t size : shape) elements *= size;
  return elements;
}

Result<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  SafetensorsFile file;
  file.path_ = path;
  RT_ASSIGN_OR_RETURN(file.file_, MappedFile::Open(path));
  const uint64_t size = file.file_.size_bytes();
  uint64_t header_bytes = 0;
  if (size >= 8) std::memcpy(&header_bytes, file.file_.data(), 8);
  if (size < 8 || header_bytes > size - 8 || header_bytes > kHeaderMax) {
    return DamagedError(fmt::format(
        "{}: not a safetensors file: header length {} in a file of {} bytes", path, header_bytes,
        size));
  }
  const std::string_view header(reinterpret_cast<const char*>(file.file_.data()) + 8,
                                header_bytes);
  const Status parsed = file.ParseHeader(header, 8 + header_bytes, size - 8 - header_bytes);
  if (!parsed.ok()) return parsed.Within(path);
  return file;
}

Status SafetensorsFile::ParseHeader(std::string_view header, uint64_t data_first,
                                    uint64_t data_bytes) {
  RT_ASSIGN_OR_RETURN(const Json json, ParseUnique(header));
  std::map<uint64_t, uint64_t> extents;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") continue;
    Result<StoredTensor> tensor = ParseTensor(entry, data_first, data_bytes);
    if (!tensor.ok()) return tensor.status().Within("tensor '" + name + "'");
    if (tensor->size_bytes > 0) {
      if (extents.contains(tensor->offset_bytes)) {
        return DamagedError("tensor '" + name + "' shares its bytes with another");
      }
      extents[tensor->offset_bytes] = tensor->size_bytes;
    }
    tensors_.emplace(name, *std::move(tensor));
  }
  uint64_t next = data_first;
  for (const auto& [offset, bytes] : extents) {
    if (offset != next) {
      return DamagedError(fmt::format("expected data without gaps or overlaps, but byte {} is {}",
                                      next, offset > next ? "unused" : "used twice"));
    }
    next = offset + bytes;
  }
  if (next != data_first + data_bytes) {
    return DamagedError(fmt::format("{} bytes after the last tensor",
                                    data_first + data_bytes - next));
  }
  return {};
}

Result<const StoredTensor*> SafetensorsFile::Find(std::string_view name) const {
  const auto at = tensors_.find(name);
  if (at == tensors_.end()) {
    return UsageError(fmt::format("{}: there is no tensor '{}' among its {}", path_, name,
                                  tensors_.size()));
  }
  RT_RETURN_IF_ERROR(file_.CheckStillWhole());
  return &at->second;
}

Result<std::vector<float>> SafetensorsFile::ReadFloat(std::string_view name) const {
  RT_ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  const uint8_t* data = file_.data() + tensor->offset_bytes;
  std::vector<float> values(tensor->numel());
  if (tensor->type == TensorType::kF32) {
    std::memcpy(values.data(), data, tensor->size_bytes);
  } else if (tensor->type == TensorType::kBf16) {
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, 2);
      values[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
  } else {
    return DamagedError(fmt::format("{}: tensor '{}': expected F32 or BF16, got {}", path_, name,
                                    NameOf(tensor->type)));
  }
  return values;
}

Result<std::vector<double>> SafetensorsFile::ReadDouble(std::string_view name) const {
  RT_ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  if (tensor->type != TensorType::kF64) {
    return DamagedError(fmt::format("{}: tensor '{}': expected F64, got {}", path_, name,
                                    NameOf(tensor->type)));
  }
  std::vector<double> values(tensor->numel());
  std::memcpy(values.data(), file_.data() + tensor->offset_bytes, tensor->size_bytes);
  return values;
}

Result<std::vector<int32_t>> SafetensorsFile::ReadInt32(std::string_view name) const {
  RT_ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  if (tensor->type != TensorType::kI32) {
    return DamagedError(fmt::format("{}: tensor '{}': expected I32, got {}", path_, name,
                                    NameOf(tensor->type)));
  }
  std::vector<int32_t> values(tensor->numel());
  std::memcpy(values.data(), file_.data() + tensor->offset_bytes, tensor->size_bytes);
  return values;
}

}  // namespace retrace
