#include "formats/spill_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace retrace {
namespace {

constexpr size_t kCallBytes = size_t{1} << 30;  // one system call moves no more than 2 GB

}  // namespace

Result<SpillFile> SpillFile::Create(const std::string& dir) {
  std::string pattern = dir + "/.retrace-spill-XXXXXX";
  const int fd = ::mkostemp(pattern.data(), O_CLOEXEC);
  if (fd < 0) return UsageError(dir + ": no file can be made here: " + std::strerror(errno));
  ::unlink(pattern.c_str());
  return SpillFile(fd, dir);
}

SpillFile::SpillFile(SpillFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_),
      dir_(std::move(other.dir_)) {}

SpillFile& SpillFile::operator=(SpillFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(dir_, other.dir_);
  return *this;
}

SpillFile::~SpillFile() {
  if (fd_ >= 0) ::close(fd_);
}

Result<uint64_t> SpillFile::Append(const void* data, size_t size_bytes) {
  const uint64_t begin = size_bytes_;
  const char* from = static_cast<const char*>(data);
  for (size_t done = 0; done < size_bytes;) {
    const ssize_t wrote = ::pwrite(fd_, from + done, std::min(size_bytes - done, kCallBytes),
                                   static_cast<off_t>(begin + done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      return FailedError(dir_ + ": a trace's tensors can not be kept here until it is written: " +
                         std::strerror(errno));
    }
    done += static_cast<size_t>(wrote);
  }
  size_bytes_ += size_bytes;
  return begin;
}

Result<std::string> SpillFile::Read(uint64_t offset_bytes, size_t size_bytes) const {
  std::string bytes(size_bytes, '\0');
  for (size_t done = 0; done < size_bytes;) {
    const ssize_t got = ::pread(fd_, bytes.data() + done, std::min(size_bytes - done, kCallBytes),
                                static_cast<off_t>(offset_bytes + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return FailedError(dir_ + ": a trace's tensors can not be read again");
    done += static_cast<size_t>(got);
  }
  return bytes;
}

}  // namespace retrace
