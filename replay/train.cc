#include "replay/train.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "core/recipe_toml.h"
#include "replay/flight_recorder.h"
#include "replay/non_finite_probe.h"
#include "replay/recipe_plan.h"

namespace retrace {
namespace {

double SecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// What rank 0 decides before an update.
struct UpdateHeader {
  bool stop = false;
  Keep keep = Keep::kNothing;  // of the position that the update makes
};

Result<std::unique_ptr<RunWriter>> OpenWriter(const Recipe& recipe, const Job& job,
                                              const TrainOptions& options) {
  if (options.resume) {
    return RunWriter::Open(options.run_dir, job.layout(), FileOps(), OpenFor::kGoingOn,
                           job.machine().numerics);
  }
  RunPlan plan;
  plan.recipe_text = PrintRecipe(recipe);
  Stamp(job.machine(), &plan);
  return RunWriter::Create(options.run_dir, job.layout(), plan);
}

// Positions that the run has already, with or without files, when this attempt begins.
struct Before {
  int64_t last = -1;
  std::vector<bool> kept;  // by position
  std::string last_record = "{}";

  bool Kept(int64_t position) const { return position <= last && kept[position]; }
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

// The job at the newest state that can be rebuilt. -> nullopt: the run has no position yet.
Result<std::optional<Before>> Resume(Job& job, const TrainOptions& options,
                                     FlightRecorder* flight) {
  Result<RunReader> run = RunReader::Open(options.run_dir, job.engine().threads());
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), run.status()));
  const RunHistory& history = run->history();
  if (history.last_position() < 0) return std::optional<Before>();
  RT_ASSIGN_OR_RETURN(const int64_t from, SeekNewest(job, *run, options));
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), flight ? flight->Restore(*run) : Status()));
  Before before;
  before.last = history.last_position();
  before.kept.assign(before.last + 1, false);
  // What is kept after `from` did not lead to a state: its files are written again.
  for (int64_t k = history.first_position(); k <= from; ++k) {
    before.kept[k] = history.Find(k)->master.has_value();
  }
  before.last_record = history.Find(from)->record;
  return std::optional(std::move(before));
}

Result<Before> Begin(Job& job, const TrainOptions& options, Recorder& recorder,
                     FlightRecorder* flight) {
  if (options.resume) {
    RT_ASSIGN_OR_RETURN(std::optional<Before> before, Resume(job, options, flight));
    if (before) return *std::move(before);
  }
  RT_RETURN_IF_ERROR(job.StartFresh());
  RT_ASSIGN_OR_RETURN(const Digest digest, job.StateDigestNow());
  RT_RETURN_IF_ERROR(recorder.RecordFirst(digest, true));
  return Before{.last = 0, .kept = {true}, .last_record = "{}"};
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

namespace {

// One rank's part of a recording.
class Trainer {
 public:
  Trainer(Job& job, RunWriter* writer, const TrainOptions& options)
      : job_(job), options_(options) {
    if (writer == nullptr) return;
    const auto notice = [this](const std::string& line) {
      if (options_.notice) options_.notice(line);
    };
    flight_ = std::make_unique<FlightRecorder>(job.recipe().store, 0, *writer, options.run_dir,
                                               notice);
  }

  Result<TrainEnd> Run(Recorder& recorder) {
    if (flight_) recorder.set_retention(&flight_->retention());
    RT_ASSIGN_OR_RETURN(before_, Begin(job_, options_, recorder, flight_.get()));
    const int64_t steps = job_.recipe().steps;
    const int64_t target = options_.until >= 0 ? std::min(options_.until, steps) : steps;
    RT_RETURN_IF_ERROR(CheckSamplesLast(target));
    if (job_.is_rank0() && options_.started) options_.started(job_.position(), target);
    present_kept_ = before_.Kept(job_.position());
    record_ = before_.last_record;
    RT_ASSIGN_OR_RETURN(digest_, job_.StateDigestNow());
    TrainEnd end = TrainEnd::kFinished;
    while (job_.position() < target && halted_.ok()) {
      RT_ASSIGN_OR_RETURN(const UpdateHeader header, NextHeader());
      if (header.stop) {
        end = TrainEnd::kStopped;
        break;
      }
      RT_RETURN_IF_ERROR(Update(recorder, header));
    }
    if (!present_kept_) RT_RETURN_IF_ERROR(recorder.KeepPresent(digest_, record_));
    RT_RETURN_IF_ERROR(recorder.Finish());
    RT_RETURN_IF_ERROR(halted_);
    return end;
  }

 private:
  // An imported run begins with the data cursor of the one that was exported, so its samples may end
  // before its steps do. Said before the updates that there are samples for are made in vain.
  Status CheckSamplesLast(int64_t target) const {
    const int64_t cursor = job_.state().state.counters.data_cursor,
                  last = job_.position() + UpdatesLeft(job_.recipe(), cursor);
    if (target <= last) return {};
    return UsageError(fmt::format(
        "{}@{}: {} of the {} samples that the recipe plans count as consumed: the others last "
        "until update {}, not {}. {}",
        options_.run_dir, job_.position(), cursor, PlannedSamples(job_.recipe()), last, target,
        last > job_.position() ? fmt::format("End there with --until {}", last)
                               : std::string("'import --fresh' begins at the first sample")));
  }

  // Rank 0's decisions, sent to all before each update.
  Result<UpdateHeader> NextHeader() {
    char bytes[2] = {};
    if (flight_) {
      flight_->Look(job_.position(), options_.fire && options_.fire());
      const int64_t next = job_.position() + 1;
      const Keep keep = before_.Kept(next) ? Keep::kNothing : flight_->retention().Next(next);
      bytes[0] = options_.stop && options_.stop() ? 1 : 0;
      bytes[1] = static_cast<char>(keep);
    }
    RT_RETURN_IF_ERROR(job_.comm().Broadcast(job_.comm().World(), bytes, sizeof bytes));
    return UpdateHeader{bytes[0] != 0, static_cast<Keep>(bytes[1])};
  }

  Status Update(Recorder& recorder, const UpdateHeader& header) {
    const auto begin = std::chrono::steady_clock::now();
    RT_ASSIGN_OR_RETURN(const Job::Step step, job_.Advance());
    const UpdateRecord& record = step.result.record;
    if (step.result.action == UpdateAction::kHalted) {
      if (flight_) flight_->Halted(record, step.result.reason);
      halted_ = retrace::Halted(job_, step.result, options_.run_dir, nullptr);
      return {};
    }
    RT_RETURN_IF_ERROR(recorder.Record(step, SecondsSince(begin), header.keep));
    if (flight_) flight_->Observe(record);
    present_kept_ = header.keep != Keep::kNothing || before_.Kept(job_.position());
    digest_ = step.digest;
    record_ = RecordJson(record);
    if (job_.is_rank0() && options_.updated) options_.updated(record, step.digest);
    return {};
  }

  Job& job_;
  const TrainOptions& options_;
  std::unique_ptr<FlightRecorder> flight_;  // rank 0
  Before before_;
  bool present_kept_ = false;
  Digest digest_;
  std::string record_;
  Status halted_;
};

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
  Trainer trainer(*job, writer.get(), options);
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                      Recorder::Make(*job, writer.get(), options.run_dir));
  return trainer.Run(*recorder);
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
    const std::vector<int64_t>& whole = kept.keyframes;
    if (std::find(whole.begin(), whole.end(), job.position()) != whole.end()) {
      keep = Keep::kKeyframe;
    }
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
