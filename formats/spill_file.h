// SpillFile: bytes of one process that are too many for its memory, read again later by the same
// process. The file has no name: it is gone with the process, however that ends. Used by traces.
// Not thread-safe.
#ifndef RETRACE_FORMATS_SPILL_FILE_H_
#define RETRACE_FORMATS_SPILL_FILE_H_

#include <cstdint>
#include <string>

#include "core/status.h"

namespace retrace {

class SpillFile {
 public:
  // In a directory. Errors: kUsage where no file can be made there.
  static Result<SpillFile> Create(const std::string& dir);
  SpillFile(SpillFile&& other) noexcept;
  SpillFile& operator=(SpillFile&& other) noexcept;
  ~SpillFile();

  // -> where they are. Errors: kFailed with the system's reason.
  Result<uint64_t> Append(const void* data, size_t size_bytes);
  Result<std::string> Read(uint64_t offset_bytes, size_t size_bytes) const;

 private:
  SpillFile(int fd, std::string dir) : fd_(fd), dir_(std::move(dir)) {}

  int fd_ = -1;
  uint64_t size_bytes_ = 0;
  std::string dir_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_SPILL_FILE_H_
