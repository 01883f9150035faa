// Donor: a state of another run, for interventions that take something from it. Used by graft and
// average.
#ifndef RETRACE_SURGERY_DONOR_H_
#define RETRACE_SURGERY_DONOR_H_

#include <functional>
#include <memory>

#include "surgery/intervention.h"

namespace retrace {

// The parameters `from`, `at` and `digest`.
Status CheckDonorArguments(const Arguments& arguments);

// What the other run's ledger says of its position. Errors: kUsage; kDamaged for a damaged ledger.
Result<PositionEntry> FindDonor(const Arguments& arguments);

// `digest` becomes that of the other run's state: another state at that place is then refused.
Status ResolveDonor(Arguments* arguments);

// All of RUN@k, in this process.
struct Donor {
  Layout layout;
  State state;
};

// Collective: every rank reads the whole state, or all fail. Every tensor that `only` matches has
// to be there with the shape that the job has. Errors: kUsage. A donor that somebody holds already,
// with the digest that the ledger has now, is not read again.
Result<std::shared_ptr<const Donor>> ReadDonor(const Arguments& arguments, Job& job);

// Calls visit(mine, others, n) for every run of elements of a component that this rank's shards and
// the donor have in common, whatever the shards of either.
void ForEachCommonRun(
    const Donor& donor, const std::string& only, Component component, Job& job,
    const std::function<void(float* mine, const float* others, int64_t n)>& visit);

// "p+m+v" -> parts, each of `known` and once. Errors: kUsage.
Result<std::vector<std::string>> PartsArgument(const Arguments& arguments, const std::string& name,
                                               const std::vector<std::string>& known);

}  // namespace retrace

#endif  // RETRACE_SURGERY_DONOR_H_
