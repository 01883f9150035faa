// TraceDifference: how two traces of an update differ: by bits, or beyond what rounding explains. Used
// by diff and bisect. Values; a difference is a result. Thread-safe.
#ifndef RETRACE_REPLAY_TRACE_DIFF_H_
#define RETRACE_REPLAY_TRACE_DIFF_H_

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/diff.h"
#include "formats/trace_file.h"

namespace retrace {

struct ComparedOp {
  std::string name;
  int64_t rows = 0, cols = 0;
  bool identical = true;
  std::optional<TensorDifference> difference;  // where both traces have its elements
  int64_t farthest = 0;                        // the element of the largest distance
  double a = 0, b = 0;                         // there

  // By rounding: Frobenius norms, as is `distance`.
  std::optional<double> bound;
  std::optional<double> truth_a, truth_b;  // distances from the truth
  std::string beyond;                      // "A", "B", or "both" where there is no truth; "": within

  double distance() const;
  // Of what may be: distance / bound. 0 where there is no bound.
  double share() const { return bound && *bound > 0 ? distance() / *bound : 0; }
  std::string IndexText(int64_t element) const;  // "[3, 7]"
};

struct TraceDifference {
  bool by_rounding = false, by_truth = false;
  bool wholes = false;                      // virtual shards put together
  double unit_roundoff = 0;                 // by rounding
  std::vector<ComparedOp> ops;              // that both have, in A's order of execution
  std::vector<std::string> only_a, only_b;  // ops
  std::vector<std::string> shapes;          // "NAME: [2, 3] and [3, 2]"

  const ComparedOp* FirstDiffering() const;
  const ComparedOp* FirstBeyond() const;
  int64_t differing() const;
  int64_t beyond() const;
  int64_t judged() const;    // that have a bound
  int64_t unjudged() const;  // that differ and have none
  bool same() const;       // nothing differs, or nothing beyond rounding
};

struct TraceDiffOptions {
  std::function<bool(std::string_view name)> only = {};
  bool rounding = false;
  const TraceFile* truth = nullptr;  // of the same update, computed in FP64
};

// Were the two made by different programs, or under different precision policies?
bool AreOfDifferentPrecision(const TraceFile& a, const TraceFile& b);

// Errors: kUsage where they have no op in common, or no elements of one where these are needed;
// kUnsupported for digests alone of different V.
Result<TraceDifference> DiffTraces(const TraceFile& a, const TraceFile& b,
                                   const TraceDiffOptions& options);

// In bits, of elements read exactly.
TensorDifference DiffElements(const std::vector<double>& a, TensorType type_a,
                              const std::vector<double>& b, TensorType type_b, int64_t cols);

}  // namespace retrace

#endif  // RETRACE_REPLAY_TRACE_DIFF_H_
