#include "formats/pending_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "formats/mapped_file.h"

namespace retrace {
namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;

Status SystemError(const std::string& path, const char* call) {
  return FailedError(fmt::format("{}: {}: {}", path, call, strerror(errno)));
}

Status SyncFolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return SystemError(folder, "open");
  const bool good = fsync(fd) == 0;
  const Status status = good ? Status() : SystemError(folder, "fsync");
  close(fd);
  return status;
}

// Whether `fd` is still the file called `path`. Between our open and our lock its former owner may
// have published it: then the inode we hold is NAME itself, and writing would destroy it.
bool IsFileAt(int fd, const std::string& path) {
  struct stat ours, there;
  return fstat(fd, &ours) == 0 && stat(path.c_str(), &there) == 0 && ours.st_ino == there.st_ino &&
         ours.st_dev == there.st_dev;
}

}  // namespace

Result<PendingFile> PendingFile::Create(const std::string& path) {
  PendingFile file;
  file.path_ = path;
  const std::string partial = path + ".partial";
  const int fd = open(partial.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd < 0) {
    return FailedError(
        fmt::format("{}: can not be created: {}; check that the folder exists and is "
                    "writable",
                    partial, strerror(errno)));
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 || !IsFileAt(fd, partial)) {
    close(fd);
    return FailedError(
        fmt::format("{}: another program is writing this file; wait for it, or "
                    "choose another name",
                    partial));
  }
  file.fd_ = fd;
  file.partial_path_ = partial;
  if (ftruncate(fd, 0) != 0) return SystemError(partial, "ftruncate");
  return file;
}

PendingFile::PendingFile(PendingFile&& other) noexcept
    : path_(std::move(other.path_)),
      partial_path_(std::exchange(other.partial_path_, std::string())),
      fd_(std::exchange(other.fd_, -1)),
      size_bytes_(other.size_bytes_),
      buffer_(std::move(other.buffer_)) {}

PendingFile::~PendingFile() {
  if (!partial_path_.empty()) unlink(partial_path_.c_str());
  if (fd_ >= 0) close(fd_);
}

Status PendingFile::Write(const void* data, size_t size_bytes) {
  const char* bytes = static_cast<const char*>(data);
  size_bytes_ += size_bytes;
  while (size_bytes > 0) {
    const size_t take = std::min(size_bytes, kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), bytes, bytes + take);
    bytes += take;
    size_bytes -= take;
    if (buffer_.size() == kBufferBytes) RT_RETURN_IF_ERROR(Flush());
  }
  return {};
}

Status PendingFile::Flush() {
  size_t at = 0;
  while (at < buffer_.size()) {
    const ssize_t written = write(fd_, buffer_.data() + at, buffer_.size() - at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      return FailedError(
          fmt::format("{}: writing failed: {}; free some space and run the command "
                      "again",
                      partial_path_, strerror(errno)));
    }
    at += static_cast<size_t>(written);
  }
  buffer_.clear();
  return {};
}

Status PendingFile::Sync() {
  RT_RETURN_IF_ERROR(Flush());
  if (fsync(fd_) != 0) return SystemError(partial_path_, "fsync");
  return {};
}

Result<bool> PendingFile::SameAsPublished() const {
  if (!FileExists(path_)) return false;
  RT_ASSIGN_OR_RETURN(const MappedFile published, MappedFile::Open(path_));
  if (published.size_bytes() != size_bytes_) return false;
  std::vector<char> block(kBufferBytes);
  for (uint64_t at = 0; at < size_bytes_;) {
    const size_t want = std::min<uint64_t>(block.size(), size_bytes_ - at);
    const ssize_t got = pread(fd_, block.data(), want, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return SystemError(partial_path_, "pread");
    RT_RETURN_IF_ERROR(published.CheckStillWhole());
    if (std::memcmp(block.data(), published.data() + at, static_cast<size_t>(got)) != 0)
      return false;
    at += static_cast<uint64_t>(got);
  }
  return true;
}

Status PendingFile::Publish() {
  RT_CHECK(buffer_.empty());
  if (rename(partial_path_.c_str(), path_.c_str()) != 0) return SystemError(path_, "rename");
  partial_path_.clear();
  return SyncFolderOf(path_);
}

Status PublishFile(const std::string& path, std::string_view bytes) {
  RT_ASSIGN_OR_RETURN(PendingFile file, PendingFile::Create(path));
  RT_RETURN_IF_ERROR(file.Write(bytes.data(), bytes.size()));
  RT_RETURN_IF_ERROR(file.Sync());
  return file.Publish();
}

Status RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) != 0) {
    if (errno == ENOENT) return {};
    return SystemError(path, "unlink");
  }
  return SyncFolderOf(path);
}

bool FileExists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

}  // namespace retrace
