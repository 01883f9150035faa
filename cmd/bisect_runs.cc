#include "cmd/bisect_runs.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "cmd/element_text.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "surgery/first_difference.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kListMax = 8;

Json Number(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

Json JsonOf(const DifferingElement& d) {
  const ElementDifference& e = d.element;
  return {{"of", d.name},
          {"at", d.IndexText()},
          {"index", e.index},
          {"a", Number(e.fp64 ? e.wide_a : e.a)},
          {"b", Number(e.fp64 ? e.wide_b : e.b)},
          {"a_bits", e.fp64 ? std::bit_cast<uint64_t>(e.wide_a) : std::bit_cast<uint32_t>(e.a)},
          {"b_bits", e.fp64 ? std::bit_cast<uint64_t>(e.wide_b) : std::bit_cast<uint32_t>(e.b)},
          {"ulp", e.ulp == kUlpNan ? Json(nullptr) : Json(e.ulp)},
          {"differing", d.differing},
          {"elements", d.elements}};
}

Json JsonOf(const ReplayedSide& side) {
  Json json = {{"replay", !side.recorded ? "not recorded" : side.same ? "identical" : "differs"}};
  if (!side.fault) return json;
  json["phase"] = side.fault->phase;
  json["tensors"] = side.fault->tensors;
  json["journal"] = side.fault->has_journal;
  json["keyframe"] = side.fault->has_keyframe;
  if (side.fault->element) {
    json["recorded_and_replayed"] = JsonOf(*side.fault->element);
  }
  return json;
}

std::string Names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kListMax); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  return text + (names.size() > kListMax ? ", ..." : "");
}

// What is known of an update whose recording its replay is not.
std::string FaultText(const char* side, const std::string& run, const FirstDifference& found,
                      const RecordedFault& fault) {
  std::string text = fmt::format(
      "{}: replay of update {} is not what {} recorded, so something happened there that the recipe "
      "does not say (a fault of the hardware, as a rule), in the {} pass\n",
      side, found.update, run, fault.phase);
  if (fault.phase == "optimizer") {
    text = fmt::format("{}: replay of update {} has the recorded gradient and not the recorded state, "
                       "so something happened to {} in the optimizer\n",
                       side, found.update, run);
  }
  if (!fault.tensors.empty()) {
    text += fmt::format("  gradients that differ, by {}: {} tensor{}: {}\n",
                        fault.has_journal ? "the journal" : "their norms", fault.tensors.size(),
                        fault.tensors.size() == 1 ? "" : "s", Names(fault.tensors));
  }
  if (fault.element) {
    const DifferingElement& e = *fault.element;
    return text + fmt::format("  recorded and replayed {} {}: {}; {} of {} elements differ\n", e.name,
                              e.IndexText(), ElementText(e.element), Grouped(e.differing),
                              Grouped(e.elements));
  }
  return text + (fault.has_journal || fault.has_keyframe
                     ? ""
                     : "  neither the gradient nor the state of this update is kept, so its record is "
                       "all there is\n");
}

std::string OpText(const FirstDifference& found) {
  const std::string phase = PhaseOf(*found.op);
  if (!found.only_in.empty()) {
    return fmt::format("first differing op: {} ({}), which only {} has\n", *found.op, phase,
                       found.only_in);
  }
  if (!found.element) return fmt::format("first differing op: {} ({})\n", *found.op, phase);
  return fmt::format("first differing op: {} ({})\n  {}: {}; {} of {} elements differ\n", *found.op,
                     phase, found.element->IndexText(), ElementText(found.element->element),
                     Grouped(found.element->differing), Grouped(found.element->elements));
}

std::string LineageText(const char* side, const OpenedRun& run) {
  std::string text;
  for (const std::string& line : run.Interventions()) {
    text += fmt::format("{}: under {}\n", side, line);
  }
  return text;
}

std::string PointWords(const PartingPoint& point) {
  const int64_t k = *point.position;
  if (point.at_first) {
    return fmt::format("the states at {}, the first position of both, differ already; update {} lived "
                       "again on both sides", k, point.update());
  }
  if (!point.states) {
    return fmt::format("the records of update {} differ, the states do not; update {} lived again on "
                       "both sides", k, k);
  }
  return fmt::format("the states part in update {} ({} is the same); update {} lived again on both "
                     "sides", k, k - 1, k);
}

std::string ReportText(const BisectRunsFlags& flags, const OpenedRun& a, const OpenedRun& b,
                       const PartingPoint& point, const FirstDifference& found) {
  std::string out = fmt::format("{}: {}\n", Tinted(flags.output, Tint::kRed, "differs"),
                                PointWords(point));
  out += found.op ? OpText(found)
                  : fmt::format("all {} ops of the two replays are the same\n", Grouped(found.ops));
  for (const auto& [side, run, replayed] :
       {std::tuple("A", &a, &found.a), std::tuple("B", &b, &found.b)}) {
    if (replayed->fault) out += FaultText(side, run->dir(), found, *replayed->fault);
    else if (!replayed->recorded) {
      out += fmt::format("{}: ends before update {}, which was lived for the first time\n", side,
                         found.update);
    }
  }
  out += LineageText("A", a) + LineageText("B", b);
  if (!found.recipes.empty()) {
    TextTable table({{fmt::format("recipe in force, {} key{}", found.recipes.size(),
                                  found.recipes.size() == 1 ? "" : "s"),
                      true},
                     {"A", true},
                     {"B", true}});
    for (size_t i = 0; i < std::min(found.recipes.size(), kListMax); ++i) {
      table.AddRow({found.recipes[i].key, found.recipes[i].a, found.recipes[i].b});
    }
    out += "\n" + table.Text(flags.output);
  }
  return out;
}

Json ReportJson(const BisectRunsFlags& flags, const OpenedRun& a, const OpenedRun& b,
                const PartingPoint& point, const FirstDifference& found) {
  Json json = {{"a", flags.a},
               {"b", flags.b},
               {"identical", false},
               {"first_differing_position", *point.position},
               {"states_differ", point.states},
               {"from_the_beginning", point.at_first},
               {"update", found.update},
               {"ops", found.ops}};
  json["op"] = found.op ? Json(*found.op) : Json(nullptr);
  json["phase"] = found.op ? Json(PhaseOf(*found.op)) : Json(nullptr);
  json["only_in"] = found.only_in;
  json["element"] = found.element ? JsonOf(*found.element) : Json(nullptr);
  json["sides"] = {{"a", JsonOf(found.a)}, {"b", JsonOf(found.b)}};
  json["interventions"] = {{"a", a.Interventions()}, {"b", b.Interventions()}};
  json["recipe"] = Json::array();
  for (const RecipeDifference& r : found.recipes) {
    json["recipe"].push_back({{"key", r.key}, {"a", r.a}, {"b", r.b}});
  }
  return json;
}

void Print(const BisectRunsFlags& flags, const Json& json, const std::string& text) {
  if (flags.output.json) {
    PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else if (!flags.output.quiet) {
    PrintReport(text);
  }
}

}  // namespace

void BisectRuns(const BisectRunsFlags& flags) {
  const std::unique_ptr<OpenedRun> a = OrFail(OpenedRun::Open(flags.a));
  const std::unique_ptr<OpenedRun> b = OrFail(OpenedRun::Open(flags.b));
  const PartingPoint point = OrFail(FindPartingPoint(a->reader(), b->reader()));
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!point.position) {
    const std::string what = fmt::format("states and records of positions {}..{}", point.first,
                                         point.last);
    if (job.speaks()) {
      Print(flags, {{"a", flags.a}, {"b", flags.b}, {"identical", true}},
            fmt::format("{}: {}\n", Tinted(flags.output, Tint::kGreen, "identical"), what));
    }
    Exit(0);
  }
  FirstDifference found;
  OrFail(RunJob(job, [](const std::string& line) { SayError("retrace: " + line); },
                [&](Comm& comm) -> Status {
                  RT_ASSIGN_OR_RETURN(found,
                                      LiveDifference(comm, job.options, {&a->reader(), nullptr},
                                                     {&b->reader(), nullptr}, point));
                  return {};
                }));
  if (job.speaks()) {
    Print(flags, ReportJson(flags, *a, *b, point, found), ReportText(flags, *a, *b, point, found));
  }
  Exit(1);
}

}  // namespace retrace
