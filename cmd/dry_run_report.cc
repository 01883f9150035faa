#include "cmd/dry_run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cmd/text_table.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

// "8..15", or "8, 11, 12 ..." where they are not in a row.
std::string SamplesText(const std::vector<int64_t>& samples) {
  const int64_t count = std::ssize(samples);
  if (samples == Consecutive(samples.front(), count)) {
    return fmt::format("{}..{}", samples.front(), samples.back());
  }
  constexpr int64_t kShown = 12;
  const auto end = samples.begin() + std::min(count, kShown);
  return fmt::format("{}{}", fmt::join(samples.begin(), end, ", "), count > kShown ? " ..." : "");
}

std::string TensorsText(const OutputFlags& output, const PlannedIntervention& one) {
  TextTable table({{.title = "tensor", .left = true}, {"elements"}, {"norm before"}, {"after"}});
  for (const TensorChange& change : one.tensors) {
    table.AddRow({change.tensor + "#" + ComponentName(change.component), Grouped(change.elements),
                  fmt::format("{:.6g}", change.norm_before),
                  fmt::format("{:.6g}", change.norm_after)});
  }
  return table.empty() ? "" : table.Text(output, 4);
}

// Adam's t of many tensors mostly changes alike: one line for tensors in a row that do.
std::string CountersText(const std::vector<CounterChange>& counters) {
  std::string text;
  for (size_t i = 0, end; i < counters.size(); i = end) {
    const CounterChange& change = counters[i];
    const auto alike = [&](const CounterChange& other) {
      return other.tensor.has_value() && change.tensor.has_value() &&
             other.before == change.before && other.after == change.after;
    };
    for (end = i + 1; end < counters.size() && alike(counters[end]);) ++end;
    const std::string name = end - i > 1 ? fmt::format("t of {} tensors", end - i) : change.Name();
    text += fmt::format("    {}: {} -> {}\n", name, change.before, change.after);
  }
  return text;
}

std::string UpdateText(const SamplesChange& change) {
  std::string text =
      fmt::format("    update {}: samples {}", change.update, SamplesText(change.before));
  if (change.before != change.after) text += " -> " + SamplesText(change.after);
  if (change.cursor_before != change.cursor_after) {
    text += fmt::format("; cursor afterwards {} -> {}", change.cursor_before, change.cursor_after);
  }
  if (change.skipped) {
    text += fmt::format("; not applied: p, m, v stay, t {}, schedule {}",
                        change.t_moves ? "advances" : "stays",
                        change.schedule_moves ? "advances" : "stays");
  }
  return text + "\n";
}

constexpr size_t kNamesShown = 8;

std::string NamesText(const std::vector<std::string>& names) {
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(std::min(names.size(), kNamesShown));
  return fmt::format("    {} tensor{}: {}{}\n", names.size(), names.size() == 1 ? "" : "s",
                     fmt::join(names.begin(), end, ", "),
                     names.size() > kNamesShown ? ", ... (--json lists all)" : "");
}

std::string OneText(const OutputFlags& output, const PlannedIntervention& one) {
  const InterventionKind& kind = *one.intervention.kind;
  std::string text = Tinted(output, Tint::kBold, one.intervention.Text()) + "\n";
  text += "    touches " + kind.touches + "\n";
  text += "    formula " + kind.formula + "\n";
  if (!one.state.empty()) {
    text += (one.known ? "    tried on " : "    not tried: ") + one.state + "\n";
  }
  if (!one.names.empty() && one.tensors.empty()) {
    text += NamesText(one.names);
  }
  text += TensorsText(output, one);
  text += CountersText(one.counters);
  for (const std::string& memory : one.memories) text += "    rule memory " + memory + "\n";
  for (const RecipeDifference& change : one.recipe) {
    text += fmt::format("    {}: {} -> {}\n", change.key, change.a, change.b);
  }
  for (const SamplesChange& change : one.updates) text += UpdateText(change);
  if (const int64_t more = one.updates_changed - std::ssize(one.updates); more > 0) {
    text += fmt::format("    and {} more update{}\n", more, more == 1 ? "" : "s");
  }
  if (one.known && one.tensors.empty() && one.counters.empty() && one.memories.empty() &&
      one.recipe.empty() && one.updates.empty()) {
    text += "    changes nothing\n";
  }
  return text;
}

Json JsonOf(const PlannedIntervention& one) {
  const InterventionKind& kind = *one.intervention.kind;
  Json json = {{"intervention", one.intervention.Text()},
               {"first", *one.intervention.first},
               {"last", *one.intervention.last},
               {"touches", kind.touches},
               {"formula", kind.formula},
               {"known", one.known},
               {"state", one.state},
               {"matches", one.names},
               {"tensors", Json::array()},
               {"counters", Json::array()},
               {"memories", one.memories},
               {"recipe", Json::array()},
               {"updates_changed", one.updates_changed},
               {"updates", Json::array()}};
  for (const TensorChange& change : one.tensors) {
    json["tensors"].push_back({{"tensor", change.tensor},
                               {"component", ComponentName(change.component)},
                               {"elements", change.elements},
                               {"norm_before", change.norm_before},
                               {"norm_after", change.norm_after}});
  }
  for (const CounterChange& change : one.counters) {
    json["counters"].push_back(
        {{"name", change.Name()}, {"before", change.before}, {"after", change.after}});
  }
  for (const RecipeDifference& change : one.recipe) {
    json["recipe"].push_back({{"key", change.key}, {"before", change.a}, {"after", change.b}});
  }
  for (const SamplesChange& change : one.updates) {
    json["updates"].push_back({{"update", change.update},
                               {"samples_before", change.before},
                               {"samples_after", change.after},
                               {"cursor_before", change.cursor_before},
                               {"cursor_after", change.cursor_after},
                               {"applied", !change.skipped},
                               {"t_advances", change.t_moves},
                               {"schedule_advances", change.schedule_moves}});
  }
  return json;
}

}  // namespace

std::string DryRunText(const OutputFlags& output, const std::vector<PlannedIntervention>& planned) {
  std::string text;
  for (const PlannedIntervention& one : planned) text += OneText(output, one);
  return text;
}

std::string DryRunJson(const std::vector<PlannedIntervention>& planned) {
  Json json = Json::array();
  for (const PlannedIntervention& one : planned) json.push_back(JsonOf(one));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace retrace
