// NoReturn: the point of no return of a spike: the last update at which an intervention still
// prevents it. Used by `retrace bisect RUN --spike --do X`. Not thread-safe.
//
// X as of update k acts from k on (a change of state: just before update k), and whether it prevents
// the spike is decided on an ensemble of branches of the recorded RUN@(k-1) (prevention.h). The
// update S at which the recording first satisfies the predicate is too late by definition: what its
// record says was there before it. Between, updates are bisected: first for the last "yes", then
// for the first "no" behind it, with "undecided" between them. That answers rise and fall with k only
// once is checked, not assumed: further updates on both sides are probed, and each that says
// otherwise is reported.
#ifndef RETRACE_SURGERY_NO_RETURN_H_
#define RETRACE_SURGERY_NO_RETURN_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "surgery/prevention.h"

namespace retrace {

struct NoReturn {
  int64_t first = 0, spike = 0;          // A and S
  std::map<int64_t, Prevention> probes;  // by update
  int64_t asked = 0;                     // of the last probe
  bool complete = false;                 // else the budget was spent before the end
  std::vector<int64_t> violations;       // probed updates that break the order

  // The last "yes" of those that bound the boundary, and the first "no" behind it; S is a "no".
  std::optional<int64_t> last_prevented;
  int64_t first_not = 0;

  // The two are neighbours, or all between them was probed and is undecided.
  bool Decided() const;
  std::vector<int64_t> Undecided() const;  // between the two
};

struct NoReturnOptions {
  int64_t checks = 2;  // further updates probed on each side
  std::function<void(const NoReturn&)> progress;  // after each probe: the best so far
};

// `interventions` have no dates. Errors: kUsage where the recording does not spike, or does at the
// range's first update; those of PreventionTrials.
Result<NoReturn> FindNoReturn(PreventionTrials& trials,
                              const std::vector<Intervention>& interventions,
                              const NoReturnOptions& options);

// Probes that it makes at the most, for updates A..S-1.
int64_t NoReturnProbes(int64_t first, int64_t spike, int64_t checks);

}  // namespace retrace

#endif  // RETRACE_SURGERY_NO_RETURN_H_
