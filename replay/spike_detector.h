// SpikeDetector: when does the flight recorder fire? Looks at one record after another; works from
// update 2 on. Used by train, on rank 0. Its state is a function of the records alone, so a resumed
// run rebuilds it from its ledger. Not thread-safe.
//
// A condition fires when it becomes true, not as long as it holds: a loss that stays high is one
// event. What it never does is change a bit of the run.
#ifndef RETRACE_REPLAY_SPIKE_DETECTOR_H_
#define RETRACE_REPLAY_SPIKE_DETECTOR_H_

#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <string>

#include "core/recipe.h"
#include "replay/record.h"

namespace retrace {

struct Firing {
  std::string trigger;  // "non_finite", "loss", "norm", "update_rms"
  std::string reason;   // a sentence
};

class SpikeDetector {
 public:
  explicit SpikeDetector(const FlightRecipe& flight) : flight_(flight) {}

  // Updates come in order. -> the first condition that became true with this one.
  std::optional<Firing> Observe(const UpdateRecord& record);

 private:
  // "" where the condition does not hold. Each looks at what came before the record.
  std::string NonFinite(const UpdateRecord& record) const;
  std::string LossRise(double loss) const;
  std::string NormCollapse(double norm) const;
  std::string UpdateSize(const UpdateRecord& record) const;
  double LossDeviation() const;  // MAD of the last changes
  void Remember(double loss, double norm);

  const FlightRecipe flight_;
  double least_loss_ = std::numeric_limits<double>::infinity();
  std::optional<double> last_loss_;
  std::deque<double> changes_;  // of the loss
  std::deque<double> norms_;    // the last norm_steps
  bool was_[4] = {};            // whether each condition held at the last update
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_SPIKE_DETECTOR_H_
