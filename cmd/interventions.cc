#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/text_table.h"
#include "core/nearest_name.h"
#include "surgery/intervention.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace interventions
  retrace interventions reset-moments
  retrace replay runs/demo --steps 4..24 --do reset-moments:v,t=keep@6)";

struct InterventionsFlags {
  std::string name;
  OutputFlags output;
};

std::vector<const InterventionKind*> Chosen(const std::string& name) {
  std::vector<const InterventionKind*> chosen;
  std::vector<std::string> names;
  for (const InterventionKind* kind : InterventionKinds()) {
    names.push_back(kind->name);
    if (name.empty() || kind->name == name) chosen.push_back(kind);
  }
  if (chosen.empty()) {
    Fail(UsageError(fmt::format("there is no intervention '{}'; the nearest is '{}', all are {}",
                                name, NearestName(name, names), fmt::join(names, ", "))));
  }
  return chosen;
}

Json JsonOf(const InterventionKind& kind) {
  Json parameters = Json::array();
  for (const Parameter& parameter : kind.parameters) {
    parameters.push_back({{"name", parameter.name},
                          {"meaning", parameter.meaning},
                          {"default", parameter.default_value},
                          {"required", parameter.default_value.empty()}});
  }
  return {{"name", kind.name},       {"summary", kind.summary}, {"touches", kind.touches},
          {"formula", kind.formula}, {"example", kind.example}, {"reference", kind.reference},
          {"parameters", parameters}};
}

void Print(const OutputFlags& output, const InterventionKind& kind) {
  fmt::print("{}  {}\n", Tinted(output, Tint::kBold, kind.name), kind.summary);
  for (const Parameter& parameter : kind.parameters) {
    fmt::print("    {:<12} {}{}\n", parameter.name, parameter.meaning,
               parameter.default_value.empty() ? " (required)"
                                               : " (default: " + parameter.default_value + ")");
  }
  fmt::print("    {:<12} {}\n", "touches", kind.touches);
  fmt::print("    {:<12} {}\n", "formula", kind.formula);
  fmt::print("    {:<12} --do {}\n", "example", kind.example);
  fmt::print("    {:<12} {}\n", "reference", kind.reference);
}

void RunInterventions(const InterventionsFlags& flags) {
  Json json = Json::array();
  for (const InterventionKind* kind : Chosen(flags.name)) {
    if (flags.output.json)
      json.push_back(JsonOf(*kind));
    else
      Print(flags.output, *kind);
  }
  if (flags.output.json) {
    PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }
}

}  // namespace

void AddInterventionsCommand(CLI::App& app) {
  CLI::App* interventions =
      app.add_subcommand("interventions", "List what 'replay --do' can change");
  auto flags = std::make_shared<InterventionsFlags>();
  interventions->add_option("name", flags->name, "Only this one");
  AddOutputFlags(interventions, &flags->output, true);
  interventions->footer(kExamples);
  interventions->callback([flags] { RunInterventions(*flags); });
}

}  // namespace retrace
