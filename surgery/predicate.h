// SpikePredicate: what counts as a spike: an expression over the records of updates, true at some
// update. Used by the searches of `retrace bisect`. A value; thread-safe.
//
//   jump > 0.5                           nats above the least loss before
//   peak > 12                            the loss itself
//   non-finite                           a loss or norm that is no finite number
//   gradient_norm > 100 and loss > 13    any expression
//
// expression: or, and, not; < <= > >= == !=; + - * /; parentheses; numbers; fields. Fields are those
// of a record that are one number (loss, evaluation_loss, gradient_norm, clip, lr, update_rms,
// update), and of the loss that is watched, which is the evaluation loss where the recipe has an
// evaluation batch: peak (the loss), jump (its rise above the least before, 0 at the first record).
// What is not finite counts as infinite, so that a run which halts satisfies every "field > number".
#ifndef RETRACE_SURGERY_PREDICATE_H_
#define RETRACE_SURGERY_PREDICATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/status.h"
#include "replay/record.h"

namespace retrace {

class SpikePredicate {
 public:
  // Errors: kUsage with the column, what was expected, and for an unknown field the nearest name.
  static Result<SpikePredicate> Parse(const std::string& text);

  const std::string& text() const { return text_; }

  // Errors: kUsage where it asks for a field that these records do not have.
  Status Check(const UpdateRecord& record) const;

  // The first update of `records` (in order, without gaps) at which it holds.
  std::optional<int64_t> FirstSpike(const std::vector<UpdateRecord>& records) const;

  // One update, with what was before it.
  struct Moment {
    const UpdateRecord* record = nullptr;
    double jump = 0;
  };
  using Term = std::function<double(const Moment&)>;  // truth: 0 or 1

 private:
  std::string text_;
  std::shared_ptr<const Term> holds_;
  bool evaluation_loss_ = false, update_rms_ = false;  // fields that it asks for
};

// The loss that is watched, infinite where it is not finite.
double WatchedLoss(const UpdateRecord& record);

// Of a run that halted at `update`: every number infinite.
UpdateRecord HaltedRecord(int64_t update, bool has_evaluation);

}  // namespace retrace

#endif  // RETRACE_SURGERY_PREDICATE_H_
