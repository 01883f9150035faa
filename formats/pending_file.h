// PendingFile: a file that appears under its name only when it is complete. Used by the writers of
// datasets and tokenizers. Bytes go to NAME.partial; Publish() makes them durable and renames.
// Invariants: NAME is never half a file; a crash leaves at most NAME.partial, which the next writer
// of NAME takes over; two writers of one NAME at a time are refused (a lock on the partial file).
// Dropping an unpublished PendingFile removes its partial file. Not thread-safe.
#ifndef RETRACE_FORMATS_PENDING_FILE_H_
#define RETRACE_FORMATS_PENDING_FILE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace retrace {

class PendingFile {
 public:
  // Errors: kFailed where NAME.partial can not be made or another program is writing it.
  static Result<PendingFile> Create(const std::string& path);

  PendingFile(PendingFile&& other) noexcept;
  PendingFile& operator=(PendingFile&&) = delete;
  ~PendingFile();

  const std::string& path() const { return path_; }
  uint64_t size_bytes() const { return size_bytes_; }

  Status Write(const void* data, size_t size_bytes);

  // No more is to be written: all bytes reach the disk.
  Status Sync();

  // Whether NAME exists and holds the same bytes. After Sync.
  Result<bool> SameAsPublished() const;

  // NAME.partial becomes NAME, durably, replacing what was there. After Sync.
  Status Publish();

 private:
  PendingFile() = default;
  Status Flush();

  std::string path_, partial_path_;
  int fd_ = -1;
  uint64_t size_bytes_ = 0;
  std::vector<char> buffer_;
};

// All of a small file at once, replacing what was there. Errors: those of PendingFile.
Status PublishFile(const std::string& path, std::string_view bytes);

// Removes PATH durably; a file that is not there is no error.
Status RemoveFile(const std::string& path);

bool FileExists(const std::string& path);

}  // namespace retrace

#endif  // RETRACE_FORMATS_PENDING_FILE_H_
