// MappedFile: a file mapped into memory for reading, whole. Used by formats/indexed_dataset.
// Invariants: the bytes [data, data + size_bytes) are those of the file as it was when opened,
// unless another program writes into it. A replaced (renamed over) file does no harm: the map keeps
// the old one.
// A file that another program *truncates* under a map kills whoever touches the lost pages
// (SIGBUS): call CheckStillWhole() before each use and the access is refused instead. A window of
// about a microsecond remains between the check and the access. It is accepted: only a signal
// handler, which a library must not install, or reading instead of mapping would close it.
// Thread-safety: const after Open.
#ifndef RETRACE_FORMATS_MAPPED_FILE_H_
#define RETRACE_FORMATS_MAPPED_FILE_H_

#include <cstdint>
#include <string>

#include "core/status.h"

namespace retrace {

class MappedFile {
 public:
  // Errors: kUsage where there is no such file, kDamaged where it is not a regular file, else
  // kFailed.
  static Result<MappedFile> Open(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  const uint8_t* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

  // kDamaged where the file has become shorter than it was when opened.
  Status CheckStillWhole() const;

 private:
  void Close();

  std::string path_;
  const uint8_t* data_ = nullptr;
  uint64_t size_bytes_ = 0;
  int fd_ = -1;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_MAPPED_FILE_H_
