#include "replay/flight_recorder.h"

#include <fmt/format.h>

#include <utility>

namespace retrace {

FlightRecorder::FlightRecorder(const StoreRecipe& store, int64_t first_position, RunWriter& writer,
                               std::string run_dir, std::function<void(const std::string&)> notice)
    : store_(store),
      writer_(writer),
      run_dir_(std::move(run_dir)),
      notice_(std::move(notice)),
      retention_(store, first_position),
      detector_(store.flight) {}

Status FlightRecorder::Restore(const RunReader& run) {
  const RunHistory& history = run.history();
  for (const KeepLine& line : history.keeps) {
    retention_.Hold({line.first, line.last});
    if (line.trigger != kDensifyTrigger) ++firings_;
  }
  KeptSteps steps = KeptStepsOf(history);
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    const PositionEntry& entry = *history.Find(k);
    std::optional<KeptStep> step;
    if (entry.master) step = steps[k];
    // Only the ring's sizes matter, and only where they are bounded.
    if (step && store_.flight.bytes > 0) {
      RT_ASSIGN_OR_RETURN(const StepIndex index, run.ReadIndex(k));
      for (const RankFileInfo& file : index.files) step->bytes += static_cast<int64_t>(file.size);
    }
    retention_.Reached(k, step);
    if (k == history.first_position() || store_.flight.steps == 0) continue;
    // The ledger has what came of these: they do not fire again.
    RT_ASSIGN_OR_RETURN(const UpdateRecord record, ParseRecord(entry.record));
    (void)detector_.Observe(record);
    observed_ = k;
  }
  return {};
}

void FlightRecorder::Look(int64_t position, bool signalled) {
  const std::string path = run_dir_ + "/" + kFireName;
  const FileOps ops;
  const bool touched = ops.Exists(path);
  // A file that can not be removed would fire at every update; firings_max ends that.
  if (touched) (void)ops.Remove(path);
  const int64_t last = position + store_.flight.after;
  if (touched) Fire(position, last, {"file", path + " appeared"});
  if (signalled) Fire(position, last, {"signal", "SIGUSR1 came"});
}

void FlightRecorder::Observe(const UpdateRecord& record) {
  if (store_.flight.steps == 0 || record.update <= observed_) return;
  observed_ = record.update;
  const std::optional<Firing> firing = detector_.Observe(record);
  if (firing) Fire(record.update, record.update + store_.flight.after, *firing);
}

void FlightRecorder::Halted(const UpdateRecord& record, const std::string& reason) {
  if (store_.flight.steps == 0) return;
  Fire(record.update, record.update - 1, {"non_finite", "the update halted: " + reason});
}

void FlightRecorder::Fire(int64_t update, int64_t last, const Firing& firing) {
  if (store_.flight.steps == 0) {
    return notice_(firing.reason + ", but this run has no flight recorder (store.flight.steps)");
  }
  if (firings_ >= store_.flight.firings_max) {
    return notice_(
        fmt::format("{}, but the flight recorder has fired {} times already and keeps "
                    "no more (store.flight.firings_max)",
                    firing.reason, firings_));
  }
  ++firings_;
  const int64_t ring_first = retention_.RingFirst();
  const int64_t first = ring_first < 0 ? std::min(update, last) : ring_first;
  retention_.Hold({first, last});
  writer_.HoldLater({first, last, update, firing.trigger, firing.reason});
  notice_(fmt::format("flight recorder: {} at update {}; states {}..{} stay", firing.reason, update,
                      first, last));
}

}  // namespace retrace
