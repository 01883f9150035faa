// SafetensorsFile: reads tensors by name from one .safetensors file. Used by import, diff and tests.
// The header is validated whole on open (sizes, offsets, overlaps, duplicate names, trailing bytes);
// a load never casts silently: the caller names the type it wants. Immutable; thread-safe reads.
// Format: an 8-byte little-endian header length, a JSON header, then the data
// (github.com/huggingface/safetensors).
#ifndef RETRACE_FORMATS_SAFETENSORS_H_
#define RETRACE_FORMATS_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "formats/mapped_file.h"

namespace retrace {

enum class TensorType { kF64, kF32, kF16, kBf16, kI64, kI32, kI16, kI8, kU8, kBool };

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
  const std::string& path() const { return path_; }

  // The elements of a tensor. Errors: kUsage where there is none of that name (names the nearest);
  // kDamaged where its type is another. BF16 and F32 read as float; F64 as double.
  Result<std::vector<float>> ReadFloat(std::string_view name) const;
  Result<std::vector<double>> ReadDouble(std::string_view name) const;
  Result<std::vector<int32_t>> ReadInt32(std::string_view name) const;

 private:
  Result<const StoredTensor*> Find(std::string_view name) const;
  Status ParseHeader(std::string_view header, uint64_t data_first, uint64_t data_bytes);

  std::string path_;
  MappedFile file_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_SAFETENSORS_H_
