#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/bisect_search.h"
#include "cmd/text_table.h"
#include "surgery/no_return.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

struct SpikeSearch {
  const BisectFlags& flags;
  std::vector<Intervention> interventions;
  std::string what;  // the interventions, as they were given
  std::string out;
  UpdateRange range;
};

std::vector<const Prevention*> ProbesOf(const NoReturn& found) {
  std::vector<const Prevention*> probes;
  for (const auto& [update, prevention] : found.probes) probes.push_back(&prevention);
  return probes;
}

std::string UndecidedText(const NoReturn& found) {
  const std::vector<int64_t> undecided = found.Undecided();
  if (undecided.empty()) return "";
  return fmt::format("Undecided, between 40 and 80 %: update{} {}.\n",
                     undecided.size() > 1 ? "s" : "", fmt::join(undecided, ", "));
}

// The answer in a sentence or two.
std::string AnswerText(const SpikeSearch& search, const NoReturn& found) {
  std::string text;
  if (!found.complete) text = "The search is not at its end; the best so far: ";
  if (found.probes.empty()) return "Nothing is known yet: no probe is at its end.\n";
  if (!found.last_prevented) {
    return text + fmt::format("{} prevents the spike from none of the updates that were probed.\n",
                              search.what) +
           UndecidedText(found);
  }
  text += fmt::format("the point of no return {} update {}: from there on, {} still prevents the "
                      "spike",
                      found.Decided() && found.Undecided().empty() ? "is" : "is not before",
                      *found.last_prevented, search.what);
  text += fmt::format("; from update {} on it {}.\n", found.first_not,
                      found.first_not == found.spike ? "comes too late: the spike is there"
                                                     : "does not");
  text += UndecidedText(found);
  text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

std::string OrderText(const NoReturn& found) {
  if (!found.complete) return "";
  if (found.violations.empty()) {
    return fmt::format("Answers fall with k at all {} updates that were probed.\n",
                       found.probes.size());
  }
  return fmt::format("NOT MONOTONE: update{} {} say{} otherwise, so there is more than one "
                     "boundary.\n",
                     found.violations.size() > 1 ? "s" : "", fmt::join(found.violations, ", "),
                     found.violations.size() > 1 ? "" : "s");
}

// Where the control itself would not be called a spike, prevention says little.
std::string ControlText(const NoReturn& found) {
  std::vector<int64_t> updates;
  for (const auto& [update, prevention] : found.probes) {
    const double share = static_cast<double>(prevention.control_without) /
                         static_cast<double>(prevention.control_replicas);
    if (share >= kNotPreventedShare) updates.push_back(update);
  }
  if (updates.empty()) return "";
  return fmt::format("The noise alone prevents the spike in 40 % or more from update{} {}: what "
                     "prevents it there is not the intervention.\n",
                     updates.size() > 1 ? "s" : "", fmt::join(updates, ", "));
}

std::string Text(const SpikeSearch& search, const NoReturn& found, const PreventionTrials& trials) {
  TextTable table({{"from update"},
                   {"prevents", true},
                   {"no spike"},
                   {"without it"},
                   {"noise", true}});
  for (const auto& [update, p] : found.probes) {
    const Tint tint = p.answer == Prevents::kYes  ? Tint::kGreen
                      : p.answer == Prevents::kNo ? Tint::kRed
                                                  : Tint::kYellow;
    table.AddRow({fmt::format("{}", update),
                  Tinted(search.flags.output, tint, PreventsName(p.answer)),
                  OfText(p.without, p.replicas), OfText(p.control_without, p.control_replicas),
                  NoiseText(p)});
  }
  std::string text = table.empty() ? "" : table.Text(search.flags.output) + "\n";
  text += AnswerText(search, found) + OrderText(found) + ControlText(found);
  if (search.flags.output.quiet) return text;
  const std::vector<const Prevention*> probes = ProbesOf(found);
  text += fmt::format(
      "A spike: {}, at some update up to {}; the recording has it at update {}. Replicas are "
      "branches of the\nrecording with noise and without a spike as counted; the control without "
      "noise equals the recording\nbit for bit. Claims hold for {}. {} updates were lived, {} "
      "replicas found in {}.\n",
      search.flags.predicate, search.range.last, found.spike, ScopeOf(probes),
      Grouped(trials.updates_lived()), Grouped(trials.replicas_found()), search.out);
  return text;
}

std::string JsonText(const SpikeSearch& search, const NoReturn& found,
                     const PreventionTrials& trials) {
  Json json = {{"run", search.flags.run},
               {"out", search.out},
               {"interventions", Json::array()},
               {"predicate", search.flags.predicate},
               {"first", found.first},
               {"spike", found.spike},
               {"horizon", search.range.last},
               {"complete", found.complete},
               {"decided", found.Decided() && found.Undecided().empty()},
               {"last_prevented", nullptr},
               {"first_not_prevented", found.first_not},
               {"undecided", found.Undecided()},
               {"violations", found.violations},
               {"scope", ScopeOf(ProbesOf(found))},
               {"updates_lived", trials.updates_lived()},
               {"replicas_found", trials.replicas_found()},
               {"probes", Json::array()}};
  for (const Intervention& one : search.interventions) json["interventions"].push_back(one.Text());
  if (found.last_prevented) json["last_prevented"] = *found.last_prevented;
  for (const auto& [update, p] : found.probes) {
    json["probes"].push_back({{"update", update},
                              {"prevents", PreventsName(p.answer)},
                              {"without_spike", p.without},
                              {"replicas", p.replicas},
                              {"control_without_spike", p.control_without},
                              {"control_replicas", p.control_replicas},
                              {"sigma", p.sigma},
                              {"saturated", p.saturated}});
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::vector<Intervention> UndatedOf(const std::vector<std::string>& texts) {
  std::vector<Intervention> interventions;
  for (const std::string& text : texts) {
    interventions.push_back(OrFail(ParseIntervention(text)));
    if (!interventions.back().first) continue;
    Fail(UsageError("--do " + text + ": expected no date: the search tries one update after another"));
  }
  if (interventions.empty()) {
    Fail(UsageError("--spike: expected --do NAME:ARGS, the intervention that may prevent it"));
  }
  return interventions;
}

}  // namespace

void RunBisectSpike(const BisectFlags& flags) {
  const RunReader run = OrFail(RunReader::Open(flags.run));
  SpikeSearch search = {flags, UndatedOf(flags.interventions), "", "", {}};
  search.what = fmt::format("{}", fmt::join(flags.interventions, " "));
  SearchSession session(flags, run, "spike");
  search.out = session.out();
  search.range = session.range();
  PreventionTrials& trials = session.trials();
  OrFail(trials.Check(search.range.first, search.interventions));
  const int64_t probes = NoReturnProbes(search.range.first, session.spike(), flags.checks);
  session.Forecast(fmt::format("At most {} probes", probes),
                   probes * trials.UpdatesAtMost(search.range.first, 1));
  session.Prove();
  const auto report = [&](const NoReturn& found) {
    return flags.output.json ? JsonText(search, found, trials) : Text(search, found, trials);
  };
  const NoReturn nothing = {.first = search.range.first,
                            .spike = session.spike(),
                            .probes = {},
                            .asked = 0,
                            .complete = false,
                            .violations = {},
                            .last_prevented = {},
                            .first_not = session.spike()};
  session.set_best(report(nothing));
  const Result<NoReturn> found = FindNoReturn(
      trials, search.interventions,
      {.checks = flags.checks, .progress = [&](const NoReturn& best) {
         session.set_best(report(best));
         const Prevention& p = best.probes.at(best.asked);
         session.Say(fmt::format("from update {} on: {}, no spike in {}", best.asked,
                                 PreventsName(p.answer), OfText(p.without, p.replicas)));
       }});
  session.Finish();
  if (!found.ok()) Fail(found.status());
  PrintReport(report(*found));
  if (!found->complete) Exit(kNoAnswer);
}

}  // namespace retrace
