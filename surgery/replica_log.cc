#include "surgery/replica_log.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

namespace retrace {
namespace {

Status SystemError(const std::string& path, const char* what) {
  return FailedError(fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

std::string LineOf(const Digest& key, const std::string& what, const Replica& replica) {
  nlohmann::ordered_json losses = nlohmann::ordered_json::array();
  for (double loss : replica.losses) {
    if (std::isfinite(loss))
      losses.push_back(loss);
    else
      losses.push_back("inf");  // JSON has no infinity
  }
  const nlohmann::ordered_json line = {{"key", key.Hex()},         {"what", what},
                                       {"dir", replica.dir},       {"losses", losses},
                                       {"halted", replica.halted}, {"state", replica.state.Hex()}};
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Result<std::pair<Digest, Replica>> ParseLine(std::string_view text) {
  try {
    const nlohmann::json line = nlohmann::json::parse(text);
    std::pair<Digest, Replica> entry;
    RT_ASSIGN_OR_RETURN(entry.first, ParseDigest(line.at("key").get<std::string>()));
    RT_ASSIGN_OR_RETURN(entry.second.state, ParseDigest(line.at("state").get<std::string>()));
    entry.second.halted = line.at("halted").get<bool>();
    entry.second.dir = line.at("dir").get<std::string>();
    for (const nlohmann::json& loss : line.at("losses")) {
      entry.second.losses.push_back(loss.is_number() ? loss.get<double>()
                                                     : std::numeric_limits<double>::infinity());
    }
    return entry;
  } catch (const std::exception& error) {
    return DamagedError(error.what());
  }
}

}  // namespace

Result<std::unique_ptr<ReplicaLog>> ReplicaLog::Open(const std::string& dir) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) return FailedError(dir + ": can not be made: " + error.message());
  const std::string path = dir + "/" + kReplicaLogName;
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd < 0) return SystemError(path, "can not be opened");
  std::unique_ptr<ReplicaLog> log(new ReplicaLog(fd, dir, path));
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    return UsageError(path +
                      ": another process runs this experiment; wait for it, or choose "
                      "another directory with --out");
  }
  RT_RETURN_IF_ERROR(log->Read());
  return log;
}

ReplicaLog::~ReplicaLog() { ::close(fd_); }

Status ReplicaLog::Read() {
  std::string text;
  char buffer[1 << 16];
  for (ssize_t got; (got = ::pread(fd_, buffer, sizeof buffer, text.size())) != 0;) {
    if (got < 0) return SystemError(path_, "can not be read");
    text.append(buffer, got);
  }
  size_t begin = 0;
  for (int64_t number = 1;; ++number) {
    const size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;
    auto entry = ParseLine(std::string_view(text).substr(begin, end - begin));
    if (!entry.ok()) {
      return DamagedError(fmt::format("{}:{}: {}; remove the line to have its replica run again",
                                      path_, number, entry.status().message()));
    }
    replicas_.insert(std::move(entry).value());
    begin = end + 1;
  }
  if (begin < text.size() && ::ftruncate(fd_, begin) != 0) return SystemError(path_, "truncate");
  return {};
}

std::optional<Replica> ReplicaLog::Find(const Digest& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = replicas_.find(key);
  if (found == replicas_.end()) return std::nullopt;
  return found->second;
}

Status ReplicaLog::Append(const Digest& key, const std::string& what, const Replica& replica) {
  const std::string line = LineOf(key, what, replica);
  const std::lock_guard<std::mutex> lock(mutex_);
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  for (size_t done = 0; done < line.size();) {
    const ssize_t wrote = ::write(fd_, line.data() + done, line.size() - done);
    if (wrote < 0) {
      const Status failed = SystemError(path_, "can not be written");
      // Else the next line would be glued to this one's beginning.
      if (::ftruncate(fd_, before) != 0) return failed.Within("and can not be cut back");
      return failed;
    }
    done += wrote;
  }
  if (::fsync(fd_) != 0) return SystemError(path_, "fsync");
  replicas_[key] = replica;
  return {};
}

}  // namespace retrace
