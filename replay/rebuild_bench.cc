#include "replay/rebuild_bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "replay/timeline.h"

namespace retrace {
namespace {

template <class F>
double SecondsOf(F f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Larger than any cache; every thread copies its own part.
double CopyGigabytes(Engine& engine, double seconds) {
  constexpr int64_t kPart = int64_t{64} << 20;
  const int64_t parts = engine.threads();
  std::vector<char> from(kPart * parts, 1), to(kPart * parts, 2);
  double fastest = 1e300, spent = 0;
  for (int pass = 0; pass < 3 || spent < seconds; ++pass) {
    const double took = SecondsOf([&] {
      engine.pool().Run(parts, [&](int64_t i, int) {
        std::memcpy(to.data() + i * kPart, from.data() + i * kPart, kPart);
      });
    });
    fastest = std::min(fastest, took);
    spent += took;
  }
  return 2.0 * static_cast<double>(kPart * parts) / fastest / 1e9;
}

// The first of the positions that are farthest from their keyframe.
SeekPlan LongestWalk(const Timeline& timeline, const RunHistory& history) {
  SeekPlan longest;
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    const Result<SeekPlan> plan = timeline.Plan(k);
    if (plan.ok() && plan->journals > longest.journals) longest = *plan;
  }
  return longest;
}

}  // namespace

Result<RebuildSpeed> MeasureRebuild(const RunReader& run, const Layout& layout, Engine& engine,
                                    double seconds) {
  const Timeline timeline(run, layout, engine);
  const SeekPlan plan = LongestWalk(timeline, run.history());
  RT_CHECK(plan.journals >= 1);
  RebuildSpeed speed;
  speed.keyframe = plan.keyframe;
  speed.steps = plan.journals;
  double to_position = 1e300, to_keyframe = 1e300, spent = 0;
  const auto seek = [&](int64_t k, double* least) {
    Status status;
    const double took = SecondsOf([&] { status = timeline.Seek(k).status(); });
    *least = std::min(*least, took);
    spent += took;
    return status;
  };
  for (int pass = 0; pass < 3 || spent < seconds; ++pass) {
    RT_RETURN_IF_ERROR(seek(plan.keyframe, &to_keyframe));
    RT_RETURN_IF_ERROR(seek(plan.keyframe + plan.journals, &to_position));
  }
  speed.step_seconds = (to_position - to_keyframe) / static_cast<double>(plan.journals);
  speed.copy_gigabytes = CopyGigabytes(engine, seconds / 4);
  return speed;
}

}  // namespace retrace
