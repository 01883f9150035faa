// Statistics of noise ensembles: what a verdict rests on. Used by experiments.
// Pure; exact where it says so.
//
// The test compares ranks, not values: jumps of the loss are heavy-tailed, and a replica that halted
// at a non-finite value has an infinite one. Ranks make the count of permutations exact at every size
// that an experiment may have, so nothing is sampled. DESIGN: docs/architecture.md, "Verdicts".
#ifndef RETRACE_SURGERY_STATISTICS_H_
#define RETRACE_SURGERY_STATISTICS_H_

#include <cstdint>
#include <vector>

namespace retrace {

inline constexpr int kReplicasMax = 64;  // of an arm: bounds the exact count

// Of a sorted copy; the mean of the middle two where their number is even. Values may be infinite.
// Empty: NaN.
double Median(std::vector<double> values);

// The difference of the upper and the lower quartile (linear interpolation between order
// statistics). Infinite where the upper one is. Fewer than two values: 0.
double QuartileRange(std::vector<double> values);

// One-sided exact permutation test that `arm` tends below `control`: the share of all ways to draw
// arm.size() of all values whose sum of midranks is at most that of `arm`. Both not empty, together at
// most 2 * kReplicasMax, no NaN. The other side: ProbabilityBelow(control, arm).
double ProbabilityBelow(const std::vector<double>& arm, const std::vector<double>& control);

// Holm's step-down adjustment: adjusted[i] <= alpha rejects i at family-wise level alpha. `family` is
// the number of hypotheses, at least p.size(); those without a p count as not rejected.
std::vector<double> HolmAdjusted(const std::vector<double>& p, int64_t family);

// jump = max over s of (L_s - min over r < s of L_r), 0 at the least; a loss that is not finite counts
// as infinite. And the first index at which the rise over the running minimum exceeds `threshold`
// (-1: none).
struct Jump {
  double nats = 0;
  int64_t first_above = -1;
};
Jump JumpOf(const std::vector<double>& losses, double threshold);

}  // namespace retrace

#endif  // RETRACE_SURGERY_STATISTICS_H_
