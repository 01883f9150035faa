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

}  // namespace

Result<RebuildSpeed> MeasureRebuild(const RunReader& run, const Layout& layout, Engine& engine,
                                    int64_t position, double seconds) {
  const Timeline timeline(run, layout, engine);
  RT_ASSIGN_OR_RETURN(const SeekPlan plan, timeline.Plan(position));
  RT_CHECK(plan.journals >= 1);
  RebuildSpeed speed;
  speed.steps = plan.journals;
  double to_position = 1e300, to_keyframe = 1e300, spent = 0;
  speed.read_seconds = 1e300;
  Journal journal;
  Status status;
  const auto seek = [&](int64_t k, double* least) {
    const double took = SecondsOf([&] {
      Result<State> state = timeline.Seek(k);
      status = state.status();
    });
    *least = std::min(*least, took);
    spent += took;
    return status;
  };
  for (int pass = 0; pass < 3 || spent < seconds; ++pass) {
    RT_RETURN_IF_ERROR(seek(plan.keyframe, &to_keyframe));
    RT_RETURN_IF_ERROR(seek(position, &to_position));
    const double read = SecondsOf(
        [&] { status = run.ReadJournal(layout, position, 0, layout.shards(), &journal); });
    RT_RETURN_IF_ERROR(status);
    speed.read_seconds = std::min(speed.read_seconds, read);
  }
  speed.step_seconds = (to_position - to_keyframe) / static_cast<double>(plan.journals);
  speed.copy_gigabytes = CopyGigabytes(engine, seconds / 4);
  return speed;
}

}  // namespace retrace
