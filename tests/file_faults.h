// Faults for the store's tests: fail, kill or cut the power at the n-th file operation.
#ifndef RETRACE_TESTS_FILE_FAULTS_H_
#define RETRACE_TESTS_FILE_FAULTS_H_

#include <unistd.h>

#include <cerrno>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "formats/file_ops.h"

namespace retrace {

enum class FaultMode {
  kCount,      // nothing fails
  kFailOnce,   // operation n fails with an errno, then all is well again
  kFailOn,     // operation n and all later ones fail (reads do not), until Heal
  kKill,       // operation n and all later ones fail: the process is gone, its files stay
  kPowerLoss,  // as kKill; then Crash() takes away all that was not fsynced
  kReordered,  // as kKill; then Crash() takes away every other block and name that was not fsynced
};

class TestFaults : public FileFaults {
 public:
  explicit TestFaults(FaultMode mode, int fail_at = 0, int error = EIO)
      : mode_(mode), fail_at_(fail_at), error_(error) {}

  FileFault Before(FileOp op, const std::string& path, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    ++count_;
    const bool hit = mode_ != FaultMode::kCount && count_ >= fail_at_;
    if (!hit) {
      Remember(op, path, to);
      return {};
    }
    if (mode_ == FaultMode::kFailOnce && count_ > fail_at_) return {};
    const bool reads = op == FileOp::kRead || op == FileOp::kList;
    if (mode_ == FaultMode::kFailOn && reads) return {};
    // A killed or failed write leaves half of its bytes, so torn files and lines occur.
    return {error_, count_ == fail_at_ ? kTornBytes : 0};
  }

  int count() const { return count_; }
  void Heal() { mode_ = FaultMode::kCount; }

  // The machine comes back: files hold what was fsynced, names what their directory's fsync kept.
  void Crash() {
    if (mode_ == FaultMode::kReordered) return CrashReordered();
    for (auto& [path, bytes] : durable_bytes_) {
      if (std::filesystem::exists(path) && std::filesystem::file_size(path) > bytes) {
        std::filesystem::resize_file(path, bytes);
      }
    }
    for (auto change = unsynced_names_.rbegin(); change != unsynced_names_.rend(); ++change) {
      const auto& [from, to] = *change;
      if (from.empty()) {
        std::filesystem::remove(to);
      } else if (std::filesystem::exists(to)) {
        std::filesystem::rename(to, from);
      }
    }
  }

  // Later writes reached the disk and earlier ones did not: blocks of zeros, missing names.
  void CrashReordered() {
    constexpr uint64_t kBlock = 512;
    for (const auto& [path, durable] : durable_bytes_) {
      if (!std::filesystem::exists(path)) continue;
      const uint64_t size = std::filesystem::file_size(path);
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      for (uint64_t at = durable; at < size;) {
        const uint64_t end = std::min(size, (at / kBlock + 1) * kBlock);
        if ((at / kBlock + fail_at_) % 2 == 0) {
          file.seekp(static_cast<std::streamoff>(at));
          file << std::string(end - at, '\0');
        }
        at = end;
      }
    }
    for (size_t i = unsynced_names_.size(); i-- > 0;) {
      const auto& [from, to] = unsynced_names_[i];
      if ((i + fail_at_) % 2 == 0 || !std::filesystem::exists(to)) continue;
      if (from.empty()) std::filesystem::remove(to);
      else std::filesystem::rename(to, from);
    }
  }

 private:
  static constexpr size_t kTornBytes = 70;

  void Remember(FileOp op, const std::string& path, const std::string& to) {
    if (op == FileOp::kCreate) {
      if (!std::filesystem::exists(path)) unsynced_names_.push_back({"", path});
      durable_bytes_[path] = 0;
    } else if (op == FileOp::kOpen) {
      if (!std::filesystem::exists(path)) {
        durable_bytes_[path] = 0;
      } else if (durable_bytes_.count(path) == 0) {
        durable_bytes_[path] = std::filesystem::file_size(path);
      }
    } else if (op == FileOp::kSync) {
      durable_bytes_[path] = std::filesystem::file_size(path);
    } else if (op == FileOp::kPublish && !std::filesystem::exists(to)) {
      unsynced_names_.push_back({path, to});
      durable_bytes_[to] = durable_bytes_[path];
      durable_bytes_.erase(path);
    } else if (op == FileOp::kSyncDir) {
      std::erase_if(unsynced_names_, [&](const auto& change) {
        return std::filesystem::path(change.second).parent_path() == path;
      });
    }
  }

  FaultMode mode_;
  const int fail_at_, error_;
  std::mutex mutex_;
  int count_ = 0;
  std::map<std::string, uint64_t> durable_bytes_;
  std::vector<std::pair<std::string, std::string>> unsynced_names_;  // from ("": created), to
};

}  // namespace retrace

#endif  // RETRACE_TESTS_FILE_FAULTS_H_
