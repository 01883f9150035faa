#include "cmd/experiment_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "cmd/text_table.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kStripCells = 30;

Json NumberJson(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json ReplicasJson(const ArmResult& arm) {
  Json json = Json::array();
  for (size_t i = 0; i < arm.replicas.size(); ++i) {
    const Replica& replica = arm.replicas[i];
    Json losses = Json::array();
    for (const double loss : replica.losses) losses.push_back(NumberJson(loss));
    json.push_back({{"seed", arm.seeds[i]},
                    {"jump", NumberJson(arm.jumps[i])},
                    {"spike", NumberJson(arm.spikes[i])},
                    {"halted", replica.halted},
                    {"state", replica.state.Hex()},
                    {"run", replica.dir},
                    {"evaluation_losses", losses}});
  }
  return json;
}

Json ArmJson(const ArmResult& arm) {
  return {{"name", arm.name},
          {"hypothesis", arm.hypothesis},
          {"changes", arm.changes},
          {"verdict", VerdictName(arm.verdict)},
          {"median", NumberJson(arm.median)},
          {"delta", NumberJson(arm.delta)},
          {"p_below", arm.p_below},
          {"p_above", arm.p_above},
          {"p_later", arm.p_later},
          {"replicas", ReplicasJson(arm)}};
}

// A field of CSV, quoted where it has to be.
std::string Field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

Tint TintOf(Verdict verdict) {
  if (verdict == Verdict::kRemoves || verdict == Verdict::kShrinks) return Tint::kGreen;
  if (verdict == Verdict::kDelays) return Tint::kYellow;
  return verdict == Verdict::kWorsens ? Tint::kRed : Tint::kPlain;
}

std::string ProbabilityText(double p) { return p < 1e-4 ? "<.0001" : fmt::format("{:.4f}", p); }

std::string NoiseText(const ExperimentPlan& plan, const ExperimentResult& result) {
  if (plan.over_seeds()) {
    return fmt::format("Seeds {}, each of the initial state and of the data's order.",
                       fmt::join(result.arms.front().seeds, ", "));
  }
  if (plan.sigma) {
    return fmt::format(
        "Noise: {:.2e}, as the file says; whether it is saturated was not examined,\nso "
        "claims hold for this exact trajectory.",
        result.sigma);
  }
  std::string text = "Noise: ";
  for (const ExperimentResult::Rung& rung : result.ladder) {
    text += fmt::format("{}{:.2e} spreads jumps by {:.3g} nat",
                        &rung == &result.ladder.front() ? "" : ", ", rung.sigma, rung.spread);
  }
  return text + (result.saturated
                     ? fmt::format(";\nsaturated at {:.2e}, which is used.", result.sigma)
                     : ";\nnot saturated, so claims hold for this exact trajectory.");
}

}  // namespace

std::string JumpStrip(const std::vector<double>& jumps, double scale, int cells) {
  std::vector<int> counts(cells, 0);
  int beyond = 0;
  for (const double jump : jumps) {
    if (!std::isfinite(jump)) {
      ++beyond;
      continue;
    }
    const int cell = scale > 0 ? static_cast<int>(jump / scale * cells) : 0;
    ++counts[std::clamp(cell, 0, cells - 1)];
  }
  std::string strip;
  for (const int count : counts) {
    if (count == 0)
      strip += "·";
    else if (count == 1)
      strip += "●";
    else
      strip += count < 10 ? std::to_string(count) : "+";
  }
  return beyond == 0 ? strip : strip + fmt::format(" {}∞", beyond);
}

std::string ExperimentTable(const OutputFlags& output, const ExperimentNames& names,
                            const ExperimentPlan& plan, const ExperimentResult& result) {
  double scale = 0;
  for (const ArmResult& arm : result.arms) {
    for (const double jump : arm.jumps) {
      if (std::isfinite(jump)) scale = std::max(scale, jump);
    }
  }
  const std::string end = fmt::format("{:.3g} nat", scale);
  TextTable table({{"arm", true},
                   {fmt::format("0{:>{}}", end, kStripCells - 1), true},
                   {"median"},
                   {"delta"},
                   {"p"},
                   {fmt::format("verdict ({})", ScopeOf(plan, result)), true}});
  for (const ArmResult& arm : result.arms) {
    const bool control = arm.verdict == Verdict::kControl;
    table.AddRow({arm.name, JumpStrip(arm.jumps, scale, kStripCells),
                  fmt::format("{:.3f}", arm.median),
                  control ? "" : fmt::format("{:+.3f}", arm.delta),
                  control ? "" : ProbabilityText(arm.tested()),
                  Tinted(output, TintOf(arm.verdict), VerdictName(arm.verdict))});
  }
  std::string text = table.Text(output);
  if (output.quiet) return text;
  text += fmt::format(
      "Jump of the evaluation loss up to the horizon, update {}: a mark a replica, a digit (+: ten "
      "or more) where\nseveral fall together. A spike is a rise above {} nat. p: exact rank "
      "permutation test, Holm-adjusted; a claim\nneeds p <= {} and a difference of medians of {:.3g} "
      "nat.\n{}\n{}\nEach replica is a run in {}/replicas, for 'retrace log' and 'diff'.\n",
      plan.horizon, plan.threshold, kLevel, LeastEffect(result.arms.front()),
      plan.over_seeds() ? "The control's first replica was lived twice, bit for bit."
                        : "The control without noise equals the recording bit for bit.",
      NoiseText(plan, result), names.out);
  return text;
}

std::string ExperimentJson(const ExperimentNames& names, const ExperimentPlan& plan,
                           const ExperimentResult& result) {
  Json json = {{"file", names.file},
               {"run", names.run},
               {"out", names.out},
               {"first", plan.first},
               {"horizon", plan.horizon},
               {"threshold", plan.threshold},
               {"control_equal", !result.control_differs.has_value()}};
  if (result.control_differs) {
    json["differs_at"] = result.control_differs->update;
    return json.dump(2) + "\n";
  }
  json["scope"] = ScopeOf(plan, result);
  if (!plan.over_seeds()) {
    json["sigma"] = result.sigma;
    json["saturated"] = result.saturated;
    json["ladder"] = Json::array();
    for (const ExperimentResult::Rung& rung : result.ladder) {
      json["ladder"].push_back({{"sigma", rung.sigma}, {"spread", NumberJson(rung.spread)}});
    }
  }
  json["level"] = kLevel;
  json["least_effect"] = NumberJson(LeastEffect(result.arms.front()));
  json["replicas_run"] = result.replicas_run;
  json["replicas_found"] = result.replicas_found;
  json["arms"] = Json::array();
  for (const ArmResult& arm : result.arms) json["arms"].push_back(ArmJson(arm));
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ExperimentCsv(const ExperimentPlan& plan, const ExperimentResult& result) {
  std::string text =
      "arm,seed,jump,spike,halted,state,run,median,delta,p_below,p_above,p_later,verdict,scope\n";
  for (const ArmResult& arm : result.arms) {
    for (size_t i = 0; i < arm.jumps.size(); ++i) {
      text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", Field(arm.name),
                          arm.seeds[i], arm.jumps[i], arm.spikes[i], arm.replicas[i].halted,
                          arm.replicas[i].state.Hex(), arm.replicas[i].dir, arm.median, arm.delta,
                          arm.p_below, arm.p_above, arm.p_later, VerdictName(arm.verdict),
                          ScopeOf(plan, result));
    }
  }
  return text;
}

}  // namespace retrace
