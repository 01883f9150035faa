// Verdict: what an arm's ensemble says against the control's. Used by experiments. Pure.
//
// The metric was fixed before anything ran: the jump of the evaluation loss up to the horizon
// (statistics.h). Three one-sided hypotheses an arm (the jump is lower, it is higher, the spike
// comes later), all of the file's arms in one family; a claim also needs a size. All else is
// described, not tested. docs/architecture.md, "Verdicts".
#ifndef RETRACE_SURGERY_VERDICT_H_
#define RETRACE_SURGERY_VERDICT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "surgery/replica_log.h"

namespace retrace {

enum class Verdict { kControl, kRemoves, kShrinks, kDelays, kWorsens, kWithinNoise };
const char* VerdictName(Verdict verdict);  // "removes", ..., "within noise"

inline constexpr double kLevel = 0.05;       // family-wise, of Holm's correction
inline constexpr double kLeastShare = 0.25;  // of the control's median jump
inline constexpr double kLeastEffect = 0.1;  // nat

// The replicas of one arm, and what they say.
struct ArmResult {
  std::string name, hypothesis;
  std::vector<std::string> changes;  // canonical interventions, or overrides of the recipe
  std::vector<int64_t> seeds;
  std::vector<Replica> replicas;
  std::vector<double> jumps;   // nats, up to the horizon
  std::vector<double> spikes;  // position k of the first rise above the threshold; infinite: none

  double median = 0, delta = 0;  // delta: against the control's median
  // Holm-adjusted probabilities without an effect: jump below the control's, above it, spike later.
  double p_below = 1, p_above = 1, p_later = 1;
  Verdict verdict = Verdict::kControl;

  double tested() const;  // the probability that goes with the verdict
};

struct JudgePlan {
  int64_t first_position = 0;  // of the replicas' losses
  double threshold = 0.5;      // nats: a rise above it is a spike
  int64_t other_arms = 0;      // of the file, run or not: the family that Holm corrects for
};

// Fills in jumps, medians, probabilities and verdicts. arms[0] is the control.
void Judge(const JudgePlan& plan, std::vector<ArmResult>* arms);

// The difference of medians that a claim needs, nats.
double LeastEffect(const ArmResult& control);

// The least adjusted p that an arm of `replicas` can come to.
double LeastAdjusted(int64_t replicas, int64_t control_replicas, int64_t other_arms);

}  // namespace retrace

#endif  // RETRACE_SURGERY_VERDICT_H_
