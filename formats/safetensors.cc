#include "formats/safetensors.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/nearest_name.h"
#include "formats/json_names.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kHeaderMax = 100'000'000;  // as the reference reader

struct TypeName {
  const char* name;
  TensorType type;
  uint64_t bytes;
};
constexpr TypeName kTypes[] = {{"F64", TensorType::kF64, 8}, {"F32", TensorType::kF32, 4},
                               {"F16", TensorType::kF16, 2}, {"BF16", TensorType::kBf16, 2},
                               {"I64", TensorType::kI64, 8}, {"I32", TensorType::kI32, 4},
                               {"I16", TensorType::kI16, 2}, {"I8", TensorType::kI8, 1},
                               {"U8", TensorType::kU8, 1},   {"BOOL", TensorType::kBool, 1}};

const TypeName* FindType(const std::string& name) {
  for (const TypeName& type : kTypes) {
    if (name == type.name) return &type;
  }
  return nullptr;
}

const TypeName& FindType(TensorType wanted) {
  for (const TypeName& type : kTypes) {
    if (type.type == wanted) return type;
  }
  RT_CHECK(!"a type of the list");
  return kTypes[0];
}

const char* NameOf(TensorType type) { return FindType(type).name; }

// Exact: every half is a float.
float FloatOfHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

Result<Json> ParseObject(std::string_view text) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) {
    return DamagedError("expected a JSON object as header, got something else");
  }
  if (const std::optional<std::string> twice = RepeatedName(text)) {
    return DamagedError("the header names '" + *twice + "' twice");
  }
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

Status ParseMetadata(const Json& entry, std::map<std::string, std::string>* metadata) {
  if (!entry.is_object()) return DamagedError("__metadata__: expected an object of texts");
  for (const auto& [name, text] : entry.items()) {
    if (!text.is_string()) {
      return DamagedError("__metadata__: '" + name + "': expected a text, got " + text.type_name());
    }
    (*metadata)[name] = text.get<std::string>();
  }
  return {};
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
    return DamagedError(
        fmt::format("data_offsets [{}, {}]: expected within [0, {}]", first, last, data_bytes));
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

const char* TensorTypeName(TensorType type) { return NameOf(type); }

uint64_t TensorTypeBytes(TensorType type) { return FindType(type).bytes; }

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
    return DamagedError(
        fmt::format("{}: not a safetensors file: header length {} in a file of {} bytes", path,
                    header_bytes, size));
  }
  const std::string_view header(reinterpret_cast<const char*>(file.file_.data()) + 8, header_bytes);
  const Status parsed = file.ParseHeader(header, 8 + header_bytes, size - 8 - header_bytes);
  if (!parsed.ok()) return parsed.Within(path);
  return file;
}

Status SafetensorsFile::ParseHeader(std::string_view header, uint64_t data_first,
                                    uint64_t data_bytes) {
  RT_ASSIGN_OR_RETURN(const Json json, ParseObject(header));
  std::map<uint64_t, uint64_t> extents;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") {
      RT_RETURN_IF_ERROR(ParseMetadata(entry, &metadata_));
      continue;
    }
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
    return DamagedError(
        fmt::format("{} bytes after the last tensor", data_first + data_bytes - next));
  }
  return {};
}

Result<const StoredTensor*> SafetensorsFile::Find(std::string_view name) const {
  const auto at = tensors_.find(name);
  if (at == tensors_.end()) {
    std::vector<std::string> names;
    for (const auto& [there, stored] : tensors_) names.push_back(there);
    return UsageError(fmt::format(
        "{}: there is no tensor '{}' among its {}{}", path_, name, names.size(),
        names.empty() ? "" : "; the nearest is '" + NearestName(std::string(name), names) + "'"));
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
  } else if (tensor->type == TensorType::kF16) {
    for (size_t i = 0; i < values.size(); ++i) {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * i, 2);
      values[i] = FloatOfHalf(bits);
    }
  } else {
    return DamagedError(fmt::format("{}: tensor '{}': expected F32, BF16 or F16, got {}", path_,
                                    name, NameOf(tensor->type)));
  }
  return values;
}

Result<std::vector<double>> SafetensorsFile::ReadDouble(std::string_view name) const {
  RT_ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  if (tensor->type != TensorType::kF64) {
    return DamagedError(
        fmt::format("{}: tensor '{}': expected F64, got {}", path_, name, NameOf(tensor->type)));
  }
  std::vector<double> values(tensor->numel());
  std::memcpy(values.data(), file_.data() + tensor->offset_bytes, tensor->size_bytes);
  return values;
}

Result<std::vector<int32_t>> SafetensorsFile::ReadInt32(std::string_view name) const {
  RT_ASSIGN_OR_RETURN(const StoredTensor* tensor, Find(name));
  if (tensor->type != TensorType::kI32) {
    return DamagedError(
        fmt::format("{}: tensor '{}': expected I32, got {}", path_, name, NameOf(tensor->type)));
  }
  std::vector<int32_t> values(tensor->numel());
  std::memcpy(values.data(), file_.data() + tensor->offset_bytes, tensor->size_bytes);
  return values;
}

}  // namespace retrace
