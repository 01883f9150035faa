// RunLock: at most one process writes a run. Used by run_dir.h. FORMAT.md, "Lock".
//
// The file `lock` is held by an advisory lock and names its holder: host, process, boot of the
// machine, start of the process, attempt. Empty: free. A holder that can not be alive any more is
// stale and taken over; one on another host is not ours to judge and refused.
#ifndef RETRACE_FORMATS_RUN_LOCK_H_
#define RETRACE_FORMATS_RUN_LOCK_H_

#include <cstdint>
#include <string>

#include "core/status.h"
#include "formats/file_ops.h"

namespace retrace {

struct LockHolder {
  std::string host, boot_id;
  int64_t pid = 0;
  int64_t start_ticks = 0;  // of the process, since boot
  int64_t attempt = 0;

  bool operator==(const LockHolder&) const = default;
};

LockHolder ThisProcess();
std::string LockText(const LockHolder& holder);

class RunLock {
 public:
  // Errors: kUsage where a living (or unjudgeable) process holds it; names it and what to do.
  static Result<RunLock> Take(const FileOps& ops, const std::string& path);
  RunLock(RunLock&&) = default;
  ~RunLock();  // frees the lock

  // Writes this process and the attempt into the file; ranks check it (ReadLockAttempt).
  Status Announce(int64_t attempt);

  const std::string& notice() const { return notice_; }  // empty, or whose stale lock was taken

 private:
  RunLock(File file, std::string notice) : file_(std::move(file)), notice_(std::move(notice)) {}

  File file_;
  std::string notice_;
  bool announced_ = false;
};

// The attempt that the lock names; 0: free, or being written. Errors: kFailed.
Result<int64_t> ReadLockAttempt(const FileOps& ops, const std::string& path);

}  // namespace retrace

#endif  // RETRACE_FORMATS_RUN_LOCK_H_
