#include "replay/step_bench.h"

#include <chrono>

namespace retrace {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Gives the time since the op before to the phase of the op that has just finished.
class PhaseProbe : public Probe {
 public:
  // Where `spans` is given, every op's time is appended to it.
  explicit PhaseProbe(std::vector<OpSpan>* spans) : spans_(spans), origin_(Clock::now()) {}

  void Begin() {
    seconds_ = {};
    was_micro_batch_ = false;
    last_ = Clock::now();
  }
  StepSeconds End() {
    const Clock::time_point now = Clock::now();
    Span(kAfterLastOp, now);
    seconds_.optimizer += Seconds(last_, now);
    return seconds_;
  }
  void Forget() {
    if (spans_) spans_->clear();
  }

  void Op(const std::string& name, const float*, int64_t, int64_t) override { Note(name); }
  void Op(const std::string& name, const double*, int64_t, int64_t) override { Note(name); }

 private:
  void Note(const std::string& name) {
    const Clock::time_point now = Clock::now();
    const bool micro_batch = name.starts_with("mb");
    const bool gradient = name.find(".grad") != std::string::npos;
    double& phase = !micro_batch ? seconds_.evaluation
                    : gradient   ? seconds_.backward
                                 : seconds_.forward;
    Span(was_micro_batch_ && !micro_batch ? kAfterLastOp : name, now);
    // Before evaluation's first op lies what follows the last micro-batch.
    (was_micro_batch_ && !micro_batch ? seconds_.optimizer : phase) += Seconds(last_, now);
    was_micro_batch_ = micro_batch;
    last_ = now;
  }

  void Span(const std::string& name, Clock::time_point now) {
    if (spans_) spans_->push_back({name, Seconds(origin_, last_), Seconds(last_, now)});
  }

  static constexpr char kAfterLastOp[] = "lanes, norm, clip, AdamW, digest";
  std::vector<OpSpan>* const spans_;
  const Clock::time_point origin_;
  StepSeconds seconds_;
  bool was_micro_batch_ = false;
  Clock::time_point last_;
};

}  // namespace

Result<std::vector<StepSeconds>> MeasureSteps(Job& job, int updates,
                                              const std::function<void(int done)>& done,
                                              std::vector<OpSpan>* spans) {
  std::vector<StepSeconds> steps;
  PhaseProbe probe(spans);
  job.set_probe(&probe);
  for (int i = 0; i <= updates; ++i) {
    probe.Begin();
    RT_ASSIGN_OR_RETURN(const Job::Step step, job.Advance());
    StepSeconds seconds = probe.End();
    if (step.result.action == UpdateAction::kHalted) {
      job.set_probe(nullptr);
      return FailedError("an update halted: " + step.result.reason);
    }
    // Advance has taken the digest once; what that took is measured by taking it again.
    const Clock::time_point begin = Clock::now();
    RT_ASSIGN_OR_RETURN(const Digest digest, job.StateDigestNow());
    (void)digest;
    seconds.digest = Seconds(begin, Clock::now());
    seconds.optimizer = std::max(0.0, seconds.optimizer - seconds.digest);
    if (i > 0) {
      steps.push_back(seconds);
    } else {
      probe.Forget();
    }
    if (job.is_rank0() && done) done(i);
  }
  job.set_probe(nullptr);
  return steps;
}

}  // namespace retrace
