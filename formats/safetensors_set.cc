#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/nearest_name.h"
#include "formats/file_ops.h"
#include "formats/json_names.h"
#include "formats/safetensors.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

constexpr char kSuffix[] = ".safetensors";
constexpr char kIndexSuffix[] = ".safetensors.index.json";
constexpr int64_t kIndexBytesMax = 100'000'000;

struct WeightMap {
  std::set<std::string> files;
  std::map<std::string, std::string> file_of;  // by tensor
};

Result<WeightMap> ParseIndex(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object() || !json.contains("weight_map") ||
      !json["weight_map"].is_object()) {
    return DamagedError("expected a JSON object with weight_map, got something else");
  }
  if (const std::optional<std::string> twice = RepeatedName(text)) {
    return DamagedError("it names '" + *twice + "' twice");
  }
  WeightMap map;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string())
      return DamagedError("weight_map: '" + tensor + "': expected a file name");
    const std::string name = file.get<std::string>();
    if (name.find('/') != std::string::npos || !name.ends_with(kSuffix)) {
      return DamagedError("weight_map: '" + tensor + "' is in '" + name +
                          "': expected the name of a .safetensors file of the same folder");
    }
    map.files.insert(name);
    map.file_of[tensor] = name;
  }
  return map;
}

}  // namespace

Result<SafetensorsSet> SafetensorsSet::Open(const std::string& path, const std::string& stem) {
  SafetensorsSet set;
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    const std::string whole = path + "/" + stem + kSuffix, index = path + "/" + stem + kIndexSuffix;
    const bool has_whole = std::filesystem::exists(whole, error);
    const bool has_index = std::filesystem::exists(index, error);
    if (has_whole && has_index) {
      return DamagedError(fmt::format("{}: it has both {}{} and {}{}; expected one of them", path,
                                      stem, kSuffix, stem, kIndexSuffix));
    }
    if (!has_whole && !has_index) {
      return UsageError(fmt::format("{}: expected {}{} or {}{} in this folder", path, stem, kSuffix,
                                    stem, kIndexSuffix));
    }
    RT_RETURN_IF_ERROR(has_whole ? set.AddFile(whole) : set.OpenIndexed(index));
    return set;
  }
  RT_RETURN_IF_ERROR(path.ends_with(".json") ? set.OpenIndexed(path) : set.AddFile(path));
  return set;
}

Status SafetensorsSet::AddFile(const std::string& path) {
  RT_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  files_.push_back(std::make_unique<SafetensorsFile>(std::move(file)));
  for (const auto& [name, tensor] : files_.back()->tensors()) {
    const auto [at, fresh] = tensors_.emplace(name, Member{files_.back().get(), &tensor});
    if (!fresh) {
      return DamagedError(
          fmt::format("tensor '{}' is in both {} and {}", name, at->second.file->path(), path));
    }
  }
  return {};
}

Status SafetensorsSet::OpenIndexed(const std::string& index_path) {
  const FileOps ops;
  if (const int64_t size = ops.Size(index_path); size < 0 || size > kIndexBytesMax) {
    return size < 0 ? UsageError(index_path + ": there is no such file")
                    : DamagedError(fmt::format("{}: {} bytes are no index", index_path, size));
  }
  RT_ASSIGN_OR_RETURN(const Bytes text, ops.Read(index_path));
  Result<WeightMap> map = ParseIndex(text.view());
  if (!map.ok()) return map.status().Within(index_path);
  const std::string folder = std::filesystem::path(index_path).parent_path();
  for (const std::string& name : map->files) {
    const std::string file = folder.empty() ? name : folder + "/" + name;
    RT_RETURN_IF_ERROR(AddFile(file).Within(index_path));
  }
  for (const auto& [tensor, file] : map->file_of) {
    const auto at = tensors_.find(tensor);
    if (at == tensors_.end() ||
        std::filesystem::path(at->second.file->path()).filename().string() != file) {
      return DamagedError(fmt::format("{}: expected tensor '{}' in {}, it is {}", index_path,
                                      tensor, file,
                                      at == tensors_.end() ? "in no file" : "in another"));
    }
  }
  for (const auto& [tensor, member] : tensors_) {
    if (map->file_of.contains(tensor)) continue;
    return DamagedError(fmt::format("{}: tensor '{}' of {} is not in the index", index_path, tensor,
                                    member.file->path()));
  }
  return {};
}

Result<std::vector<float>> SafetensorsSet::ReadExactFloat(std::string_view name) const {
  const auto at = tensors_.find(name);
  if (at == tensors_.end()) {
    std::vector<std::string> names;
    for (const auto& [there, member] : tensors_) names.push_back(there);
    return UsageError(fmt::format(
        "there is no tensor '{}'{}", name,
        names.empty() ? "" : "; the nearest is '" + NearestName(std::string(name), names) + "'"));
  }
  const SafetensorsFile& file = *at->second.file;
  if (at->second.tensor->type != TensorType::kF64) return file.ReadFloat(name);
  RT_ASSIGN_OR_RETURN(const std::vector<double> values, file.ReadDouble(name));
  std::vector<float> floats(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    floats[i] = static_cast<float>(values[i]);
    if (static_cast<double>(floats[i]) == values[i] || values[i] != values[i]) continue;
    return UnsupportedError(fmt::format(
        "{}: tensor '{}': element {} = {} is no FP32 number, and nothing is rounded silently; "
        "convert the file to F32 first",
        file.path(), name, i, values[i]));
  }
  return floats;
}

}  // namespace retrace
