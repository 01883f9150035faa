// Recorder: has what a run keeps of each update written and committed. Used by train, replay and
// densify. One per rank; all ranks call it in step, after each update.
//
// The update pays one copy (RankWriter::Snapshot); compression, writing and the commit of update k
// overlap update k+1. If storage falls behind, the call waits, and the record says how long.
#ifndef RETRACE_REPLAY_RECORDER_H_
#define RETRACE_REPLAY_RECORDER_H_

#include <deque>
#include <memory>
#include <string>

#include "formats/rank_writer.h"
#include "formats/run_dir.h"
#include "replay/job.h"
#include "replay/retention.h"

namespace retrace {

class Recorder {
 public:
  // `writer` on rank 0 alone, nullptr elsewhere; it and `job` outlive the recorder. Collective.
  static Result<std::unique_ptr<Recorder>> Make(Job& job, RunWriter* writer,
                                                const std::string& run_dir);

  // Rank 0: learns what is kept, says what goes. Outlives the recorder.
  void set_retention(Retention* retention) { retention_ = retention; }

  // The job's present state as the run's first position, kept whole or only named.
  Status RecordFirst(const Digest& digest, bool keep);
  // An update. `keep` is the same on all ranks.
  Status Record(const Job::Step& step, double update_seconds, Keep keep);
  // The present state, already a position of the run, as a keyframe.
  Status KeepPresent(const Digest& digest, const std::string& record_json);
  // Waits until all is durable.
  Status Finish();

  // Seconds that the last call waited for storage.
  double stalled_seconds() const { return stalled_; }

 private:
  struct Pending {
    StepCommit commit;
    Keep keep = Keep::kNothing;

    bool files() const { return keep != Keep::kNothing; }
  };
  Recorder(Job& job, RunWriter* writer) : job_(job), writer_(writer) {}
  bool WritesFiles() const { return job_.place().dp_rank == 0; }
  void Snapshot(int64_t position, Keep keep);
  StepCommit CommitOf(const Digest& digest, std::string record) const;
  Status Push(Pending pending);
  Status Settle(Pending pending);

  Job& job_;
  RunWriter* writer_;
  Retention* retention_ = nullptr;
  std::unique_ptr<RankWriter> rank_writer_;
  std::deque<Pending> pending_;  // at most one with files, the last
  bool undrained_ = false;       // a commit with files is on its way
  double stalled_ = 0;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_RECORDER_H_
