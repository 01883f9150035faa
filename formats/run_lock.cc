#include "formats/run_lock.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

namespace retrace {
namespace {

std::string FirstLine(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

// Field 22 of /proc/PID/stat: start of the process in ticks since boot; -1: no such process.
int64_t StartTicks(int64_t pid) {
  const std::string stat = FirstLine("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');  // the name may hold blanks
  if (name_end == std::string::npos) return -1;
  std::istringstream fields(stat.substr(name_end + 1));
  constexpr int kFieldsBefore = 19;  // state is field 3
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  int64_t ticks = -1;
  fields >> ticks;
  return ticks;
}

// nullopt: empty, or not a lock's text (a crash tore it).
std::optional<LockHolder> ParseLock(std::string_view text) {
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    return LockHolder{json.at("host"), json.at("boot"), json.at("pid"), json.at("start"),
                      json.at("attempt")};
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

std::string Describe(const LockHolder& holder) {
  return "process " + std::to_string(holder.pid) + " on host " + holder.host;
}

// Whether the holder may still be writing, given that its advisory lock was free (`locked`) or that
// the file system has none.
bool MayBeAlive(const LockHolder& holder, const LockHolder& self, bool locked) {
  if (holder.boot_id == self.boot_id) {  // this machine, not restarted since
    return !locked && StartTicks(holder.pid) == holder.start_ticks;
  }
  return holder.host != self.host;  // this host, restarted: dead; another host: who knows
}

}  // namespace

LockHolder ThisProcess() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  const int64_t pid = ::getpid();
  return {host, FirstLine("/proc/sys/kernel/random/boot_id"), pid, StartTicks(pid), 0};
}

std::string LockText(const LockHolder& holder) {
  const nlohmann::ordered_json json = {{"host", holder.host}, {"boot", holder.boot_id},
                                       {"pid", holder.pid}, {"start", holder.start_ticks},
                                       {"attempt", holder.attempt}};
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

Result<RunLock> RunLock::Take(const FileOps& ops, const std::string& path) {
  RT_ASSIGN_OR_RETURN(File file, ops.OpenAppend(path));
  const Status locked = file.Lock();
  if (!locked.ok() && locked.code() == StatusCode::kFailed) return locked;
  RT_ASSIGN_OR_RETURN(const Bytes text, ops.Read(path));
  const std::optional<LockHolder> holder = ParseLock(text.view());
  if (locked.code() == StatusCode::kUsage) {
    return UsageError(path + ": the run is being written by " +
                      (holder ? Describe(*holder) : "another process") +
                      "; wait for it, or branch into a run of your own");
  }
  if (!holder) return RunLock(std::move(file), "");
  if (MayBeAlive(*holder, ThisProcess(), locked.ok())) {
    return UsageError(path + ": the run is held by " + Describe(*holder) +
                      ", which can not be checked from here; if it is gone, remove this file");
  }
  return RunLock(std::move(file), path + ": took over the lock of " + Describe(*holder) +
                                      ", which is gone (attempt " +
                                      std::to_string(holder->attempt) + ")");
}

RunLock::~RunLock() {
  if (announced_ && file_.is_open()) (void)file_.Truncate(0);  // else the next process finds it stale
}

Status RunLock::Announce(int64_t attempt) {
  LockHolder self = ThisProcess();
  self.attempt = attempt;
  RT_RETURN_IF_ERROR(file_.Truncate(0));
  announced_ = true;
  RT_RETURN_IF_ERROR(file_.Write(LockText(self)));
  return file_.Sync();  // so that ranks on other hosts see it
}

Result<int64_t> ReadLockAttempt(const FileOps& ops, const std::string& path) {
  RT_ASSIGN_OR_RETURN(const Bytes text, ops.Read(path));
  const std::optional<LockHolder> holder = ParseLock(text.view());
  return holder ? holder->attempt : 0;
}

}  // namespace retrace
