#include "surgery/verdict.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "surgery/statistics.h"

namespace retrace {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kHypotheses = 3;  // of an arm

void Measure(const JudgePlan& plan, ArmResult* arm) {
  arm->jumps.clear();
  arm->spikes.clear();
  for (const Replica& replica : arm->replicas) {
    const Jump jump = JumpOf(replica.losses, plan.threshold);
    arm->jumps.push_back(jump.nats);
    arm->spikes.push_back(jump.first_above < 0
                              ? kInfinity  // censored at the horizon
                              : static_cast<double>(plan.first_position + jump.first_above));
  }
  arm->median = Median(arm->jumps);
}

// a - b, where both may be infinite.
double Difference(double a, double b) { return a == b ? 0 : a - b; }

Verdict VerdictOf(double threshold, const ArmResult& control, const ArmResult& arm) {
  const bool large = std::abs(arm.delta) >= LeastEffect(control);
  if (arm.p_below <= kLevel && large) {
    const double worst = *std::max_element(arm.jumps.begin(), arm.jumps.end());
    const bool spikes = control.median > threshold;
    return spikes && worst <= threshold ? Verdict::kRemoves : Verdict::kShrinks;
  }
  if (arm.p_above <= kLevel && large) return Verdict::kWorsens;
  const bool later = Difference(Median(arm.spikes), Median(control.spikes)) >= 1;
  if (arm.p_later <= kLevel && later) return Verdict::kDelays;
  return Verdict::kWithinNoise;
}

}  // namespace

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kControl:
      return "control";
    case Verdict::kRemoves:
      return "removes";
    case Verdict::kShrinks:
      return "shrinks";
    case Verdict::kDelays:
      return "delays";
    case Verdict::kWorsens:
      return "worsens";
    case Verdict::kWithinNoise:
      return "within noise";
  }
  return "within noise";
}

double ArmResult::tested() const {
  return verdict == Verdict::kDelays ? p_later : std::min(p_below, p_above);
}

void Judge(const JudgePlan& plan, std::vector<ArmResult>* arms) {
  for (ArmResult& arm : *arms) Measure(plan, &arm);
  const ArmResult& control = arms->front();
  std::vector<double> p;
  for (size_t i = 1; i < arms->size(); ++i) {
    const ArmResult& arm = (*arms)[i];
    p.push_back(ProbabilityBelow(arm.jumps, control.jumps));
    p.push_back(ProbabilityBelow(control.jumps, arm.jumps));
    p.push_back(ProbabilityBelow(control.spikes, arm.spikes));
  }
  const std::vector<double> adjusted = HolmAdjusted(p, kHypotheses * plan.other_arms);
  for (size_t i = 1; i < arms->size(); ++i) {
    ArmResult& arm = (*arms)[i];
    arm.delta = Difference(arm.median, control.median);
    arm.p_below = adjusted[kHypotheses * (i - 1)];
    arm.p_above = adjusted[kHypotheses * (i - 1) + 1];
    arm.p_later = adjusted[kHypotheses * (i - 1) + 2];
    arm.verdict = VerdictOf(plan.threshold, control, arm);
  }
}

double LeastEffect(const ArmResult& control) {
  return std::max(kLeastShare * control.median, kLeastEffect);
}

double LeastAdjusted(int64_t replicas, int64_t control_replicas, int64_t other_arms) {
  double least = 1;  // 1 / binomial(all, replicas)
  for (int64_t i = 1; i <= replicas; ++i) {
    least *= static_cast<double>(i) / static_cast<double>(control_replicas + i);
  }
  return std::min(1.0, least * static_cast<double>(kHypotheses * other_arms));
}

}  // namespace retrace
