#include "cmd/tensor_file.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <map>

#include "cmd/opened_run.h"
#include "formats/file_ops.h"
#include "formats/megatron_names.h"
#include "formats/run_dir.h"
#include "surgery/intervention.h"

namespace retrace {
namespace {

constexpr char kWrapperPrefix[] = "model.language_model.";
constexpr int kTrySeconds = 600;

bool IsHdf5(const std::string& path) { return path.ends_with(".h5") || path.ends_with(".hdf5"); }

// HDF5 itself may crash or hang on a damaged file: tried in a process that may.
Status TryHdf5(const Bytes& bytes, const std::string& path) {
  const pid_t child = fork();
  if (child < 0) return FailedError(path + ": no process to read it in can be started");
  if (child == 0) {
    for (int signal_number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE}) signal(signal_number, SIG_DFL);
    alarm(kTrySeconds);
    _exit(ReadHdf5Tensors(bytes.view(), path).ok() ? 0 : 1);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status)) return {};  // an error comes again, with its message
  return DamagedError(path + ": HDF5 crashes on this file: it is damaged");
}

std::map<std::string, std::vector<int64_t>> ShapesOf(const SafetensorsSet& set) {
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const auto& [name, member] : set.tensors()) shapes[name] = member.tensor->shape;
  return shapes;
}

// The listed rows of a matrix, or all of it.
template <class T>
std::vector<T> RowsOf(std::vector<T> whole, int64_t cols,
                      const std::vector<std::pair<int64_t, int64_t>>& rows) {
  if (rows.empty()) return whole;
  std::vector<T> part;
  for (const auto& [first, last] : rows) {
    part.insert(part.end(), whole.begin() + first * cols, whole.begin() + last * cols);
  }
  return part;
}

}  // namespace

bool TensorFile::IsOne(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_regular_file(path, error)) return true;
  return std::filesystem::exists(path + "/model.safetensors", error) ||
         std::filesystem::exists(path + "/model.safetensors.index.json", error);
}

Result<TensorFile> TensorFile::Open(const std::string& path) {
  TensorFile file;
  file.path_ = path;
  RT_RETURN_IF_ERROR(IsHdf5(path) ? file.OpenHdf5(path) : file.OpenSafetensors(path));
  for (const Entry& entry : file.entries_) file.components_.insert(entry.component);
  return file;
}

Status TensorFile::OpenHdf5(const std::string& path) {
  RT_ASSIGN_OR_RETURN(const Bytes bytes, FileOps().Read(path));
  RT_RETURN_IF_ERROR(TryHdf5(bytes, path));
  RT_ASSIGN_OR_RETURN(hdf5_, ReadHdf5Tensors(bytes.view(), path));
  for (const Hdf5Tensor& tensor : hdf5_) {
    Entry entry{
        .name = tensor.path, .component = "p", .stored = tensor.path, .rows = {}, .hdf5 = &tensor};
    for (const char* component : {"p", "m", "v", "g"}) {
      if (!tensor.path.starts_with(std::string(component) + "/")) continue;
      entry.component = component;
      entry.name = tensor.path.substr(2);
    }
    entries_.push_back(std::move(entry));
  }
  return {};
}

Status TensorFile::OpenSafetensors(const std::string& path) {
  RT_ASSIGN_OR_RETURN(set_, SafetensorsSet::Open(path));
  const auto shapes = ShapesOf(*set_);
  if (HasMegatronNames(shapes)) {
    Result<std::vector<MegatronTensor>> split = SplitMegatronTensors(shapes);
    RT_RETURN_IF_ERROR(split.status().Within(path));
    has_fused_qkv_ = true;
    for (MegatronTensor& tensor : *split) {
      entries_.push_back({tensor.name, "p", tensor.stored, std::move(tensor.rows), nullptr});
    }
    return {};
  }
  for (const auto& [name, shape] : shapes) {
    const bool wrapped = name.starts_with(kWrapperPrefix);
    entries_.push_back({wrapped ? "model." + name.substr(sizeof kWrapperPrefix - 1) : name,
                        "p",
                        name,
                        {},
                        nullptr});
  }
  return {};
}

Result<NamedTensor> TensorFile::ReadStored(const std::string& name, const std::string& stored,
                                           const std::vector<std::pair<int64_t, int64_t>>& rows) {
  const SafetensorsSet::Member& member = set_->tensors().find(stored)->second;
  NamedTensor tensor{.name = name,
                     .component = "p",
                     .shape = member.tensor->shape,
                     .view = {},
                     .known_equal = false,
                     .doubles = {}};
  const int64_t cols = tensor.shape.empty() ? 1 : tensor.shape.back();
  if (!rows.empty()) {
    tensor.shape[0] = 0;
    for (const auto& [first, last] : rows) tensor.shape[0] += last - first;
  }
  switch (member.tensor->type) {
    case TensorType::kF64: {
      RT_ASSIGN_OR_RETURN(std::vector<double> values, member.file->ReadDouble(stored));
      doubles_.push_back(RowsOf(std::move(values), cols, rows));
      tensor.doubles = doubles_.back();
      return tensor;
    }
    case TensorType::kBf16:
      bf16_.insert(name);
      [[fallthrough]];
    case TensorType::kF32:
    case TensorType::kF16: {
      RT_ASSIGN_OR_RETURN(std::vector<float> values, member.file->ReadFloat(stored));
      floats_.push_back(RowsOf(std::move(values), cols, rows));
      const int64_t count = std::ssize(floats_.back());
      tensor.view = TensorView(cols == 0 ? 0 : count / cols, cols, floats_.back().data());
      return tensor;
    }
    default:
      return UnsupportedError(
          fmt::format("{}: tensor '{}' is {}; diff compares F64, F32, BF16 and "
                      "F16 (--only leaves others out)",
                      path_, stored, TensorTypeName(member.tensor->type)));
  }
}

Result<std::vector<NamedTensor>> TensorFile::Read(const std::string& glob) {
  std::vector<std::string> names;
  for (const Entry& entry : entries_) names.push_back(entry.name);
  RT_RETURN_IF_ERROR(CheckGlob(names, glob, path_));
  std::vector<NamedTensor> tensors;
  for (const Entry& entry : entries_) {
    if (!GlobMatches(glob, entry.name)) continue;
    if (entry.hdf5 == nullptr) {
      RT_ASSIGN_OR_RETURN(NamedTensor tensor, ReadStored(entry.name, entry.stored, entry.rows));
      tensors.push_back(std::move(tensor));
      continue;
    }
    const Hdf5Tensor& stored = *entry.hdf5;
    NamedTensor tensor{.name = entry.name,
                       .component = entry.component,
                       .shape = stored.shape,
                       .view = {},
                       .known_equal = false,
                       .doubles = stored.doubles};
    const int64_t cols = stored.shape.empty() ? 1 : stored.shape.back();
    const int64_t count = std::ssize(stored.floats);
    tensor.view = TensorView(cols == 0 ? 0 : count / cols, cols, stored.floats.data());
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::string StateOfStepFile(const std::string& path) {
  const std::filesystem::path file(path);
  StepFileName name;
  if (!ParseStepFileName(file.filename().string(), &name) || name.rank >= 0 || name.temporary ||
      file.parent_path().filename() != kStepsName) {
    return path;
  }
  const std::filesystem::path run = file.parent_path().parent_path();
  std::error_code error;
  if (!std::filesystem::exists(run / kLedgerName, error)) return path;
  return fmt::format("{}@{}", run.string(), name.position);
}

}  // namespace retrace
