#include "surgery/no_return.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

namespace retrace {
namespace {

class Search {
 public:
  Search(PreventionTrials& trials, const std::vector<Intervention>& interventions,
         const NoReturnOptions& options, NoReturn* found)
      : trials_(trials), interventions_(interventions), options_(options), found_(*found) {}

  // false: the budget is spent.
  Result<bool> Run();

 private:
  // nullptr: the budget is spent.
  Result<const Prevention*> Probe(int64_t update);
  // The last update in [low, high) whose answer is at least `least`, given that of low is and that
  // of high is not, if there is one boundary. nullopt: the budget is spent.
  Result<std::optional<int64_t>> Boundary(int64_t low, int64_t high, Prevents least);
  Result<bool> CheckOrder();
  void Conclude();

  PreventionTrials& trials_;
  const std::vector<Intervention>& interventions_;
  const NoReturnOptions& options_;
  NoReturn& found_;
};

Result<const Prevention*> Search::Probe(int64_t update) {
  const auto known = found_.probes.find(update);
  if (known != found_.probes.end()) return static_cast<const Prevention*>(&known->second);
  RT_ASSIGN_OR_RETURN(const std::optional<Prevention> prevention,
                      trials_.Decide(update, interventions_));
  if (!prevention) return static_cast<const Prevention*>(nullptr);
  const Prevention* kept = &(found_.probes[update] = *prevention);
  found_.asked = update;
  Conclude();
  if (options_.progress) options_.progress(found_);
  return kept;
}

Result<std::optional<int64_t>> Search::Boundary(int64_t low, int64_t high, Prevents least) {
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    RT_ASSIGN_OR_RETURN(const Prevention* prevention, Probe(middle));
    if (prevention == nullptr) return std::optional<int64_t>();
    (prevention->answer >= least ? low : high) = middle;
  }
  return std::optional<int64_t>(low);
}

// `count` updates of [first, last] that were not probed, evenly apart.
std::vector<int64_t> Between(int64_t first, int64_t last, int64_t count,
                             const std::map<int64_t, Prevention>& probes) {
  std::vector<int64_t> open, chosen;
  for (int64_t k = first; k <= last; ++k) {
    if (!probes.contains(k)) open.push_back(k);
  }
  const int64_t n = std::ssize(open);
  for (int64_t i = 0; i < std::min(count, n); ++i) {
    chosen.push_back(open[(2 * i + 1) * n / (2 * std::min(count, n))]);
  }
  return chosen;
}

Result<bool> Search::CheckOrder() {
  std::vector<int64_t> points;
  if (found_.last_prevented) {
    points = Between(found_.first, *found_.last_prevented - 1, options_.checks, found_.probes);
  }
  const std::vector<int64_t> behind =
      Between(found_.first_not, found_.spike - 1, options_.checks, found_.probes);
  points.insert(points.end(), behind.begin(), behind.end());
  const std::optional<int64_t> last = found_.last_prevented;
  const int64_t first = found_.first_not;
  for (const int64_t update : points) {
    RT_ASSIGN_OR_RETURN(const Prevention* prevention, Probe(update));
    if (prevention == nullptr) return false;
  }
  // What was found stays; what says otherwise is a violation.
  found_.last_prevented = last;
  found_.first_not = first;
  return true;
}

// From the probes alone: the last "yes" before the first "no".
void Search::Conclude() {
  found_.last_prevented.reset();
  found_.first_not = found_.spike;
  for (const auto& [update, prevention] : found_.probes) {
    if (prevention.answer == Prevents::kNo) {
      found_.first_not = update;
      break;
    }
    if (prevention.answer == Prevents::kYes) found_.last_prevented = update;
  }
}

Result<bool> Search::Run() {
  RT_ASSIGN_OR_RETURN(const Prevention* first, Probe(found_.first));
  if (first == nullptr) return false;
  int64_t low = found_.first - 1;  // as if "yes", where the first is none
  if (first->answer == Prevents::kYes) {
    RT_ASSIGN_OR_RETURN(const std::optional<int64_t> yes,
                        Boundary(found_.first, found_.spike, Prevents::kYes));
    if (!yes) return false;
    low = *yes;
  }
  if (first->answer != Prevents::kNo) {
    RT_ASSIGN_OR_RETURN(const std::optional<int64_t> no,
                        Boundary(std::max(low, found_.first), found_.spike, Prevents::kUndecided));
    if (!no) return false;
  }
  Conclude();
  return CheckOrder();
}

}  // namespace

bool NoReturn::Decided() const {
  const int64_t from = last_prevented.value_or(first - 1);
  for (int64_t k = from + 1; k < first_not; ++k) {
    if (!probes.contains(k)) return false;
  }
  return true;
}

std::vector<int64_t> NoReturn::Undecided() const {
  std::vector<int64_t> updates;
  for (const auto& [update, prevention] : probes) {
    const bool between = update > last_prevented.value_or(first - 1) && update < first_not;
    if (between && prevention.answer == Prevents::kUndecided) updates.push_back(update);
  }
  return updates;
}

Result<NoReturn> FindNoReturn(PreventionTrials& trials,
                              const std::vector<Intervention>& interventions,
                              const NoReturnOptions& options) {
  NoReturn found;
  found.first = trials.records().front().update;
  const std::optional<int64_t> spike = trials.RecordedSpike();
  const int64_t last = trials.records().back().update;
  if (!spike) {
    return UsageError(fmt::format("the recording shows no spike in updates {}..{}", found.first,
                                  last));
  }
  if (*spike == found.first) {
    return UsageError(fmt::format("the recording satisfies the predicate at update {} already, the "
                                  "first of the range: nothing lies before it", *spike));
  }
  found.spike = found.first_not = *spike;
  Search search(trials, interventions, options, &found);
  RT_ASSIGN_OR_RETURN(found.complete, search.Run());
  for (const auto& [update, prevention] : found.probes) {
    const bool early = update < found.last_prevented.value_or(found.first);
    const bool late = update > found.first_not;
    if ((early && prevention.answer != Prevents::kYes) ||
        (late && prevention.answer != Prevents::kNo)) {
      found.violations.push_back(update);
    }
  }
  return found;
}

int64_t NoReturnProbes(int64_t first, int64_t spike, int64_t checks) {
  const int64_t updates = spike - first;
  const auto bisected = 2 * static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(updates)));
  return std::min(updates, 1 + bisected + 2 * checks);
}

}  // namespace retrace
