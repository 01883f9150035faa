#include "replay/stall_bench.h"

#include <chrono>
#include <memory>

#include "core/recipe_toml.h"
#include "replay/recorder.h"

namespace retrace {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

Result<std::unique_ptr<RunWriter>> MakeWriter(Job& job, const std::string& dir) {
  std::unique_ptr<RunWriter> writer;
  Status status;
  if (job.is_rank0()) {
    RunPlan plan;
    plan.recipe_text = PrintRecipe(job.recipe());
    Stamp(job.machine(), &plan);
    Result<std::unique_ptr<RunWriter>> made = RunWriter::Create(dir, job.layout(), plan);
    status = made.status();
    if (made.ok()) writer = std::move(made).value();
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), status));
  return writer;
}

}  // namespace

Result<StallSeconds> MeasureStall(Job& job, const std::string& dir, int updates, int rounds,
                                  const std::function<void(int done)>& done) {
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<RunWriter> writer, MakeWriter(job, dir));
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                      Recorder::Make(job, writer.get(), dir));
  RT_ASSIGN_OR_RETURN(const Digest first, job.StateDigestNow());
  RT_RETURN_IF_ERROR(recorder->RecordFirst(first, true));
  RT_RETURN_IF_ERROR(recorder->Finish());
  StallSeconds stall;
  int count = 0;
  Clock::time_point last_record;
  for (int round = 0; round < rounds; ++round) {
    for (const Keep keep : {Keep::kNothing, Keep::kJournal}) {
      for (int i = 0; i < updates; ++i) {
        const auto begin = Clock::now();
        RT_ASSIGN_OR_RETURN(const Job::Step step, job.Advance());
        const auto advanced = last_record = Clock::now();
        RT_RETURN_IF_ERROR(recorder->Record(step, Since(begin), keep));
        if (i > 0 && keep == Keep::kNothing) stall.bare.push_back(Since(begin));
        if (i > 0 && keep == Keep::kJournal) {
          stall.recorded.push_back(Since(begin));
          stall.copied.push_back(Since(advanced));
          stall.waited += recorder->stalled_seconds();
        }
        if (job.is_rank0() && done) done(++count);
      }
      RT_RETURN_IF_ERROR(recorder->Finish());  // its work is not the next round's
      if (keep == Keep::kJournal) stall.durable.push_back(Since(last_record));
    }
  }
  return stall;
}

}  // namespace retrace
