// FileOps: the few file operations that the store uses, each a direct system call. Used by formats
// only; nothing else in formats touches the file system. FORMAT.md, "Commit", rests on this order.
//
// A test passes FileFaults, which sees every operation before it is done and can make it fail: so
// every crash point and every full disk can be tried. Stateless otherwise; thread-safe if the
// FileFaults is. Errors: kFailed with path, operation and the system's reason.
#ifndef RETRACE_FORMATS_FILE_OPS_H_
#define RETRACE_FORMATS_FILE_OPS_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace retrace {

enum class FileOp {
  kCreate, kOpen, kWrite, kTruncate, kSync, kClose, kPublish, kSyncDir, kRemove, kMakeDir, kLock,
  kRead, kList,
};

struct FileFault {
  int error = 0;             // errno with which the operation fails; 0: it is done
  size_t written_bytes = 0;  // kWrite: the prefix that reaches the file all the same
};

class FileFaults {
 public:
  virtual ~FileFaults() = default;
  // `to` is the new name of kPublish, else empty.
  virtual FileFault Before(FileOp op, const std::string& path, const std::string& to) = 0;
};

// Memory from malloc, not initialised: images of files of up to gigabytes.
struct Bytes {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data;
  size_t size = 0;
  size_t capacity = 0;  // of data, for who uses the memory again: fresh pages cost more than a copy

  std::string_view view() const { return {data.get(), size}; }
};

// An open file; closed when destroyed (then a close error is lost: call Close after writing).
class File {
 public:
  File(int fd, std::string path, FileFaults* faults)
      : fd_(fd), path_(std::move(path)), faults_(faults) {}
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  ~File();

  bool is_open() const { return fd_ >= 0; }
  Status Write(std::string_view bytes);  // all of them, at the end of the file
  Status Truncate(uint64_t size_bytes);
  Status Sync();
  Status Close();
  // Without waiting. kUsage: another process holds it. kUnsupported: no locks on this file system.
  Status Lock();

 private:
  int fd_;
  std::string path_;
  FileFaults* faults_;
};

class FileOps {
 public:
  explicit FileOps(FileFaults* faults = nullptr) : faults_(faults) {}

  Result<File> Create(const std::string& path) const;      // emptied where it exists
  Result<File> OpenAppend(const std::string& path) const;  // created where it does not exist
  Result<Bytes> Read(const std::string& path) const;
  // The same into memory that is used again where it is large enough, by several threads.
  Status ReadInto(const std::string& path, int threads, Bytes* bytes) const;
  Result<std::vector<std::string>> List(const std::string& dir) const;  // names, sorted
  // Renames without replacing. *existed: `to` was there already and nothing was done.
  Status Publish(const std::string& from, const std::string& to, bool* existed) const;
  Status SyncDir(const std::string& dir) const;
  Status Remove(const std::string& path) const;
  Status MakeDir(const std::string& path) const;  // fine where it exists

  bool Exists(const std::string& path) const;
  int64_t Size(const std::string& path) const;  // -1: not there

 private:
  FileFaults* faults_;
};

// DIR/NAME appears whole and durable, or not at all: NAME.tmp is written, fsynced, renamed without
// replacing, DIR fsynced. May be repeated: a NAME that is there with the same bytes is success, with
// other bytes an error (a name belongs to one attempt of one rank, so nothing else writes it).
Status PublishFile(const FileOps& ops, const std::string& dir, const std::string& name,
                   std::string_view bytes);

inline constexpr std::string_view kTemporarySuffix = ".tmp";

}  // namespace retrace

#endif  // RETRACE_FORMATS_FILE_OPS_H_
