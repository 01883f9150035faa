#include "surgery/rebuild.h"

#include <fmt/format.h>

#include <algorithm>

#include "replay/recorder.h"
#include "surgery/branch.h"

namespace retrace {
namespace {

// Bytes of an element in a file, as measured (docs/performance.md); for estimates.
constexpr double kJournalBytes = 3.5, kKeyframeBytes = 10.5;

// Fills in what follows from the steps. `run` as it is before any is stored.
void Estimate(const RunReader& run, const Layout& layout, RebuildPlan* plan) {
  const RunHistory& history = run.history();
  int64_t reached = -1;  // the last position that was lived again
  for (const RebuildStep& step : plan->steps) {
    int64_t from = step.position - 1;
    while (from > reached && from >= history.first_position() && !history.NearestKeyframe(from)) {
      --from;
    }
    from = std::max({from, reached, history.first_position()});
    plan->updates += std::max<int64_t>(0, step.position - from);
    reached = step.position;
    const double bytes = step.keep == Keep::kKeyframe ? kKeyframeBytes : kJournalBytes;
    plan->bytes += static_cast<int64_t>(bytes * static_cast<double>(layout.parameters()));
  }
}

// Updates between the nearest keyframe and `position`; nullopt: it can not be reached by a walk.
std::optional<int64_t> WalkLength(const RunHistory& history, int64_t position) {
  const std::optional<int64_t> keyframe = history.NearestKeyframe(position);
  return keyframe ? std::optional(position - *keyframe) : std::nullopt;
}

class Rebuilder {
 public:
  Rebuilder(const RunReader& run, Job& job, InterventionScript script, Recorder& recorder,
            const std::function<void(int64_t)>& done)
      : run_(run), job_(job), script_(std::move(script)), recorder_(recorder), done_(done) {}

  Status Make(const RebuildStep& step) {
    if (step.position == run_.history().first_position()) return MakeFirst();
    if (!placed_ || job_.position() >= step.position) RT_RETURN_IF_ERROR(Place(step.position));
    while (job_.position() < step.position) {
      const bool last = job_.position() + 1 == step.position;
      RT_RETURN_IF_ERROR(Live(last ? step.keep : Keep::kNothing));
    }
    return {};
  }

 private:
  // At a state before `position`, the nearest that can be had.
  Status Place(int64_t position) {
    const Timeline timeline(run_, job_.layout(), job_.engine());
    const int64_t from = timeline.LastReachable(position - 1);
    if (from < 0)
      RT_RETURN_IF_ERROR(Start());
    else
      RT_RETURN_IF_ERROR(job_.Seek(run_, from));
    placed_ = true;
    return {};
  }

  // The recipe's initial state, for a run that does not have its first state any more.
  Status Start() {
    const RunHistory& history = run_.history();
    if (history.header.lineage) {
      return DamagedError(fmt::format(
          "{}@{}: the first state of a branch can not be made again from the branch alone; make it "
          "anew from {}@{} with 'retrace replay'",
          run_.dir(), history.first_position(), history.header.lineage->parent,
          history.header.lineage->position));
    }
    RT_RETURN_IF_ERROR(job_.StartFresh());
    RT_ASSIGN_OR_RETURN(const Digest digest, job_.StateDigestNow());
    return Compare(digest);
  }

  Status MakeFirst() {
    RT_RETURN_IF_ERROR(Start());
    placed_ = true;
    return recorder_.KeepPresent(run_.history().Find(job_.position())->digest, "{}");
  }

  Status Compare(const Digest& got) const {
    const Digest expected = run_.history().Find(job_.position())->digest;
    if (got == expected) return {};
    return DamagedError(
        fmt::format("{}@{}: replay parts from the recording: expected state {}, got {}. Nothing of "
                    "it was stored; is it the same dataset and numerics? See 'retrace replay {}'",
                    run_.dir(), job_.position(), expected.Hex(), got.Hex(), run_.dir()));
  }

  Status Live(Keep keep) {
    bool edited = false;
    // The first state of a branch is after surgery already.
    if (job_.position() > run_.history().first_position()) {
      RT_ASSIGN_OR_RETURN(edited, job_.Edit(&script_));
    }
    RT_ASSIGN_OR_RETURN(const Job::Step step, job_.Advance(&script_));
    RT_RETURN_IF_ERROR(Compare(step.digest));
    // After surgery the state does not follow from the journal.
    if (edited && keep == Keep::kJournal) keep = Keep::kKeyframe;
    if (keep != Keep::kNothing) RT_RETURN_IF_ERROR(recorder_.Record(step, 0, keep));
    ++lived_;
    if (job_.is_rank0() && done_) done_(lived_);
    return {};
  }

  const RunReader& run_;
  Job& job_;
  InterventionScript script_;
  Recorder& recorder_;
  const std::function<void(int64_t)>& done_;
  bool placed_ = false;
  int64_t lived_ = 0;
};

}  // namespace

Result<RebuildPlan> PlanDensify(const RunReader& run, const Layout& layout, int64_t first,
                                int64_t last, int64_t keyframe_every) {
  const RunHistory& history = run.history();
  if (first < history.first_position() || last > history.last_position() || first > last) {
    return UsageError(fmt::format("--steps {}..{}: {} has positions {}..{}", first, last, run.dir(),
                                  history.first_position(), history.last_position()));
  }
  RebuildPlan plan;
  std::optional<int64_t> length = WalkLength(history, first - 1);
  for (int64_t k = first; k <= last; ++k) {
    const PositionEntry& entry = *history.Find(k);
    if (entry.HasKeyframe()) {
      length = 0;
    } else if (length && entry.HasJournal()) {
      ++*length;
    } else {
      const bool walks = length && *length + 1 < keyframe_every;
      length = walks ? *length + 1 : 0;
      plan.steps.push_back({k, walks ? Keep::kJournal : Keep::kKeyframe});
    }
  }
  Estimate(run, layout, &plan);
  return plan;
}

Result<RebuildPlan> PlanRepair(const RunReader& run, const RunHistory& before, const Layout& layout,
                               const std::vector<int64_t>& damaged) {
  RebuildPlan plan;
  for (int64_t k : damaged) {
    const PositionEntry* entry = before.Find(k);
    if (entry == nullptr) {
      return UsageError(fmt::format("{}: has no position {}", run.dir(), k));
    }
    // `before` has the damaged predecessors, which are repaired before this one.
    const bool journal = entry->HasJournal() && !entry->HasKeyframe() && !entry->HasPartial() &&
                         before.NearestKeyframe(k - 1).has_value();
    plan.steps.push_back({k, journal ? Keep::kJournal : Keep::kKeyframe});
  }
  Estimate(run, layout, &plan);
  return plan;
}

Status Rebuild(const RunReader& run, Job& job, RunWriter* writer, const RebuildPlan& plan,
               const std::function<void(int64_t updates)>& done) {
  RT_ASSIGN_OR_RETURN(InterventionScript script, RecordedScript(run));
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                      Recorder::Make(job, writer, run.dir()));
  Rebuilder rebuilder(run, job, std::move(script), *recorder, done);
  Status status;
  for (const RebuildStep& step : plan.steps) {
    status = rebuilder.Make(step);
    if (!status.ok()) break;
  }
  // What was made before an error is good and is kept.
  const Status finished = recorder->Finish();
  return status.ok() ? finished : status;
}

}  // namespace retrace
