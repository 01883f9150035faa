// UpdateRecord: what is logged of update k. A value; JSON in the ledger. Used by log, diff, replay,
// verdicts. Everything in it is a function of (recipe, state, dataset) except `timing`, which no
// comparison reads.
#ifndef RETRACE_REPLAY_RECORD_H_
#define RETRACE_REPLAY_RECORD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/digest.h"
#include "core/status.h"

namespace retrace {

// What an update left of each tensor, in canonical order. Diagnostics: norms have six digits, and no
// comparison asks for them where an older recording has none.
struct TensorNorms {
  std::vector<double> p;       // of RUN@(k-1), after surgery if there was any
  std::vector<double> change;  // of p of RUN@k less that
  std::vector<double> m, v;    // of RUN@k

  // Elements of the gradient ("g") or of the state after the update ("p", "m", "v") that are no
  // ordinary numbers, where there are any.
  struct Odd {
    int64_t tensor = 0;
    std::string of;
    int64_t zero = 0, subnormal = 0, infinite = 0, nan = 0;
  };
  std::vector<Odd> odd;
};

struct UpdateRecord {
  int64_t update = 0;                     // k
  double loss = 0;                        // of batch k at RUN@(k-1), nats
  std::optional<double> evaluation_loss;  // of the fixed batch at RUN@(k-1), nats
  double gradient_norm = 0;               // before clipping
  double clip = 1;                        // factor applied; the smallest where there are several
  double lr = 0;                          // applied
  std::optional<double> update_rms;       // of Adam's update; where store.flight.update_rms > 0
  std::string action = "applied";         // applied, skipped, halted
  int64_t first_sample = 0, samples = 0;
  Digest tokens;                         // of all samples of the step, in order
  std::vector<double> tensor_norms;      // of the gradient, by tensor in canonical order
  std::optional<TensorNorms> norms;      // recordings of 0.1.0 have none
  std::string level = "portable";
  // Empty unless the update was no ordinary one.
  std::vector<int64_t> sample_list;  // what it consumed, where that is not samples in a row
  std::vector<double> tensor_clips;  // factor of each tensor, where the clip is not global
  std::vector<double> tensor_update_clips;  // of each tensor's update, where those are clipped

  struct Timing {
    double update_seconds = 0, stall_seconds = 0;
  } timing;

  // Equal but for timing, and for norms where one of the two has none.
  bool Same(const UpdateRecord& other) const;
};

// One JSON object on one line. Non-finite numbers are the strings "nan", "inf", "-inf".
std::string RecordJson(const UpdateRecord& record);

// Errors: kDamaged, naming the field.
Result<UpdateRecord> ParseRecord(std::string_view json);

}  // namespace retrace

#endif  // RETRACE_REPLAY_RECORD_H_
