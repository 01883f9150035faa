// UpdateTracer: what an update computes, op by op, whatever ranks carry it: the same list in the same
// order on any topology. Used by trace and by the bisect of two runs. Collective: made and called in
// every rank of a job. Not thread-safe.
//
// Ops are those of the Probe, in order of execution of one rank: evaluation, micro-batches lane by lane,
// optimizer; before them the state that the update starts at ("state/NAME#p/shard0", "#m", "#v"). What
// several ranks compute alike stands there once; where a rank has other bits, they follow as
// "NAME@rank1".
#ifndef RETRACE_REPLAY_UPDATE_TRACER_H_
#define RETRACE_REPLAY_UPDATE_TRACER_H_

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/spill_file.h"
#include "formats/trace_file.h"
#include "replay/job.h"
#include "replay/probe.h"

namespace retrace {

struct TraceOptions {
  bool evaluation = false;  // the passes over the evaluation batch too
  // Ops whose elements are kept until they are asked for; none: digests alone.
  std::function<bool(std::string_view name)> tensors = {};
  std::string spill_dir = "";  // where they are kept; "": in memory
  Probe* before = nullptr;  // sees each op first: tests plant faults with it
};

class UpdateTracer : public Probe {
 public:
  struct TracedOp : TraceOp {
    int rank = 0;       // whose bits these are
    bool kept = false;  // its elements can be asked for
    uint64_t offset = 0;
  };

  // The job outlives the tracer.
  UpdateTracer(Job& job, TraceOptions options) : job_(job), options_(std::move(options)) {}

  // One update of the job. Afterwards ops() are those of all ranks; also after an error, as far as the
  // ranks can still speak. Errors: those of Job::Advance and SpillFile.
  Result<Job::Step> Advance(Script* script);
  const std::vector<TracedOp>& ops() const { return ops_; }

  // The elements of an op that is kept, as bytes. Collective.
  Result<std::string> Elements(const TracedOp& op);

  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override;
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override;

 private:
  // Where an op stands, on any topology: section, lane, micro-batch; place among the ops there, which
  // Gather finds; shard.
  using Key = std::array<int64_t, 5>;
  struct Seen {
    Key key;
    TracedOp op;
  };

  template <class T>
  void See(const std::string& name, const T* data, int64_t rows, int64_t cols);
  Key KeyOf(const std::string& name) const;
  Status Keep(const void* data, TracedOp* op);
  void SeeState();
  Status Gather();
  Result<std::vector<Seen>> GatherSeen();

  Job& job_;
  const TraceOptions options_;
  std::vector<Seen> seen_;
  std::vector<TracedOp> ops_;
  std::optional<SpillFile> spill_;
  std::string memory_;
  Status status_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_UPDATE_TRACER_H_
