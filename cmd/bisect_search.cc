#include "cmd/bisect_search.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cmd/job_flags.h"
#include "cmd/text_table.h"
#include "kernels/thread_pool.h"

namespace retrace {
namespace {

constexpr int64_t kUpdatesBefore = 32, kUpdatesBehind = 5;  // of the spike, where --steps says none

PreventionOptions OptionsOf(const BisectFlags& flags) {
  const SideBySide replicas =
      OrFail(ResolveSideBySide("bisect", flags.jobs, flags.threads, flags.isa));
  PreventionOptions options;
  options.job = replicas.job;
  options.jobs = replicas.jobs;
  options.rule.most = flags.replicas;
  if (flags.sigma > 0) options.sigma = flags.sigma;
  options.budget = flags.budget;
  return options;
}

std::string DefaultOut(std::string run, const std::string& name) {
  while (run.size() > 1 && run.back() == '/') run.pop_back();
  return run + "-" + name;
}

Result<std::vector<UpdateRecord>> RecordsOf(const RunReader& run, const UpdateRange& range) {
  std::vector<UpdateRecord> records;
  for (int64_t k = range.first; k <= range.last; ++k) {
    RT_ASSIGN_OR_RETURN(UpdateRecord record, ParseRecord(run.history().Find(k)->record));
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace

SearchSession::SearchSession(const BisectFlags& flags, const RunReader& run,
                             const std::string& name)
    : flags_(flags), out_(flags.out.empty() ? DefaultOut(flags.run, name) : flags.out) {
  const Result<SpikePredicate> predicate = SpikePredicate::Parse(flags.predicate);
  if (!predicate.ok()) Fail(predicate.status().Within("--predicate"));
  predicate_ = *predicate;
  ChooseRange(run);
  PreventionOptions options = OptionsOf(flags);
  options.range = range_;
  options.predicate = predicate_;
  if (std::filesystem::exists(out_ + "/ledger.jsonl")) {
    Fail(UsageError("--out " + out_ + ": is a run; expected a directory for the replicas"));
  }
  options.out = out_;
  options.progress = [this](const PreventionProgress& at) { Show(at); };
  trials_ = OrFail(PreventionTrials::Make(run, options));
}

// --steps, or the surroundings of the first spike.
void SearchSession::ChooseRange(const RunReader& run) {
  const RunHistory& history = run.history();
  const UpdateRange all = {history.first_position() + 1, history.last_position()};
  range_ = all;
  if (!flags_.steps.empty()) {
    range_ = OrFail(ParseUpdateRange(flags_.steps, "--steps"));
    if (range_.first < all.first || range_.last > all.last) {
      Fail(UsageError(fmt::format("--steps {}: {} has updates {}..{}", flags_.steps, flags_.run,
                                  all.first, all.last)));
    }
  }
  if (range_.first > range_.last) Fail(UsageError(flags_.run + ": the run has no updates yet"));
  const std::vector<UpdateRecord> records = OrFail(RecordsOf(run, range_));
  const Status fits = predicate_->Check(records.front());
  if (!fits.ok()) Fail(fits.Within("--predicate"));
  const std::optional<int64_t> spike = predicate_->FirstSpike(records);
  if (!spike) {
    Fail(UsageError(fmt::format("{}: no update of {}..{} has {}; --predicate says what a spike is",
                                flags_.run, range_.first, range_.last, predicate_->text())));
  }
  spike_ = *spike;
  if (!flags_.steps.empty()) return;
  range_.first = std::max(all.first, spike_ - kUpdatesBefore);
  range_.last = std::min(all.last, spike_ + kUpdatesBehind);
}

void SearchSession::Forecast(const std::string& questions, int64_t updates) {
  const std::string text = fmt::format(
      "{}: update {} is the first of {}..{} with {}. {}, at the most {} updates{}. Replicas go to "
      "{}.\n",
      flags_.run, spike_, range_.first, range_.last, predicate_->text(), questions,
      Grouped(updates), flags_.budget > 0 ? ", of a budget of " + Grouped(flags_.budget) : "",
      out_);
  if (flags_.dry_run) {
    PrintReport(text);
    Exit(0);
  }
  if (!flags_.output.quiet) WriteError(text);
  if (flags_.budget > 0) updates = std::min(updates, flags_.budget);
  updates += range_.size();  // the control's proof
  CatchStopSignals();
  progress_ = std::make_unique<Progress>(flags_.output, "bisect", 0, updates);
}

void SearchSession::Prove() {
  const std::optional<ReplayedUpdate> differs = OrFail(trials_->Prove());
  if (!differs) return;
  Finish();
  SayError(fmt::format(
      "retrace: no verdict: the control, lived again as recorded, differs at update {}: expected "
      "state {}, got {}{}. 'retrace replay {} --steps {}..{}' shows it",
      differs->update, differs->expected.Hex(), differs->got.Hex(),
      differs->same_state ? " (the record differs)" : "", flags_.run, range_.first, range_.last));
  Exit(kNoAnswer);
}

void SearchSession::Show(const PreventionProgress& at) {
  if (progress_) {
    std::string note = at.what;
    if (at.replicas > 0) note += fmt::format(", no spike in {}", OfText(at.without, at.replicas));
    progress_->Show(at.updates, note);
  }
  if (!StopRequested()) return;
  // The replicas under way are given up; their threads end with the program.
  progress_.reset();
  SayError("retrace: stopped; the same command goes on where it was");
  PrintReport(best_);
  const Status printed = FinishOutput();
  std::_Exit(printed.ok() ? kNoAnswer : static_cast<int>(printed.code()));
}

void SearchSession::set_best(std::string best) { best_ = std::move(best); }

void SearchSession::Say(const std::string& line) {
  if (progress_) progress_->Say(line);
}

void AddSearchFlags(CLI::App* bisect, BisectFlags* flags) {
  bisect->add_option("--steps", flags->steps,
                     "Updates A..H: the search begins at A, replicas go to H; 32 before the spike "
                     "to 5 behind it by default");
  bisect
      ->add_option("--predicate", flags->predicate,
                   "What a spike is: jump > X, peak > X, non-finite, or an expression over fields "
                   "of records")
      ->capture_default_str();
  WholeIn(bisect->add_option("--replicas", flags->replicas, "At the most, of each question"), 6, 64)
      ->type_name("N")
      ->capture_default_str();
  NumberIn(bisect->add_option("--sigma", flags->sigma,
                              "Relative noise of replicas; 0: climbs until it is saturated"),
           0, 1)
      ->capture_default_str();
  WholeIn(bisect->add_option("--budget", flags->budget,
                             "Updates to live at the most; 0: as many as it takes"),
          0)
      ->type_name("UPDATES")
      ->capture_default_str();
  WholeIn(bisect->add_option("--jobs", flags->jobs, "Replicas side by side; 0: one a processor"), 0,
          1024)
      ->capture_default_str();
  WholeIn(bisect->add_option("--threads", flags->threads,
                             "Of each replica; 0: the processors divided by --jobs"),
          0, 1024)
      ->capture_default_str();
  AddIsaFlag(bisect, &flags->isa);
  bisect->add_option("-o,--out", flags->out,
                     "Directory of the replicas and of what is known; RUN-spike or RUN-cause by "
                     "default. The same directory goes on with a search that was ended");
  bisect->add_flag("--dry-run", flags->dry_run, "Say what the search may cost; live nothing");
}

std::string OfText(int64_t part, int64_t all) { return fmt::format("{} of {}", part, all); }

std::string NoiseText(const Prevention& prevention) {
  return fmt::format("{:.1e}{}", prevention.sigma,
                     prevention.saturated  ? ""
                     : prevention.laddered ? ", not saturated"
                                           : ", given");
}

const char* ScopeOf(const std::vector<const Prevention*>& preventions) {
  const bool all = std::all_of(preventions.begin(), preventions.end(),
                               [](const Prevention* one) { return one->saturated; });
  return all ? "this run" : "this exact trajectory";
}

}  // namespace retrace
