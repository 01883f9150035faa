#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "formats/pending_file.h"
#include "formats/safetensors.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kAlignment = 8;  // of the data, as the reference writer has it

std::string HeaderText(const std::vector<TensorSource>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  Json json = Json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorSource& tensor : tensors) {
    json[tensor.name] = {{"dtype", TensorTypeName(tensor.type)},
                         {"shape", tensor.shape},
                         {"data_offsets", {offset, offset + tensor.size_bytes()}}};
    offset += tensor.size_bytes();
  }
  std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  return text;
}

Status WriteTensor(const TensorSource& tensor, PendingFile* file) {
  uint64_t written = 0;
  RT_RETURN_IF_ERROR(tensor.elements([&](const void* data, size_t size_bytes) {
    written += size_bytes;
    return file->Write(data, size_bytes);
  }));
  RT_CHECK_EQ(tensor.size_bytes(), written);
  return {};
}

}  // namespace

uint64_t TensorSource::size_bytes() const {
  uint64_t size = TensorTypeBytes(type);
  for (int64_t extent : shape) size *= static_cast<uint64_t>(extent);
  return size;
}

TensorSource SourceOf(std::string name, std::vector<int64_t> shape, const TensorView& view) {
  return {std::move(name), TensorType::kF32, std::move(shape),
          [view](const TensorSource::Sink& sink) -> Status {
            for (int64_t at = 0; at < view.numel();) {
              const std::span<const float> run = view.From(at);
              RT_RETURN_IF_ERROR(sink(run.data(), run.size_bytes()));
              at += std::ssize(run);
            }
            return {};
          }};
}

Status WriteSafetensors(const std::string& path, const std::vector<TensorSource>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  const std::string header = HeaderText(tensors, metadata);
  const uint64_t header_bytes = header.size();
  RT_ASSIGN_OR_RETURN(PendingFile file, PendingFile::Create(path));
  RT_RETURN_IF_ERROR(file.Write(&header_bytes, sizeof header_bytes));
  RT_RETURN_IF_ERROR(file.Write(header.data(), header.size()));
  for (const TensorSource& tensor : tensors) RT_RETURN_IF_ERROR(WriteTensor(tensor, &file));
  RT_RETURN_IF_ERROR(file.Sync());
  return file.Publish();
}

Result<std::vector<std::string>> WriteSafetensorsSet(
    const std::string& dir, const std::string& stem, const std::vector<TensorSource>& tensors,
    const std::map<std::string, std::string>& metadata, uint64_t file_bytes_max) {
  std::vector<std::vector<TensorSource>> files(1);
  uint64_t total = 0, in_file = 0;
  for (const TensorSource& tensor : tensors) {
    const uint64_t size = tensor.size_bytes();
    if (!files.back().empty() && in_file + size > file_bytes_max) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().push_back(tensor);
    in_file += size;
    total += size;
  }
  std::vector<std::string> names;
  Json weight_map = Json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    names.push_back(files.size() == 1
                        ? stem + ".safetensors"
                        : fmt::format("{}-{:05}-of-{:05}.safetensors", stem, i + 1, files.size()));
    for (const TensorSource& tensor : files[i]) weight_map[tensor.name] = names[i];
    RT_RETURN_IF_ERROR(WriteSafetensors(dir + "/" + names[i], files[i], metadata));
  }
  if (files.size() == 1) return names;
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  names.push_back(stem + ".safetensors.index.json");
  RT_RETURN_IF_ERROR(PublishFile(dir + "/" + names.back(), index.dump(2) + "\n"));
  return names;
}

}  // namespace retrace
