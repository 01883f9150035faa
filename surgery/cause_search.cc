#include "surgery/cause_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/recipe_toml.h"
#include "replay/solo_comm.h"
#include "surgery/delta_debug.h"
#include "surgery/donor.h"

namespace retrace {
namespace {

constexpr int64_t kFirstSeed = 1, kFreshSeed = 1001;
constexpr CausePart kStateParts[] = {CausePart::kW, CausePart::kM, CausePart::kV};

Result<Intervention> Graft(const CauseOptions& options, const std::string& digest,
                           const std::string& what, const std::string& only) {
  return ParseIntervention(fmt::format("graft:from={},at={},what={},digest={},only={}@{}",
                                       options.healthy, options.at - 1, what, digest, only,
                                       options.at));
}

std::vector<CauseMember> Chosen(const std::vector<CauseMember>& members,
                                const std::vector<int>& part) {
  std::vector<CauseMember> chosen;
  for (int i : part) chosen.push_back(members[i]);
  return chosen;
}

// The samples that an update consumes, as far as recipe and cursor say it.
bool SameSamples(const Recipe& a, const Recipe& b) {
  return SameDataset(a.data, b.data) && a.data.seed == b.data.seed && a.data.split == b.data.split;
}

}  // namespace

const char* CausePartName(CausePart part) {
  static constexpr const char* kNames[] = {"w", "m", "v", "data"};
  return kNames[static_cast<int>(part)];
}

std::string CauseMember::Name() const {
  if (part == CausePart::kData) return "the data";
  return fmt::format("{} of {}", CausePartName(part),
                     group.level == TreeLevel::kModel ? "all tensors" : group.name);
}

Result<std::unique_ptr<CauseSearch>> CauseSearch::Make(const RunReader& run,
                                                       PreventionTrials& trials,
                                                       const CauseOptions& options) {
  RT_CHECK(run.history().Find(options.at - 1) != nullptr);
  std::unique_ptr<CauseSearch> search(new CauseSearch(run, trials, options));
  RT_RETURN_IF_ERROR(search->FindCandidates());
  const std::vector<CauseMember> all = search->MembersAt(TreeLevel::kModel);
  if (all.empty() && options.healthy.empty()) {
    return UsageError("nothing is left to reset: " + search->best_.left_out);
  }
  if (all.empty()) {
    return UsageError(fmt::format("{}@{} and {}@{} are equal in all that is asked about: nothing "
                                  "there can be the cause; choose an earlier healthy run or a later "
                                  "update",
                                  run.dir(), options.at - 1, options.healthy, options.at - 1));
  }
  RT_ASSIGN_OR_RETURN(const std::vector<Intervention> interventions,
                      search->InterventionsOf(all));
  RT_RETURN_IF_ERROR(trials.Check(options.at, interventions));
  return search;
}

// ---- Candidates ----

Status CauseSearch::FindCandidates() {
  const size_t tensors = trials_.layout().tensors().size();
  for (CausePart part : kStateParts) {
    const auto p = static_cast<size_t>(part);
    differs_[p].assign(tensors, options_.parts[p]);
  }
  if (!options_.healthy.empty()) {
    RT_RETURN_IF_ERROR(CompareWithHealthy());
  } else if (options_.parts[static_cast<size_t>(CausePart::kData)]) {
    ResetData();
  }
  for (CausePart part : kStateParts) {
    const auto p = static_cast<size_t>(part);
    if (!options_.parts[p]) continue;
    const int64_t differing = std::count(differs_[p].begin(), differs_[p].end(), true);
    best_.candidates += differing;
    best_.equal += static_cast<int64_t>(tensors) - differing;
  }
  if (!data_.empty()) ++best_.candidates;
  return {};
}

// The batches up to the spike are passed over, where the recipe plans as many samples behind them.
void CauseSearch::ResetData() {
  const int64_t batches = std::max<int64_t>(1, options_.spike - options_.at);
  const int64_t updates = batches + trials_.records().back().update - options_.at + 1;
  const Recipe& recipe = trials_.recipe();
  const int64_t samples = recipe.data.SamplesPerStep();
  const int64_t cursor = run_.history().Find(options_.at - 1)->counters.data_cursor;
  if (cursor + updates * samples > recipe.steps * samples) {
    best_.left_out = fmt::format("the recipe plans no samples for {} batches behind the spike",
                                 batches);
    return;
  }
  data_ = {fmt::format("skip-batch:count={}@{}", batches, options_.at)};
}

// Bits of the two states, and what the updates consume.
Status CauseSearch::CompareWithHealthy() {
  if (options_.healthy.find(',') != std::string::npos) {
    return UsageError("--healthy " + options_.healthy + ": a path with a comma can not stand in an "
                      "intervention; give it another name, or a link");
  }
  RT_ASSIGN_OR_RETURN(const RunReader healthy, RunReader::Open(options_.healthy));
  const PositionEntry* entry = healthy.history().Find(options_.at - 1);
  if (entry == nullptr) {
    return UsageError(fmt::format("--healthy {}: it has positions {}..{}, and the transplant needs "
                                  "{}@{}",
                                  options_.healthy, healthy.history().first_position(),
                                  healthy.history().last_position(), options_.healthy,
                                  options_.at - 1));
  }
  healthy_digest_ = entry->digest.Hex();
  SoloComm comm;
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(trials_.recipe(), comm, {}));
  RT_RETURN_IF_ERROR(GoBefore(run_, *job, options_.at));
  RT_RETURN_IF_ERROR(Compare(*job));
  if (!options_.parts[static_cast<size_t>(CausePart::kData)]) return {};
  RT_ASSIGN_OR_RETURN(const Recipe other, ParseRecipe(healthy.recipe_text(),
                                                      options_.healthy + "/" + kRecipeName));
  if (!SameSamples(trials_.recipe(), other)) {
    std::string split = other.data.split;
    std::replace(split.begin(), split.end(), ',', '+');
    data_.push_back(fmt::format("replace-data:path={},split={},seed={}@{}..{}", other.data.path,
                                split, other.data.seed, options_.at,
                                trials_.records().back().update));
  }
  if (job->state().state.counters.data_cursor != entry->counters.data_cursor || !data_.empty()) {
    RT_ASSIGN_OR_RETURN(const Intervention cursor, Graft(options_, healthy_digest_, "cursor", "*"));
    data_.push_back(cursor.Text());
  }
  return {};
}

Status CauseSearch::Compare(Job& job) {
  RT_ASSIGN_OR_RETURN(const Intervention graft, Graft(options_, healthy_digest_, "p+m+v", "*"));
  RT_ASSIGN_OR_RETURN(donor_, ReadDonor(graft.arguments, job));
  for (CausePart part : kStateParts) {
    std::vector<bool>& differs = differs_[static_cast<size_t>(part)];
    for (size_t t = 0; t < differs.size(); ++t) {
      if (!differs[t]) continue;  // not asked about
      bool equal = true;
      ForEachCommonRun(*donor_, job.layout().tensors()[t].name, static_cast<Component>(part), job,
                       [&](float* mine, const float* others, int64_t n) {
                         equal = equal && std::memcmp(mine, others, n * sizeof(float)) == 0;
                       });
      differs[t] = !equal;
    }
  }
  return {};
}

bool CauseSearch::Differs(const CauseMember& member) const {
  if (member.part == CausePart::kData) return !data_.empty();
  const std::vector<bool>& differs = differs_[static_cast<size_t>(member.part)];
  return std::any_of(member.group.tensors.begin(), member.group.tensors.end(),
                     [&](int t) { return differs[t]; });
}

std::vector<CauseMember> CauseSearch::MembersAt(TreeLevel level) const {
  std::vector<CauseMember> members;
  for (CausePart part : kStateParts) {
    for (const TensorGroup& group : GroupsAt(trials_.layout(), level)) {
      members.push_back({part, group});
    }
  }
  members.push_back({CausePart::kData, {}});
  std::erase_if(members, [&](const CauseMember& member) { return !Differs(member); });
  return members;
}

std::vector<CauseMember> CauseSearch::Divide(const std::vector<CauseMember>& members) const {
  std::vector<CauseMember> divided;
  for (const CauseMember& member : members) {
    if (member.part == CausePart::kData) {
      divided.push_back(member);
      continue;
    }
    for (TensorGroup& group : PartsOf(trials_.layout(), member.group)) {
      divided.push_back({member.part, std::move(group)});
    }
  }
  std::erase_if(divided, [&](const CauseMember& member) { return !Differs(member); });
  return divided;
}

// ---- Trying a set ----

// What replaces some components of the tensors that a glob matches.
std::vector<std::string> CauseSearch::TextsOf(const std::string& glob,
                                              const std::vector<CausePart>& parts) const {
  std::vector<std::string> texts;
  if (!options_.healthy.empty()) {
    std::string what;
    for (CausePart part : parts) {
      const char* name = part == CausePart::kW ? "p" : CausePartName(part);
      what += (what.empty() ? "" : "+") + std::string(name);
    }
    texts.push_back(fmt::format("graft:from={},at={},what={},digest={},only={}@{}",
                                options_.healthy, options_.at - 1, what, healthy_digest_, glob,
                                options_.at));
    return texts;
  }
  for (CausePart part : parts) {
    const char* reset = part == CausePart::kW   ? "init:scheme=recipe"
                        : part == CausePart::kM ? "reset-moments:m,t=keep"
                                                : "rewarm-v:square,gradient=clipped";
    texts.push_back(fmt::format("{},only={}@{}", reset, glob, options_.at));
  }
  return texts;
}

// In the order of the tree; components of one group together, so that a donor is read once for them.
Result<std::vector<Intervention>> CauseSearch::InterventionsOf(
    const std::vector<CauseMember>& members) const {
  std::vector<std::pair<std::string, std::vector<CausePart>>> groups;  // by glob
  bool data = false;
  for (const CauseMember& member : members) {
    if (member.part == CausePart::kData) {
      data = true;
      continue;
    }
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& g) { return g.first == member.group.glob; });
    if (group == groups.end()) group = groups.insert(groups.end(), {member.group.glob, {}});
    group->second.push_back(member.part);
  }
  std::vector<std::string> texts;
  for (const auto& [glob, parts] : groups) {
    for (std::string& text : TextsOf(glob, parts)) texts.push_back(std::move(text));
  }
  // What looks at the coming gradient comes last: it is that of the state with all else replaced.
  std::stable_partition(texts.begin(), texts.end(),
                        [](const std::string& text) { return !text.starts_with("rewarm-v"); });
  if (data) texts.insert(texts.begin(), data_.begin(), data_.end());
  std::vector<Intervention> interventions;
  for (const std::string& text : texts) {
    RT_ASSIGN_OR_RETURN(Intervention one, ParseIntervention(text));
    interventions.push_back(std::move(one));
  }
  return interventions;
}

Result<std::optional<Prevention>> CauseSearch::Ask(const std::vector<CauseMember>& members,
                                                   int64_t seed) {
  RT_ASSIGN_OR_RETURN(const std::vector<Intervention> interventions, InterventionsOf(members));
  RT_ASSIGN_OR_RETURN(std::optional<Prevention> prevention,
                      trials_.Decide(options_.at, interventions, seed));
  if (!prevention) return prevention;
  ++best_.questions;
  if (progress_) progress_(best_);
  return prevention;
}

// ---- The search ----

int64_t CauseSearch::QuestionsForOne() const {
  const auto bits = [](int64_t n) {
    return 2 * static_cast<int64_t>(std::bit_width(static_cast<uint64_t>(n)));
  };
  const std::vector<TensorGroup> layers = GroupsAt(trials_.layout(), TreeLevel::kLayer);
  size_t widest = 0;
  for (const TensorGroup& layer : layers) widest = std::max(widest, layer.tensors.size());
  // The model's components, layers, three blocks and a block's tensors; the set, and without its one.
  return 1 + bits(kCauseParts) + bits(std::ssize(layers)) + bits(3) +
         bits(static_cast<int64_t>(widest)) + 2;
}

// From the model down to tensors. false: the budget is spent.
Result<bool> CauseSearch::Descend() {
  while (true) {
    const std::vector<CauseMember> members = best_.members;
    const AskPart ask = [&](const std::vector<int>& part) -> Result<std::optional<bool>> {
      RT_ASSIGN_OR_RETURN(const std::optional<Prevention> prevention,
                          Ask(Chosen(members, part), kFirstSeed));
      if (!prevention) return std::optional<bool>();
      if (prevention->answer == Prevents::kYes) best_.whole = prevention;
      return std::optional<bool>(prevention->answer == Prevents::kYes);
    };
    RT_ASSIGN_OR_RETURN(const SmallestPart smallest,
                        FindSmallestPart(static_cast<int>(members.size()), ask,
                                         [&](const std::vector<int>& part) {
                                           best_.members = Chosen(members, part);
                                           if (progress_) progress_(best_);
                                         }));
    if (!smallest.complete) return false;
    if (best_.level == TreeLevel::kTensor) return true;
    best_.level = static_cast<TreeLevel>(static_cast<int>(best_.level) + 1);
    best_.members = Divide(best_.members);
  }
}

// With fresh replicas. false: the budget is spent.
Result<bool> CauseSearch::Confirm() {
  while (true) {
    RT_ASSIGN_OR_RETURN(const std::optional<Prevention> whole, Ask(best_.members, kFreshSeed));
    if (!whole) return false;
    best_.whole = whole;
    best_.spared.clear();
    bool shrunk = false;
    for (size_t i = 0; i < best_.members.size() && !shrunk; ++i) {
      std::vector<CauseMember> rest = best_.members;
      rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(i));
      RT_ASSIGN_OR_RETURN(const std::optional<Prevention> without, Ask(rest, kFreshSeed));
      if (!without) return false;
      best_.spared.push_back(*without);
      if (without->answer != Prevents::kYes || rest.empty()) continue;
      best_.members = std::move(rest);
      ++best_.dropped;
      shrunk = true;
    }
    if (shrunk) continue;
    best_.confirmed =
        whole->answer == Prevents::kYes &&
        std::none_of(best_.spared.begin(), best_.spared.end(),
                     [](const Prevention& p) { return p.answer == Prevents::kYes; });
    return true;
  }
}

Result<Cause> CauseSearch::Run(const std::function<void(const Cause&)>& progress) {
  progress_ = progress;
  std::vector<CauseMember> all = MembersAt(TreeLevel::kModel);
  RT_ASSIGN_OR_RETURN(const std::optional<Prevention> whole, Ask(all, kFirstSeed));
  if (!whole) return best_;
  best_.control_spikes = whole->control_without < kPreventedShare * whole->control_replicas;
  best_.prevented = whole->answer == Prevents::kYes;
  best_.whole = whole;
  if (!best_.prevented || !best_.control_spikes) {
    best_.complete = true;
    return best_;
  }
  best_.members = std::move(all);
  RT_ASSIGN_OR_RETURN(const bool descended, Descend());
  if (!descended) return best_;
  RT_ASSIGN_OR_RETURN(best_.complete, Confirm());
  return best_;
}

}  // namespace retrace
