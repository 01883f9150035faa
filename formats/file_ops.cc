#include "formats/file_ops.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/huge_pages.h"
#include "formats/parallel_work.h"

namespace retrace {
namespace {

// Opening a pipe by mistake must not wait for its other end; nothing else notices the flag.
constexpr int kOpenFlags = O_CLOEXEC | O_NONBLOCK;
constexpr unsigned kRenameNoReplace = 1;  // RENAME_NOREPLACE, without _GNU_SOURCE's headers

const char* Advice(int error) {
  switch (error) {
    case ENOSPC: return "; free some space on this file system, then try again";
    case EDQUOT: return "; the quota is used up: free some space, then try again";
    case EROFS:
    case EACCES:
    case EPERM: return "; the run can be read here, but not written";
    default: return "";
  }
}

Status SystemError(const std::string& path, const char* what, int error) {
  return FailedError(path + ": " + what + ": " + std::strerror(error) + Advice(error));
}

FileFault Ask(FileFaults* faults, FileOp op, const std::string& path, const std::string& to = "") {
  return faults == nullptr ? FileFault{} : faults->Before(op, path, to);
}

// One system call, again where a signal interrupted it. -> 0 or errno.
template <class Call>
int Try(Call call) {
  while (call() < 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int WriteAll(int fd, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t n = ::write(fd, data, std::min(size, size_t{1} << 26));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n == 0 ? EIO : errno;
    data += n;
    size -= static_cast<size_t>(n);
  }
  return 0;
}

}  // namespace

File::File(File&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), faults_(other.faults_) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(faults_, other.faults_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

Status File::Write(std::string_view bytes) {
  const FileFault fault = Ask(faults_, FileOp::kWrite, path_);
  const size_t size = fault.error != 0 ? std::min(fault.written_bytes, bytes.size()) : bytes.size();
  int error = WriteAll(fd_, bytes.data(), size);
  if (fault.error != 0) error = fault.error;
  return error == 0 ? Status() : SystemError(path_, "write", error);
}

Status File::Truncate(uint64_t size_bytes) {
  int error = Ask(faults_, FileOp::kTruncate, path_).error;
  if (error == 0) error = Try([&] { return ::ftruncate(fd_, static_cast<off_t>(size_bytes)); });
  return error == 0 ? Status() : SystemError(path_, "truncate", error);
}

Status File::Sync() {
  int error = Ask(faults_, FileOp::kSync, path_).error;
  if (error == 0) error = Try([&] { return ::fsync(fd_); });
  return error == 0 ? Status() : SystemError(path_, "fsync", error);
}

Status File::Close() {
  int error = Ask(faults_, FileOp::kClose, path_).error;
  // Never twice: after a failed close the descriptor is gone, and may belong to another thread.
  if (::close(std::exchange(fd_, -1)) < 0 && error == 0 && errno != EINTR) error = errno;
  return error == 0 ? Status() : SystemError(path_, "close", error);
}

Status File::Lock() {
  int error = Ask(faults_, FileOp::kLock, path_).error;
  if (error == 0) error = Try([&] { return ::flock(fd_, LOCK_EX | LOCK_NB); });
  if (error == EWOULDBLOCK) return UsageError(path_ + ": held by another process");
  if (error == ENOLCK || error == EOPNOTSUPP || error == ENOSYS) {
    return UnsupportedError(path_ + ": this file system has no locks");
  }
  return error == 0 ? Status() : SystemError(path_, "lock", error);
}

Result<File> FileOps::Create(const std::string& path) const {
  int fd = -1;
  int error = Ask(faults_, FileOp::kCreate, path).error;
  if (error == 0) {
    constexpr int kFlags = O_WRONLY | O_CREAT | O_TRUNC | kOpenFlags;
    error = Try([&] { return fd = ::open(path.c_str(), kFlags, 0666); });
  }
  if (error != 0) return SystemError(path, "create", error);
  return File(fd, path, faults_);
}

Result<File> FileOps::OpenAppend(const std::string& path) const {
  int fd = -1;
  int error = Ask(faults_, FileOp::kOpen, path).error;
  if (error == 0) {
    constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | kOpenFlags;
    error = Try([&] { return fd = ::open(path.c_str(), kFlags, 0666); });
  }
  if (error != 0) return SystemError(path, "open for writing", error);
  return File(fd, path, faults_);
}

Result<Bytes> FileOps::Read(const std::string& path) const {
  Bytes bytes;
  RT_RETURN_IF_ERROR(ReadInto(path, 1, &bytes));
  return bytes;
}

namespace {

// Reads [first, first + size) of a file. -> how many bytes there were; -errno.
ssize_t ReadPart(int fd, char* to, size_t first, size_t size) {
  size_t done = 0;
  while (done < size) {
    const ssize_t n = ::pread(fd, to + done, size - done, static_cast<off_t>(first + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -errno;
    if (n == 0) break;  // it became shorter meanwhile
    done += static_cast<size_t>(n);
  }
  return static_cast<ssize_t>(done);
}

}  // namespace

Status FileOps::ReadInto(const std::string& path, int threads, Bytes* bytes) const {
  int fd = -1;
  int error = Ask(faults_, FileOp::kRead, path).error;
  if (error == 0) error = Try([&] { return fd = ::open(path.c_str(), O_RDONLY | kOpenFlags); });
  if (error != 0) return SystemError(path, "open", error);
  const File closer(fd, path, nullptr);
  struct stat info{};
  if (::fstat(fd, &info) < 0) return SystemError(path, "stat", errno);
  if (!S_ISREG(info.st_mode)) return DamagedError(path + ": expected a file, got something else");

  const size_t size = static_cast<size_t>(info.st_size);
  if (bytes->data == nullptr || bytes->capacity < size + 1) {
    *bytes = Bytes();
    bytes->data.reset(static_cast<char*>(std::malloc(size + 1)));
    if (bytes->data == nullptr) {
      return FailedError(path + ": no memory for its " + std::to_string(size) + " bytes");
    }
    PreferHugePages(bytes->data.get(), size + 1);
    bytes->capacity = size + 1;
  }
  constexpr size_t kPart = size_t{4} << 20;
  std::vector<ssize_t> parts((size + kPart - 1) / kPart);
  ParallelFor(parts.size(), threads, [&](int, size_t i) {
    const size_t first = i * kPart;
    parts[i] = ReadPart(fd, bytes->data.get() + first, first, std::min(kPart, size - first));
  });
  bytes->size = 0;
  for (size_t i = 0; i < parts.size() && bytes->size == i * kPart; ++i) {
    if (parts[i] < 0) return SystemError(path, "read", static_cast<int>(-parts[i]));
    bytes->size += static_cast<size_t>(parts[i]);
  }
  return {};
}

Result<std::vector<std::string>> FileOps::List(const std::string& dir) const {
  int error = Ask(faults_, FileOp::kList, dir).error;
  DIR* stream = error == 0 ? ::opendir(dir.c_str()) : nullptr;
  if (stream == nullptr && error == 0) error = errno;
  if (error == ENOENT || error == ENOTDIR) {
    return DamagedError(dir + ": expected a directory, got " +
                        (error == ENOENT ? "nothing" : "something else"));
  }
  if (error != 0) return SystemError(dir, "list", error);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(stream);
  std::sort(names.begin(), names.end());
  return names;
}

Status FileOps::Publish(const std::string& from, const std::string& to, bool* existed) const {
  int error = Ask(faults_, FileOp::kPublish, from, to).error;
  if (error == 0) {
    error = Try([&] {
      return ::syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                       kRenameNoReplace);
    });
    if (error == EINVAL || error == ENOSYS) {  // NFS and others: link never replaces either
      error = Try([&] { return ::link(from.c_str(), to.c_str()); });
      if (error == 0) ::unlink(from.c_str());
    }
  }
  *existed = error == EEXIST;
  return error == 0 || error == EEXIST ? Status() : SystemError(to, "rename", error);
}

Status FileOps::SyncDir(const std::string& dir) const {
  int fd = -1;
  int error = Ask(faults_, FileOp::kSyncDir, dir).error;
  if (error == 0) {
    error = Try([&] { return fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  }
  if (error == 0) {
    error = Try([&] { return ::fsync(fd); });
    if (error == EINVAL) error = 0;  // some network file systems: nothing to sync there
    ::close(fd);
  }
  return error == 0 ? Status() : SystemError(dir, "fsync of the directory", error);
}

Status FileOps::Remove(const std::string& path) const {
  int error = Ask(faults_, FileOp::kRemove, path).error;
  if (error == 0) error = Try([&] { return ::unlink(path.c_str()); });
  return error == 0 || error == ENOENT ? Status() : SystemError(path, "remove", error);
}

Status FileOps::MakeDir(const std::string& path) const {
  int error = Ask(faults_, FileOp::kMakeDir, path).error;
  if (error == 0) error = Try([&] { return ::mkdir(path.c_str(), 0777); });
  struct stat info {};
  if (error == EEXIST && ::stat(path.c_str(), &info) == 0 && !S_ISDIR(info.st_mode)) {
    return UsageError(path + ": expected a directory, or a name for a new one, got a file");
  }
  return error == 0 || error == EEXIST ? Status() : SystemError(path, "make directory", error);
}

bool FileOps::Exists(const std::string& path) const { return Size(path) >= 0; }

int64_t FileOps::Size(const std::string& path) const {
  struct stat info{};
  return ::stat(path.c_str(), &info) < 0 ? -1 : static_cast<int64_t>(info.st_size);
}

namespace {

Status WriteTemporary(const FileOps& ops, const std::string& path, std::string_view bytes) {
  RT_ASSIGN_OR_RETURN(File file, ops.Create(path));
  RT_RETURN_IF_ERROR(file.Write(bytes));
  RT_RETURN_IF_ERROR(file.Sync());
  return file.Close();
}

Status MoveIntoPlace(const FileOps& ops, const std::string& temporary, const std::string& path,
                     std::string_view bytes) {
  bool existed = false;
  RT_RETURN_IF_ERROR(ops.Publish(temporary, path, &existed));
  if (!existed) return {};
  RT_ASSIGN_OR_RETURN(const Bytes there, ops.Read(path));
  if (there.view() != bytes) {
    return FailedError(path + ": exists with other bytes; expected that nothing else writes this "
                       "name. Resume the run, which removes files that no ledger line names");
  }
  return ops.Remove(temporary);
}

}  // namespace

Status PublishFile(const FileOps& ops, const std::string& dir, const std::string& name,
                   std::string_view bytes) {
  const std::string path = dir + "/" + name, temporary = path + std::string(kTemporarySuffix);
  Status status = WriteTemporary(ops, temporary, bytes);
  if (status.ok()) status = MoveIntoPlace(ops, temporary, path, bytes);
  if (!status.ok()) {
    (void)ops.Remove(temporary);  // gives the space back; else the next opening removes it
    return status;
  }
  return ops.SyncDir(dir);
}

}  // namespace retrace
