// Safetensors files. Used by export, import, trace, diff and tests.
//
// SafetensorsFile reads tensors by name from one file, SafetensorsSet from a model that may be
// split over several. A header is validated whole on open (sizes, offsets, overlaps, duplicate
// names, trailing bytes); a load never rounds: the caller names the type it wants. Immutable;
// thread-safe reads. Writers make files appear whole or not at all. Format: an 8-byte little-endian
// header length, a JSON header, then the data (github.com/huggingface/safetensors).
#ifndef RETRACE_FORMATS_SAFETENSORS_H_
#define RETRACE_FORMATS_SAFETENSORS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "core/tensor_view.h"
#include "formats/mapped_file.h"

namespace retrace {

enum class TensorType { kF64, kF32, kF16, kBf16, kI64, kI32, kI16, kI8, kU8, kBool };
const char* TensorTypeName(TensorType type);  // "F64", ...
uint64_t TensorTypeBytes(TensorType type);

struct StoredTensor {
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  uint64_t offset_bytes = 0;  // in the file
  uint64_t size_bytes = 0;

  int64_t numel() const;
};

class SafetensorsFile {
 public:
  // Errors: kUsage where the file can not be opened; kDamaged where it is not what it says.
  static Result<SafetensorsFile> Open(const std::string& path);

  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }
  // "__metadata__": texts by name.
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }
  // The bytes of one of tensors(). The caller has checked, by reading it, that the file is whole.
  const uint8_t* Data(const StoredTensor& tensor) const {
    return file_.data() + tensor.offset_bytes;
  }

  // The elements of a tensor. Errors: kUsage where there is none of that name (names the nearest);
  // kDamaged where its type is another. F32, BF16 and F16 read as float, F64 as double.
  Result<std::vector<float>> ReadFloat(std::string_view name) const;
  Result<std::vector<double>> ReadDouble(std::string_view name) const;
  Result<std::vector<int32_t>> ReadInt32(std::string_view name) const;

 private:
  Result<const StoredTensor*> Find(std::string_view name) const;
  Status ParseHeader(std::string_view header, uint64_t data_first, uint64_t data_bytes);

  std::string path_;
  MappedFile file_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::map<std::string, std::string> metadata_;
};

// A model's tensors: one file, or the files that an index lists.
class SafetensorsSet {
 public:
  // `path`: a .safetensors file, an index (STEM.safetensors.index.json), or a folder that holds
  // STEM.safetensors or that index. Errors: kUsage where there is none of them; kDamaged where a
  // file, or the index, is not what it says.
  static Result<SafetensorsSet> Open(const std::string& path, const std::string& stem = "model");

  struct Member {
    const SafetensorsFile* file = nullptr;
    const StoredTensor* tensor = nullptr;
  };
  const std::map<std::string, Member, std::less<>>& tensors() const { return tensors_; }
  const std::vector<std::unique_ptr<SafetensorsFile>>& files() const { return files_; }

  // As SafetensorsFile::ReadFloat; also of F64 elements that are floats. Errors: kUnsupported where
  // one is not.
  Result<std::vector<float>> ReadExactFloat(std::string_view name) const;

 private:
  Status AddFile(const std::string& path);
  Status OpenIndexed(const std::string& index_path);

  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, Member, std::less<>> tensors_;
};

// A tensor to be written.
struct TensorSource {
  using Sink = std::function<Status(const void* data, size_t size_bytes)>;

  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  // Gives all elements, in order, to the sink; called once.
  std::function<Status(const Sink& sink)> elements;

  uint64_t size_bytes() const;
};

// The elements of a view, which outlive the source.
TensorSource SourceOf(std::string name, std::vector<int64_t> shape, const TensorView& view);

// Errors: kFailed where the file can not be written; those of the sources.
Status WriteSafetensors(const std::string& path, const std::vector<TensorSource>& tensors,
                        const std::map<std::string, std::string>& metadata);

// DIR/STEM.safetensors or, where the tensors have more bytes than file_bytes_max, files
// STEM-00001-of-0000N.safetensors with STEM.safetensors.index.json, as Hugging Face's readers
// expect them. -> names of the files written.
Result<std::vector<std::string>> WriteSafetensorsSet(
    const std::string& dir, const std::string& stem, const std::vector<TensorSource>& tensors,
    const std::map<std::string, std::string>& metadata, uint64_t file_bytes_max);

}  // namespace retrace

#endif  // RETRACE_FORMATS_SAFETENSORS_H_
