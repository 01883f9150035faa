// CauseSearch: the smallest part of a state, and of the data, whose transplant from a healthy run
// prevents a spike. Used by `retrace bisect RUN --cause`. Not thread-safe.
//
// Members are components (w, m, v) of groups of tensors, and the data. A set is tried as a branch of
// RUN@(k-1) in which they are replaced, just before update k, by what the healthy run has at the same
// position; or, where no healthy run is given, are reset: w as the run began, m = 0, v = g^2 of the
// coming gradient, and the batches up to the spike passed over. Whether that prevents the spike is
// decided on an ensemble (prevention.h); "undecided" counts as no.
//
// The search goes down the tree of tensors (tensor_tree.h), model to tensors: at each level delta
// debugging leaves a set of which no member can be spared (delta_debug.h), whose members are then
// divided. What is equal in both runs, bit for bit, is no candidate. At the end the set is confirmed
// with fresh replicas: it prevents the spike, and without any one member it does not; a member that can be
// spared after all is dropped.
#ifndef RETRACE_SURGERY_CAUSE_SEARCH_H_
#define RETRACE_SURGERY_CAUSE_SEARCH_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "surgery/donor.h"
#include "surgery/prevention.h"
#include "surgery/tensor_tree.h"

namespace retrace {

enum class CausePart { kW, kM, kV, kData };
inline constexpr int kCauseParts = 4;
const char* CausePartName(CausePart part);  // "w", "m", "v", "data"

struct CauseMember {
  CausePart part = CausePart::kW;
  TensorGroup group;  // not of the data

  std::string Name() const;  // "v of layer 3 mlp", "data"
};

struct CauseOptions {
  int64_t at = 0;       // k: the transplant is made just before update k
  std::string healthy;  // directory of the other run; "": reset
  int64_t spike = 0;    // of the recording
  std::array<bool, kCauseParts> parts = {true, true, true, true};
};

struct Cause {
  std::vector<CauseMember> members;  // the smallest set so far that prevents the spike
  TreeLevel level = TreeLevel::kModel;
  int64_t candidates = 0, equal = 0;  // (component x tensor): that differ, and that do not
  std::string left_out;               // why the data is no candidate, though it was asked for
  bool control_spikes = true;         // else there is nothing to prevent
  bool prevented = false;             // all candidates together prevent it
  bool complete = false;              // else the budget was spent
  int64_t questions = 0;
  // With fresh replicas: the set, and the set without each member.
  std::optional<Prevention> whole;  // of the first replicas until then
  std::vector<Prevention> spared;
  bool confirmed = false;
  int64_t dropped = 0;  // members that fresh replicas could spare
};

class CauseSearch {
 public:
  // `run` and `trials` outlive it. Errors: kUsage where the healthy run does not fit, or nothing
  // differs.
  static Result<std::unique_ptr<CauseSearch>> Make(const RunReader& run, PreventionTrials& trials,
                                                   const CauseOptions& options);

  // `progress`: after each question.
  Result<Cause> Run(const std::function<void(const Cause&)>& progress);

  int64_t candidates() const { return best_.candidates; }
  int64_t equal() const { return best_.equal; }
  // Questions that one guilty tensor would take, about.
  int64_t QuestionsForOne() const;

 private:
  CauseSearch(const RunReader& run, PreventionTrials& trials, const CauseOptions& options)
      : run_(run), trials_(trials), options_(options) {}
  Status FindCandidates();
  Status CompareWithHealthy();
  void ResetData();
  Status Compare(Job& job);
  std::vector<CauseMember> MembersAt(TreeLevel level) const;
  std::vector<CauseMember> Divide(const std::vector<CauseMember>& members) const;
  bool Differs(const CauseMember& member) const;
  Result<std::vector<Intervention>> InterventionsOf(const std::vector<CauseMember>& members) const;
  std::vector<std::string> TextsOf(const std::string& glob, const std::vector<CausePart>& parts) const;
  // nullopt: the budget is spent.
  Result<std::optional<Prevention>> Ask(const std::vector<CauseMember>& members, int64_t seed);
  Result<bool> Descend();
  Result<bool> Confirm();

  const RunReader& run_;
  PreventionTrials& trials_;
  const CauseOptions options_;
  std::array<std::vector<bool>, 3> differs_;  // [component][tensor]
  std::vector<std::string> data_;             // interventions that replace the data; none: equal
  std::string healthy_digest_;
  std::shared_ptr<const Donor> donor_;        // held, so that no replica reads it again
  std::function<void(const Cause&)> progress_;
  Cause best_;
};

}  // namespace retrace

#endif  // RETRACE_SURGERY_CAUSE_SEARCH_H_
