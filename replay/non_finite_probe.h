// NonFiniteProbe: the first op of an update whose output is not finite. Used when a run halts.
#ifndef RETRACE_REPLAY_NON_FINITE_PROBE_H_
#define RETRACE_REPLAY_NON_FINITE_PROBE_H_

#include <string>

#include "replay/probe.h"

namespace retrace {

class NonFiniteProbe : public Probe {
 public:
  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override;
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override;

  // "mb0/layer3/q_proj/shard1 [12, 7] = inf"; "" where every output was finite.
  const std::string& found() const { return found_; }

 private:
  template <class T>
  void Look(const std::string& name, const T* data, int64_t rows, int64_t cols);

  std::string found_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_NON_FINITE_PROBE_H_
