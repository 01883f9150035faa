// Probe: sees every op's output of an update by a stable name. Off by default; used by trace, by
// the bisect of two runs, and by diagnostics.
//
// Names: "mb0/layer3/q_proj", ".../shard1" behind it where the tensor is one virtual shard's, and
// ".grad" behind the op for the gradient of its output. Before them "mb0/ids" and "mb0/labels" (whole
// numbers below 2^24), after them the micro-batch's gradient of each parameter, "mb0/NAME.grad/shard1".
// Then the optimizer: "optimizer/NAME#g/shard1", the gradient of the step before clipping;
// "optimizer/norms", of each tensor's; "optimizer/rows", the scalars of each tensor's row of the block;
// "optimizer/NAME#p/shard1", "#m", "#v", after the update. The passes over the evaluation batch have
// "evaluation", or "evaluation0" and on where there are several, in place of "mb0". Order of calls =
// order of execution.
// A probe can not change bits: it gets const data. (Tests plant faults by casting that away.)
#ifndef RETRACE_REPLAY_PROBE_H_
#define RETRACE_REPLAY_PROBE_H_

#include <cstdint>
#include <string>

namespace retrace {

class Probe {
 public:
  virtual ~Probe() = default;
  // rows x cols elements, row-major.
  virtual void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) = 0;
  virtual void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) = 0;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_PROBE_H_
