#include "replay/train.h"

#include <chrono>

#include <fmt/format.h>

#include "core/recipe_toml.h"
#include "replay/non_finite_probe.h"

namespace retrace {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Rank 0's decision, sent to all before each update.
Result<bool> ShouldStop(Job& job, const std::function<bool()>& stop) {
  char decision = job.is_rank0() && stop && stop() ? 1 : 0;
  RT_RETURN_IF_ERROR(job.comm().Broadcast(job.comm().World(), &decision, 1));
  return decision != 0;
}

Result<std::unique_ptr<RunWriter>> OpenWriter(const Recipe& recipe, const Job& job,
                                              const TrainOptions& options) {
  if (options.resume) return RunWriter::Open(options.run_dir, job.layout());
  RunPlan plan;
  plan.recipe_text = PrintRecipe(recipe);
  plan.device = options.device;
  plan.isa = options.isa;
  plan.libraries = options.libraries;
  return RunWriter::Create(options.run_dir, job.layout(), plan);
}

// Positions that the run has already, with or without files, when this attempt begins.
struct Before {
  int64_t last = -1;
  std::vector<bool> kept;  // by position
  std::string last_record = "{}";
};

// Seeks the newest state that can be rebuilt. Damage costs no more than the updates after it: they
// are made again and have to have the ledger's digests. Not in a branch, whose updates may have
// been made under interventions. -> its position. Collective.
Result<int64_t> SeekNewest(Job& job, const RunReader& run, const TrainOptions& options) {
  const Timeline timeline(run, job.layout(), job.engine());
  const RunHistory& history = run.history();
  Status newest;
  for (int64_t k = timeline.LastReachable(history.last_position()); k >= 0;
       k = timeline.LastReachable(k - 1)) {
    const Status sought = job.Seek(run, k);
    char damaged = sought.code() == StatusCode::kDamaged && !history.header.lineage ? 1 : 0;
    if (!sought.ok()) RT_RETURN_IF_ERROR(job.comm().Broadcast(job.comm().World(), &damaged, 1));
    if (!sought.ok() && !damaged) return sought;
    if (newest.ok()) newest = sought;
    if (!sought.ok()) continue;
    if (!newest.ok() && job.is_rank0() && options.notice) {
      options.notice(fmt::format("{}; going on from {}@{}, what follows is made again",
                                 newest.message(), options.run_dir, k));
    }
    return k;
  }
  if (!newest.ok()) return newest;
  return DamagedError(options.run_dir + ": no state is kept to resume from");
}

Result<Before> Begin(Job& job, const TrainOptions& options, Recorder& recorder) {
  Before before;
  if (options.resume) {
    Result<RunReader> run = RunReader::Open(options.run_dir, job.engine().threads());
    RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), run.status()));
    const RunHistory& history = run->history();
    if (history.last_position() >= 0) {
      RT_ASSIGN_OR_RETURN(const int64_t from, SeekNewest(job, *run, options));
      before.last = history.last_position();
      before.kept.assign(before.last + 1, false);
      // What is kept after `from` did not lead to a state: its files are written again.
      for (int64_t k = history.first_position(); k <= from; ++k) {
        before.kept[k] = history.Find(k)->master.has_value();
      }
      before.last_record = history.Find(from)->record;
      return before;
    }
  }
  RT_RETURN_IF_ERROR(job.StartFresh());
  RT_ASSIGN_OR_RETURN(const Digest digest, job.StateDigestNow());
  RT_RETURN_IF_ERROR(recorder.RecordFirst(digest, true));
  before.last = 0;
  before.kept = {true};
  return before;
}

// Lives the halted update again, with a probe, to name where it began. Collective.
Status Halted(Job& job, const UpdateResult& result, const std::string& run_dir, Script* script) {
  NonFiniteProbe probe;
  job.set_probe(&probe);
  const Status again = job.Advance(script).status();
  job.set_probe(nullptr);
  RT_RETURN_IF_ERROR(again);
  RT_ASSIGN_OR_RETURN(const std::vector<std::string> found,
                      GatherTexts(job.comm(), job.comm().World(), probe.found()));
  std::string first;
  for (const std::string& text : found) {
    if (first.empty()) first = text;
  }
  return FailedError(fmt::format(
      "update {} halted before it changed anything: {}; the first value that is not finite is {}. "
      "The state before it is kept as {}@{}: replay from there, or set optimizer.non_finite to "
      "'skip' or 'record'",
      result.record.update, result.reason, first.empty() ? "in the optimizer" : first, run_dir,
      result.record.update - 1));
}

}  // namespace

Result<TrainEnd> Train(const Recipe& recipe, Comm& comm, const JobOptions& job_options,
                       const TrainOptions& options) {
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(recipe, comm, job_options));
  std::unique_ptr<RunWriter> writer;
  Status opened;
  if (job->is_rank0()) {
    Result<std::unique_ptr<RunWriter>> result = OpenWriter(recipe, *job, options);
    opened = result.status();
    if (result.ok()) writer = std::move(result).value();
    for (size_t i = 0; writer && options.notice && i < writer->notices().size(); ++i) {
      options.notice(writer->notices()[i]);
    }
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(comm, opened));
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                      Recorder::Make(*job, writer.get(), options.run_dir));
  RT_ASSIGN_OR_RETURN(Before before, Begin(*job, options, *recorder));
  const int64_t target = options.until >= 0 ? std::min(options.until, recipe.steps) : recipe.steps;
  if (job->is_rank0() && options.started) options.started(job->position(), target);
  TrainEnd end = TrainEnd::kFinished;
  bool present_kept = before.kept[job->position()];
  Status halted;
  std::string record = before.last_record;
  RT_ASSIGN_OR_RETURN(Digest digest, job->StateDigestNow());
  while (job->position() < target) {
    RT_ASSIGN_OR_RETURN(const bool stop, ShouldStop(*job, options.stop));
    if (stop) {
      end = TrainEnd::kStopped;
      break;
    }
    const auto begin = std::chrono::steady_clock::now();
    RT_ASSIGN_OR_RETURN(const Job::Step step, job->Advance());
    if (step.result.action == UpdateAction::kHalted) {
      halted = Halted(*job, step.result, options.run_dir, nullptr);
      break;
    }
    const int64_t k = job->position();
    const bool kept_before = k <= before.last && before.kept[k];
    const Keep keep = kept_before ? Keep::kNothing : KeepOf(recipe.store, k, 0);
    RT_RETURN_IF_ERROR(recorder->Record(step, SecondsSince(begin), keep));
    present_kept = kept_before || keep != Keep::kNothing;
    digest = step.digest;
    record = RecordJson(step.result.record);
    if (job->is_rank0() && options.updated) options.updated(step.result.record, step.digest);
  }
  if (!present_kept) RT_RETURN_IF_ERROR(recorder->KeepPresent(digest, record));
  RT_RETURN_IF_ERROR(recorder->Finish());
  RT_RETURN_IF_ERROR(halted);
  return end;
}

Status RecordBranch(Job& job, RunWriter* writer, const std::string& run_dir, int64_t last,
                    const BranchKeep& kept, Script* script,
                    const std::function<void(const UpdateRecord&, const Digest&)>& updated,
                    Status* halted) {
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                      Recorder::Make(job, writer, run_dir));
  RT_ASSIGN_OR_RETURN(bool edited, job.Edit(script));
  RT_ASSIGN_OR_RETURN(const Digest first, job.StateDigestNow());
  RT_RETURN_IF_ERROR(recorder->RecordFirst(first, kept.states));
  edited = false;  // the first state is after surgery
  StoreRecipe store;
  store.window_first = job.position();
  store.window_last = last;
  store.keyframe_every = job.recipe().store.keyframe_every;
  Status halt;
  while (job.position() < last) {
    const auto begin = std::chrono::steady_clock::now();
    RT_ASSIGN_OR_RETURN(const Job::Step step, job.Advance(script));
    if (step.result.action == UpdateAction::kHalted) {
      halt = Halted(job, step.result, run_dir, script);
      break;
    }
    // After surgery in mid-branch the state does not follow from the journal: it is kept whole.
    Keep keep = edited ? Keep::kKeyframe : KeepOf(store, job.position(), store.window_first);
    if (!kept.states) keep = Keep::kNothing;
    if (kept.keyframes.contains(job.position())) keep = Keep::kKeyframe;
    RT_RETURN_IF_ERROR(recorder->Record(step, SecondsSince(begin), keep));
    if (job.is_rank0() && updated) updated(step.result.record, step.digest);
    if (job.position() < last) {
      RT_ASSIGN_OR_RETURN(edited, job.Edit(script));
    }
  }
  RT_RETURN_IF_ERROR(recorder->Finish());
  if (halted == nullptr) return halt;
  *halted = halt;
  return {};
}

}  // namespace retrace
