#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "cmd/bisect_search.h"
#include "cmd/text_table.h"
#include "core/nearest_name.h"
#include "surgery/cause_search.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

struct SearchedCause {
  const BisectFlags& flags;
  CauseOptions options;
  std::string out;
  UpdateRange range;

  bool transplants() const { return !options.healthy.empty(); }
  // "transplant from runs/healthy@4"
  std::string How() const {
    return transplants() ? fmt::format("transplant from {}@{}", options.healthy, options.at - 1)
                         : "reset";
  }
};

// w,m,v,data
std::array<bool, kCauseParts> PartsOf(const BisectFlags& flags) {
  if (flags.components.empty()) {
    // A tensor as the run began is far from where it is now: only where it is asked for.
    return {!flags.healthy.empty(), true, true, true};
  }
  std::vector<std::string> names;
  for (int p = 0; p < kCauseParts; ++p) names.push_back(CausePartName(static_cast<CausePart>(p)));
  std::array<bool, kCauseParts> parts = {};
  std::istringstream words(flags.components);
  for (std::string word; std::getline(words, word, ',');) {
    const auto at = std::find(names.begin(), names.end(), word);
    if (at == names.end()) {
      Fail(UsageError(fmt::format("--components: expected some of w, m, v, data, got '{}'; the "
                                  "nearest is '{}'",
                                  word, NearestName(word, names))));
    }
    parts[at - names.begin()] = true;
  }
  return parts;
}

std::vector<std::string> NamesOf(const Cause& cause) {
  std::vector<std::string> names;
  for (const CauseMember& member : cause.members) names.push_back(member.Name());
  return names;
}

// What was found, in a sentence or two.
std::string AnswerText(const SearchedCause& search, const Cause& cause) {
  if (!cause.control_spikes) {
    return fmt::format("Nothing to search: without any {}, noise alone prevents the spike in 80 % or "
                       "more of the replicas from update {}.\n",
                       search.transplants() ? "transplant" : "reset", search.options.at);
  }
  if (cause.complete && !cause.prevented) {
    return fmt::format("Not among them: the {} of all candidates together does not prevent the "
                       "spike. Its cause lies elsewhere, or update {} is too late.\n",
                       search.How(), search.options.at);
  }
  if (cause.members.empty()) return "Nothing is known yet.\n";
  std::string text = cause.complete
                         ? fmt::format("The smallest set found, whose {} prevents the spike:\n",
                                       search.How())
                         : fmt::format("The search is not at its end. The best so far, of {}s:\n",
                                       TreeLevelName(cause.level));
  for (const std::string& name : NamesOf(cause)) text += "  " + name + "\n";
  return text;
}

std::string ConfirmationText(const SearchedCause& search, const Cause& cause) {
  if (!cause.complete || !cause.prevented || !cause.control_spikes) return "";
  TextTable table({{"with fresh replicas", true}, {"prevents", true}, {"no spike"}});
  const auto add = [&](const std::string& what, const Prevention& p) {
    table.AddRow({what, PreventsName(p.answer), OfText(p.without, p.replicas)});
  };
  add("all of the set", *cause.whole);
  for (size_t i = 0; i < cause.spared.size(); ++i) {
    add("all but " + cause.members[i].Name(), cause.spared[i]);
  }
  std::string text = "\n" + table.Text(search.flags.output);
  text += cause.confirmed ? "Confirmed: it prevents the spike, and no member can be spared.\n"
                          : "NOT confirmed by fresh replicas.\n";
  if (cause.dropped > 0) {
    text += fmt::format("Fresh replicas could spare {} member{} that the search had kept.\n",
                        cause.dropped, cause.dropped > 1 ? "s" : "");
  }
  return text;
}

const char* ScopeText(const Cause& cause) {
  return cause.whole ? ScopeOf({&*cause.whole}) : ScopeOf({});
}

std::string Text(const SearchedCause& search, const Cause& cause, const PreventionTrials& trials) {
  std::string text = AnswerText(search, cause) + ConfirmationText(search, cause);
  if (search.flags.output.quiet) return text;
  const std::string noise = cause.whole ? NoiseText(*cause.whole) : "not known yet";
  text += fmt::format(
      "\nA spike: {}, at some update up to {}; the recording has it at update {}.\nEach replica is a "
      "branch of {}@{} with noise of its own ({}); the control without noise\nequals the recording "
      "bit for bit. {} component-tensors were candidates{}.\n{}Claims hold for {}. {} questions, {} "
      "updates were lived, {} replicas found in {}.\n",
      search.flags.predicate, search.range.last, search.options.spike, search.flags.run,
      search.options.at - 1, noise, Grouped(cause.candidates),
      search.transplants() ? fmt::format(", {} are equal in both runs", Grouped(cause.equal)) : "",
      cause.left_out.empty() ? "" : "The data was left out: " + cause.left_out + ".\n",
      ScopeText(cause), cause.questions, Grouped(trials.updates_lived()),
      Grouped(trials.replicas_found()), search.out);
  return text;
}

Json PreventionJson(const Prevention& p) {
  return {{"prevents", PreventsName(p.answer)}, {"without_spike", p.without},
          {"replicas", p.replicas},             {"sigma", p.sigma},
          {"saturated", p.saturated},           {"control_without_spike", p.control_without},
          {"control_replicas", p.control_replicas}};
}

std::string JsonText(const SearchedCause& search, const Cause& cause,
                     const PreventionTrials& trials) {
  Json json = {{"run", search.flags.run},
               {"out", search.out},
               {"healthy", search.transplants() ? Json(search.options.healthy) : Json()},
               {"update", search.options.at},
               {"predicate", search.flags.predicate},
               {"spike", search.options.spike},
               {"horizon", search.range.last},
               {"candidates", cause.candidates},
               {"equal", cause.equal},
               {"data_left_out", cause.left_out},
               {"control_spikes", cause.control_spikes},
               {"prevented_by_all", cause.prevented},
               {"complete", cause.complete},
               {"confirmed", cause.confirmed},
               {"scope", ScopeText(cause)},
               {"questions", cause.questions},
               {"updates_lived", trials.updates_lived()},
               {"replicas_found", trials.replicas_found()},
               {"level", TreeLevelName(cause.level)},
               {"members", Json::array()}};
  for (size_t i = 0; i < cause.members.size(); ++i) {
    const CauseMember& member = cause.members[i];
    Json one = {{"component", CausePartName(member.part)},
                {"name", member.Name()},
                {"glob", member.group.glob}};
    if (i < cause.spared.size()) one["without_it"] = PreventionJson(cause.spared[i]);
    json["members"].push_back(std::move(one));
  }
  if (cause.whole) json["whole"] = PreventionJson(*cause.whole);
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ProgressText(const Cause& cause) {
  const std::vector<std::string> names = NamesOf(cause);
  if (names.empty()) return fmt::format("question {}", cause.questions);
  return fmt::format("question {}: {} {}{}", cause.questions, names.size(),
                     names.size() == 1 ? "member: " : "members, among them ", names.front());
}

}  // namespace

void RunBisectCause(const BisectFlags& flags) {
  const RunReader run = OrFail(RunReader::Open(flags.run));
  SearchSession session(flags, run, "cause");
  SearchedCause search = {flags, {}, session.out(), session.range()};
  search.options.healthy = flags.healthy;
  search.options.spike = session.spike();
  search.options.parts = PartsOf(flags);
  search.options.at = flags.at > 0             ? flags.at
                      : !flags.steps.empty()   ? search.range.first
                                               : std::max(search.range.first, session.spike() - 1);
  if (search.options.at < search.range.first || search.options.at >= session.spike()) {
    Fail(UsageError(fmt::format("--at {}: expected an update of {}..{}, before that which shows the "
                                "spike",
                                search.options.at, search.range.first, session.spike() - 1)));
  }
  PreventionTrials& trials = session.trials();
  const std::unique_ptr<CauseSearch> causes =
      OrFail(CauseSearch::Make(run, trials, search.options));
  const int64_t questions = causes->QuestionsForOne();
  session.Forecast(fmt::format("{} candidates; one guilty tensor takes about {} questions",
                               Grouped(causes->candidates()), questions),
                   trials.UpdatesAtMost(search.options.at, questions));
  session.Prove();
  const auto report = [&](const Cause& cause) {
    return flags.output.json ? JsonText(search, cause, trials) : Text(search, cause, trials);
  };
  session.set_best(report({}));
  std::string said;
  const Result<Cause> cause = causes->Run([&](const Cause& best) {
    session.set_best(report(best));
    if (std::string line = ProgressText(best); line != said) session.Say(said = std::move(line));
  });
  session.Finish();
  if (!cause.ok()) Fail(cause.status());
  PrintReport(report(*cause));
  if (!cause->complete) Exit(kNoAnswer);
}

}  // namespace retrace
