// ReplicaLog: the replicas that an experiment has run, one JSON line each in its directory, so that
// a killed experiment goes on where it was. Used by experiments. Thread-safe.
//
// A line is found by a key that stands for all that its replica depends on, so a changed experiment
// file keeps what still holds. A line is appended when its replica is finished, and is whole or not
// there: a torn last one is cut at opening. One process at a time (flock).
#ifndef RETRACE_SURGERY_REPLICA_LOG_H_
#define RETRACE_SURGERY_REPLICA_LOG_H_

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/digest.h"
#include "core/status.h"

namespace retrace {

struct Replica {
  std::vector<double> losses;  // of the evaluation batch, at RUN@(first-1), ...; nats
  bool halted = false;         // at a non-finite value; the last loss is then infinite
  Digest state;                // the last
  std::string dir;             // its run, within the log's directory; "": it has none
};

inline constexpr char kReplicaLogName[] = "replicas.jsonl";

class ReplicaLog {
 public:
  // Makes `dir` where it is missing. Errors: kUsage where another process has it open; kFailed;
  // kDamaged with the line's number.
  static Result<std::unique_ptr<ReplicaLog>> Open(const std::string& dir);
  ~ReplicaLog();

  const std::string& dir() const { return dir_; }

  std::optional<Replica> Find(const Digest& key) const;
  // Durable on return. `what` is for people.
  Status Append(const Digest& key, const std::string& what, const Replica& replica);

 private:
  ReplicaLog(int fd, std::string dir, std::string path)
      : fd_(fd), dir_(std::move(dir)), path_(std::move(path)) {}
  Status Read();

  const int fd_;
  const std::string dir_, path_;
  mutable std::mutex mutex_;
  std::map<Digest, Replica> replicas_;
};

}  // namespace retrace

#endif  // RETRACE_SURGERY_REPLICA_LOG_H_
