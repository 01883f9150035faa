// FlightRecorder: what a training run keeps, decided on rank 0 before each update: the recipe's
// policies, the ring, and the firings that make the ring stay. Used by train.
//
// A firing at update k keeps the ring's states and those up to k + flight.after: the "keep" line in
// the ledger says so before anything else is retired. Reads the records of its own run alone, so a
// resumed run goes on as if it had never stopped. Rank 0 only; not thread-safe.
#ifndef RETRACE_REPLAY_FLIGHT_RECORDER_H_
#define RETRACE_REPLAY_FLIGHT_RECORDER_H_

#include <functional>
#include <string>

#include "formats/run_dir.h"
#include "replay/retention.h"
#include "replay/spike_detector.h"

namespace retrace {

// The file in the run directory whose appearance is a trigger; removed when seen. (Its time is not
// looked at: clocks jump.)
inline constexpr char kFireName[] = "fire";

class FlightRecorder {
 public:
  // Arguments outlive it. `notice` gets sentences for the user.
  FlightRecorder(const StoreRecipe& store, int64_t first_position, RunWriter& writer,
                 std::string run_dir, std::function<void(const std::string&)> notice);

  // Takes over what the run has, when it is resumed. Errors: those of reading masters.
  Status Restore(const RunReader& run);

  // Before update `position` + 1. `signalled`: the user's signal came.
  void Look(int64_t position, bool signalled);
  // After an update.
  void Observe(const UpdateRecord& record);
  // An update that halted: the run stays at the position before it.
  void Halted(const UpdateRecord& record, const std::string& reason);

  Retention& retention() { return retention_; }

 private:
  void Fire(int64_t update, int64_t last, const Firing& firing);

  const StoreRecipe store_;
  RunWriter& writer_;
  const std::string run_dir_;
  const std::function<void(const std::string&)> notice_;
  Retention retention_;
  SpikeDetector detector_;
  int64_t observed_ = 0;  // the last update that the detector has seen
  int64_t firings_ = 0;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_FLIGHT_RECORDER_H_
