#include "replay/timeline.h"

#include <fmt/format.h>

#include <filesystem>

#include "replay/journal_walk.h"
#include "replay/state_digest.h"

namespace retrace {
namespace {

std::string ReachablePositions(const RunHistory& history) {
  std::string text;
  int64_t first = -1;
  for (int64_t k = history.first_position(); k <= history.last_position() + 1; ++k) {
    const bool reachable = k <= history.last_position() && history.NearestKeyframe(k).has_value();
    if (reachable && first < 0) first = k;
    if (!reachable && first >= 0) {
      text += fmt::format("{}{}", text.empty() ? "" : ", ",
                          first == k - 1 ? fmt::format("{}", first)
                                         : fmt::format("{}..{}", first, k - 1));
      first = -1;
    }
  }
  return text.empty() ? "none" : text;
}

}  // namespace

Result<SeekPlan> Timeline::Plan(int64_t position) const {
  const RunHistory& history = run_.history();
  if (history.Find(position) == nullptr) {
    return UsageError(fmt::format("{}@{}: the run has positions {}..{}", run_.dir(), position,
                                  history.first_position(), history.last_position()));
  }
  const std::optional<int64_t> keyframe = history.NearestKeyframe(position);
  if (!keyframe) {
    return UsageError(
        fmt::format("{}@{}: this state is not kept; kept are {}. 'retrace replay {} --steps K..{}' "
                    "rebuilds it from a kept state K-1",
                    run_.dir(), position, ReachablePositions(history), run_.dir(), position));
  }
  SeekPlan plan{.keyframe = *keyframe, .journals = position - *keyframe};
  plan.bytes = layout_.parameters() * static_cast<int64_t>(sizeof(float)) *
               (kNumComponents + plan.journals);
  return plan;
}

int64_t Timeline::LastReachable(int64_t position) const {
  const RunHistory& history = run_.history();
  for (int64_t k = std::min(position, history.last_position()); k >= history.first_position();
       --k) {
    if (history.NearestKeyframe(k)) return k;
  }
  return -1;
}

namespace {

// A walk proves its journals by the digests of files. -> what is hit, where those of single tensors
// find something.
Status CheckTensors(const RunReader& run, const Layout& layout, const SeekPlan& plan) {
  Journal journal;
  for (int64_t k = plan.keyframe + 1; k <= plan.keyframe + plan.journals; ++k) {
    RT_RETURN_IF_ERROR(run.ReadJournal(layout, k, 0, layout.shards(), &journal));
  }
  return {};
}

}  // namespace

// On an error *state is not to be used.
Status Timeline::Walk(State* state) const {
  const int64_t update = state->counters.position + 1;
  return JournalWalk(run_, layout_, engine_, update, update, state->first_shard,
                     static_cast<int>(state->shards.size()))
      .Next(state);
}

Result<State> Timeline::Seek(int64_t position, int first_shard, int shard_count) const {
  RT_ASSIGN_OR_RETURN(const SeekPlan plan, Plan(position));
  State state = MakeState(layout_, first_shard, shard_count);
  RT_RETURN_IF_ERROR(
      run_.ReadKeyframe(layout_, plan.keyframe, first_shard, shard_count, &state));
  JournalWalk walk(run_, layout_, engine_, plan.keyframe + 1, position, first_shard, shard_count);
  while (state.counters.position < position) RT_RETURN_IF_ERROR(walk.Next(&state));
  if (shard_count == layout_.shards() && plan.journals > 0) {
    const Digest got = StateDigest(engine_, layout_, state), expected = run_.history().Find(position)->digest;
    if (got != expected) {
      RT_RETURN_IF_ERROR(CheckTensors(run_, layout_, plan));
      return DamagedError(fmt::format(
          "{}@{}: the walk from keyframe {} gave digest {}, the ledger says {}; run 'retrace verify "
          "{}'",
          run_.dir(), position, plan.keyframe, got.Hex(), expected.Hex(), run_.dir()));
    }
  }
  return state;
}

Result<StateAddress> ParseStateAddress(const std::string& text) {
  StateAddress address;
  std::error_code ignored;
  if (std::filesystem::is_directory(text, ignored)) {  // whose name may hold an @
    address.run = text;
    return address;
  }
  std::string rest = text;
  const size_t at = rest.rfind('@');
  if (at == std::string::npos) {
    address.run = rest;
    return address;
  }
  address.run = rest.substr(0, at);
  rest = rest.substr(at + 1);
  const size_t colon = rest.find(':');
  const std::string number = rest.substr(0, colon);
  if (address.run.empty() || number.empty() || number.size() > 18 ||
      number.find_first_not_of("0123456789") != std::string::npos) {
    return UsageError("'" + text + "': expected RUN, RUN@k or RUN@k:TENSOR with k a position, as in "
                      "runs/demo@12:model.layers.0.*#m");
  }
  address.position = std::stoll(number);
  if (colon == std::string::npos) return address;
  address.glob = rest.substr(colon + 1);
  const size_t hash = address.glob.rfind('#');
  if (hash == std::string::npos) return address;
  address.component = address.glob.substr(hash + 1);
  address.glob.resize(hash);
  if (address.component != "m" && address.component != "v" && address.component != "g" &&
      address.component != "p") {
    return UsageError("'" + text + "': expected #m, #v or #g behind the tensor, got '#" +
                      address.component + "'");
  }
  return address;
}

}  // namespace retrace
