#include "formats/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace retrace {

Result<MappedFile> MappedFile::Open(const std::string& path) {
  MappedFile file;
  file.path_ = path;
  // O_NONBLOCK: opening a pipe by mistake must not wait for its writer.
  file.fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) {
    const std::string message = fmt::format("{}: can not be opened: {}", path, strerror(errno));
    return errno == ENOENT ? UsageError(message + "; check the path") : FailedError(message);
  }
  struct stat info;
  if (fstat(file.fd_, &info) != 0) {
    return FailedError(fmt::format("{}: fstat: {}", path, strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return DamagedError(fmt::format("{}: expected a regular file, got something else", path));
  }
  file.size_bytes_ = static_cast<uint64_t>(info.st_size);
  if (file.size_bytes_ == 0) return file;  // an empty file can not be mapped and needs no map
  void* map = mmap(nullptr, file.size_bytes_, PROT_READ, MAP_SHARED, file.fd_, 0);
  if (map == MAP_FAILED) {
    return FailedError(fmt::format("{}: mapping {} bytes: {}; free memory or raise ulimit -v", path,
                                   file.size_bytes_, strerror(errno)));
  }
  file.data_ = static_cast<const uint8_t*>(map);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  Close();
  path_ = std::move(other.path_);
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

MappedFile::~MappedFile() { Close(); }

void MappedFile::Close() {
  if (data_ != nullptr) munmap(const_cast<uint8_t*>(data_), size_bytes_);
  if (fd_ >= 0) close(fd_);
  data_ = nullptr;
  fd_ = -1;
}

Status MappedFile::CheckStillWhole() const {
  struct stat info;
  if (fstat(fd_, &info) != 0) {
    return FailedError(fmt::format("{}: fstat: {}", path_, strerror(errno)));
  }
  if (static_cast<uint64_t>(info.st_size) < size_bytes_) {
    return DamagedError(
        fmt::format("{}: was truncated while in use: expected {} bytes, got {}; restore the file "
                    "and start again",
                    path_, size_bytes_, info.st_size));
  }
  return {};
}

}  // namespace retrace
