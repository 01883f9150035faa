// The searches of `retrace bisect` that live ensembles: flags, options and printing that the point
// of no return (bisect_spike.cc) and the cause (bisect_cause.cc) have in common.
#ifndef RETRACE_CMD_BISECT_SEARCH_H_
#define RETRACE_CMD_BISECT_SEARCH_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cmd/console.h"
#include "surgery/prevention.h"

namespace retrace {

// Exit code of a search that ended without an answer: the budget was spent, it was stopped, the
// control differs.
inline constexpr int kNoAnswer = 1;

struct BisectFlags {
  std::string run;
  std::vector<std::string> interventions;  // --do
  std::string healthy;
  int64_t at = 0;                          // of --cause: the update; 0: the range's first
  std::string components;                  // of --cause
  std::string steps, predicate = "jump > 0.5", out;
  int64_t replicas = 12, checks = 2, budget = 0;
  double sigma = 0;  // 0: the ladder
  int jobs = 1, threads = 0;
  std::string isa = "best";
  bool dry_run = false;
  OutputFlags output;
};

void AddSearchFlags(CLI::App* bisect, BisectFlags* flags);

// The two forms. Each ends the program with kNoAnswer where there is no answer.
void RunBisectSpike(const BisectFlags& flags);
void RunBisectCause(const BisectFlags& flags);

// A search under way: its trials, and what it prints while it lasts. At Ctrl-C it prints the best
// so far and ends the program: what is finished is in the log and is not repeated.
class SearchSession {
 public:
  // `name`: of the default --out, RUN-NAME. Ends the program on errors.
  SearchSession(const BisectFlags& flags, const RunReader& run, const std::string& name);

  PreventionTrials& trials() { return *trials_; }
  const UpdateRange& range() const { return range_; }
  int64_t spike() const { return spike_; }
  const std::string& out() const { return out_; }

  // Says what the search may cost, in words and in updates at the most; with --dry-run that is all,
  // and the program ends.
  void Forecast(const std::string& questions, int64_t updates);
  // Proves the control; ends the program where it differs.
  void Prove();
  // What to print at Ctrl-C: text, or JSON with --json.
  void set_best(std::string best);
  void Say(const std::string& line);
  void Finish() { progress_.reset(); }

 private:
  void ChooseRange(const RunReader& run);
  void Show(const PreventionProgress& at);

  const BisectFlags& flags_;
  UpdateRange range_;
  int64_t spike_ = 0;
  std::string out_;
  std::optional<SpikePredicate> predicate_;
  std::unique_ptr<PreventionTrials> trials_;
  std::unique_ptr<Progress> progress_;
  std::string best_;
};

// "6 of 12"
std::string OfText(int64_t part, int64_t all);
// The noise of an answer: "1.5e-05", "9.8e-04, not saturated", "9.8e-04, given".
std::string NoiseText(const Prevention& prevention);
// What claims hold for: "this run", or "this exact trajectory" where some noise is not saturated.
const char* ScopeOf(const std::vector<const Prevention*>& preventions);

}  // namespace retrace

#endif  // RETRACE_CMD_BISECT_SEARCH_H_
