// TensorFile: the tensors of a file or a folder that diff compares with others: safetensors (one
// file, an index, a folder) or HDF5. Names of Megatron, and of the multimodal wrapper, become those
// of retrace. Holds what it read. Not thread-safe.
#ifndef RETRACE_CMD_TENSOR_FILE_H_
#define RETRACE_CMD_TENSOR_FILE_H_

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/hdf5_image.h"
#include "formats/safetensors.h"
#include "replay/state_diff.h"

namespace retrace {

class TensorFile {
 public:
  // Is this a file, or a folder with model.safetensors or its index?
  static bool IsOne(const std::string& path);
  // Errors: those of SafetensorsSet; kDamaged for HDF5 that can not be read.
  static Result<TensorFile> Open(const std::string& path);

  // "p", "m", "v" of an export; "p" of any other file.
  const std::set<std::string>& components() const { return components_; }
  // Megatron's: a layer without v_proj has unused rows for one there.
  bool has_fused_qkv() const { return has_fused_qkv_; }
  bool IsBf16(const std::string& name) const { return bf16_.contains(name); }

  // The tensors whose names match. They live as long as this object.
  // Errors: kUsage where none matches; kUnsupported for integers (the glob may leave them out).
  Result<std::vector<NamedTensor>> Read(const std::string& glob);

 private:
  Status OpenHdf5(const std::string& path);
  Status OpenSafetensors(const std::string& path);
  Result<NamedTensor> ReadStored(const std::string& name, const std::string& stored,
                                 const std::vector<std::pair<int64_t, int64_t>>& rows);

  struct Entry {
    std::string name, component, stored;
    std::vector<std::pair<int64_t, int64_t>> rows;
    const Hdf5Tensor* hdf5 = nullptr;
  };

  std::string path_;
  std::vector<Entry> entries_;
  std::set<std::string> components_, bf16_;
  bool has_fused_qkv_ = false;
  std::optional<SafetensorsSet> set_;
  std::vector<Hdf5Tensor> hdf5_;
  std::deque<std::vector<float>> floats_;
  std::deque<std::vector<double>> doubles_;
};

// "RUN@k" where `path` is the master file of a step of a run; else `path`.
std::string StateOfStepFile(const std::string& path);

}  // namespace retrace

#endif  // RETRACE_CMD_TENSOR_FILE_H_
