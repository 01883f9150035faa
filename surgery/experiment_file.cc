#include "surgery/experiment_file.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <iterator>
#include <numeric>
#include <set>

#include "core/nearest_name.h"
#include "core/toml_text.h"
#include "surgery/statistics.h"
#include "surgery/verdict.h"

namespace retrace {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;
constexpr int64_t kMostSeed = 0xffffffff;  // of data.seed

std::string Place(const std::string& file, const toml::source_region& region) {
  return fmt::format("{}:{}:{}", file, region.begin.line, region.begin.column);
}

// Reads one table's keys.
class TableReader {
 public:
  TableReader(const toml::table& table, std::string file) : table_(table), file_(std::move(file)) {}

  Status Expected(const std::string& key, const std::string& what) const {
    const toml::node* node = table_.get(key);
    return UsageError(fmt::format(
        "{}: {}: expected {}", Place(file_, node ? node->source() : table_.source()), key, what));
  }
  std::string where() const { return Place(file_, table_.source()); }
  bool Has(const std::string& key) const { return table_.contains(key); }
  const toml::node* Get(const std::string& key) const { return table_.get(key); }
  Status Text(const std::string& key, bool required, std::string* out) {
    const toml::node* node = Get(key);
    if (node == nullptr && !required) return {};
    if (node == nullptr || !node->is_string() || node->as_string()->get().empty()) {
      return Expected(key, "text that is not empty");
    }
    *out = node->as_string()->get();
    return {};
  }
  Status Integer(const std::string& key, int64_t low, int64_t high, int64_t* out) {
    const toml::node* node = Get(key);
    if (node == nullptr) return {};
    const auto* value = node->as_integer();
    if (value == nullptr || value->get() < low || value->get() > high) {
      return Expected(key, fmt::format("a whole number in {} .. {}", low, high));
    }
    *out = value->get();
    return {};
  }
  // Above 0, at most `high`. `what` says so.
  Status Positive(const std::string& key, double high, const std::string& what, double* out) {
    const toml::node* node = Get(key);
    if (node == nullptr) return {};
    const std::optional<double> value = node->is_number() ? node->value<double>() : std::nullopt;
    if (!value || !(*value > 0 && *value <= high)) return Expected(key, what);
    *out = *value;
    return {};
  }
  // Calls read(item, FILE:LINE:COLUMN) for each item of a list. `what` says what the list is.
  Status List(const std::string& key, const std::string& what,
              const std::function<Status(const toml::node&, const std::string&)>& read) {
    const toml::node* node = Get(key);
    if (node == nullptr || !node->is_array()) return Expected(key, what);
    for (const toml::node& item : *node->as_array()) {
      RT_RETURN_IF_ERROR(read(item, Place(file_, item.source())));
    }
    return {};
  }
  // Refuses keys that are not known, before what they were meant for is missed. `elsewhere`: keys
  // that other files have, and why not this.
  Status Known(const std::vector<std::string>& known, const std::vector<std::string>& elsewhere,
               const std::string& why) const {
    for (const auto& [key, node] : table_) {
      const std::string name(key.str());
      if (std::find(known.begin(), known.end(), name) != known.end()) continue;
      const std::string where = Place(file_, key.source());
      if (std::find(elsewhere.begin(), elsewhere.end(), name) != elsewhere.end()) {
        return UsageError(fmt::format("{}: {}: {}", where, name, why));
      }
      return UsageError(fmt::format("{}: unknown key '{}'; the nearest is '{}'", where, name,
                                    NearestName(name, known)));
    }
    return {};
  }

 private:
  const toml::table& table_;
  const std::string file_;
};

const std::vector<std::string> kOverRun = {"run",      "horizon", "sigma", "control_replicas",
                                           "replicas", "seed",    "do"};
const std::vector<std::string> kOverSeeds = {"recipe", "set", "seeds"};
constexpr char kNotOverSeeds[] = "belongs to an experiment over one run; this one has 'recipe'";
constexpr char kNotOverRun[] = "belongs to an experiment over seeds, which has 'recipe'";

Status ReadTexts(TableReader& reader, const std::string& key, const std::string& what,
                 std::vector<std::string>* out) {
  return reader.List(key, what, [&](const toml::node& item, const std::string&) -> Status {
    if (!item.is_string()) return reader.Expected(key, what);
    out->push_back(item.as_string()->get());
    return {};
  });
}

Status ReadSteps(TableReader& reader, ExperimentPlan* plan) {
  std::string steps;
  RT_RETURN_IF_ERROR(reader.Text("steps", true, &steps));
  long long first = 0, last = 0;
  int used = 0;
  if (std::sscanf(steps.c_str(), "%12lld..%12lld%n", &first, &last, &used) != 2 ||
      used != static_cast<int>(steps.size()) || first < 1 || last <= first) {
    return reader.Expected("steps", "\"A..B\" with 1 <= A < B, got \"" + steps + "\"");
  }
  if (plan->over_seeds() && first != 1) {
    return reader.Expected("steps", "\"1..B\": recipes over seeds begin at the beginning");
  }
  plan->first = first;
  plan->last = last;
  plan->horizon = last;
  return {};
}

std::vector<int64_t> CountFrom(int64_t first, int64_t count) {
  std::vector<int64_t> seeds(count);
  std::iota(seeds.begin(), seeds.end(), first);
  return seeds;
}

// What is special to arms over one run. `replicas` and `seed`: of an arm that says nothing else.
struct RunDefaults {
  int64_t replicas = kLeastReplicas, seed = 1;
};

Status ReadRunKeys(TableReader& reader, ExperimentPlan* plan, RunDefaults* defaults) {
  RT_RETURN_IF_ERROR(reader.Text("run", false, &plan->run));
  RT_RETURN_IF_ERROR(reader.Integer("horizon", plan->first + 1, plan->last, &plan->horizon));
  const toml::node* sigma = reader.Get("sigma");
  if (sigma != nullptr && sigma->value<std::string>() != "auto") {
    double value = 0;
    RT_RETURN_IF_ERROR(
        reader.Positive("sigma", 1, "\"auto\" or a number above 0, at most 1", &value));
    plan->sigma = value;
  }
  int64_t control = kLeastControlReplicas;
  RT_RETURN_IF_ERROR(
      reader.Integer("control_replicas", kLeastControlReplicas, kReplicasMax, &control));
  RT_RETURN_IF_ERROR(reader.Integer("replicas", kLeastReplicas, kReplicasMax, &defaults->replicas));
  RT_RETURN_IF_ERROR(reader.Integer("seed", 0, kMost, &defaults->seed));
  plan->arms.front().seeds = CountFrom(defaults->seed, control);
  return {};
}

Status ReadSeedKeys(TableReader& reader, const std::string& file, ExperimentPlan* plan) {
  // Beside the experiment file, so that both can be moved together.
  plan->recipe = (std::filesystem::path(file).parent_path() / plan->recipe).string();
  ExperimentArm& control = plan->arms.front();
  if (reader.Has("set")) {
    RT_RETURN_IF_ERROR(ReadTexts(reader, "set", "a list of KEY=VALUE", &control.overrides));
  }
  const std::string what = fmt::format("a list of {} to {} different whole numbers in 0 .. {}",
                                       kLeastSeeds, kReplicasMax, kMostSeed);
  std::set<int64_t> different;
  RT_RETURN_IF_ERROR(reader.List("seeds", what, [&](const toml::node& item, const std::string&) {
    const auto* seed = item.as_integer();
    const bool good = seed != nullptr && seed->get() >= 0 && seed->get() <= kMostSeed;
    if (good) different.insert(seed->get());
    return good ? Status() : reader.Expected("seeds", what);
  }));
  const int64_t given = std::ssize(*reader.Get("seeds")->as_array());
  if (std::ssize(different) != given || given < kLeastSeeds || given > kReplicasMax) {
    return reader.Expected("seeds", what + "; claims about a recipe need them");
  }
  control.seeds.assign(different.begin(), different.end());
  return {};
}

Result<ExperimentArm> ReadArm(const toml::node& node, const std::string& file,
                              const ExperimentPlan& plan, const RunDefaults& defaults) {
  const toml::table* table = node.as_table();
  if (table == nullptr) {
    return UsageError(Place(file, node.source()) + ": arm: expected [[arm]] tables");
  }
  TableReader reader(*table, file);
  RT_RETURN_IF_ERROR(plan.over_seeds()
                         ? reader.Known({"name", "hypothesis", "set"}, kOverRun, kNotOverSeeds)
                         : reader.Known({"name", "hypothesis", "do", "seed"}, kOverSeeds,
                                        kNotOverRun));
  ExperimentArm arm;
  arm.where = reader.where();
  RT_RETURN_IF_ERROR(reader.Text("name", true, &arm.name));
  RT_RETURN_IF_ERROR(reader.Text("hypothesis", false, &arm.hypothesis));
  if (plan.over_seeds()) {
    arm.overrides = plan.arms.front().overrides;
    arm.seeds = plan.arms.front().seeds;
    RT_RETURN_IF_ERROR(ReadTexts(
        reader, "set", "a list of KEY=VALUE, such as [\"optimizer.clip=0\"]", &arm.overrides));
    return arm;
  }
  RT_RETURN_IF_ERROR(reader.List("do", "a list of interventions, such as [\"clip:none\"]",
                                 [&](const toml::node& item, const std::string& where) -> Status {
                                   if (!item.is_string())
                                     return reader.Expected("do", "a list of texts");
                                   Result<Intervention> parsed =
                                       ParseIntervention(item.as_string()->get());
                                   if (!parsed.ok()) return parsed.status().Within(where);
                                   arm.interventions.push_back(std::move(parsed).value());
                                   return {};
                                 }));
  int64_t seed = defaults.seed;
  RT_RETURN_IF_ERROR(reader.Integer("seed", 0, kMost, &seed));
  arm.seeds = CountFrom(seed, defaults.replicas);
  const Status dated =
      InterventionScript::Make(arm.interventions, plan.first, plan.horizon).status();
  RT_RETURN_IF_ERROR(dated.Within(arm.where));
  return arm;
}

// Refused where not even arms that lie wholly apart could be told apart.
Status CheckPower(const ExperimentPlan& plan, const std::string& file) {
  const int64_t control = std::ssize(plan.arms.front().seeds);
  for (const ExperimentArm& arm : plan.arms) {
    const double least = LeastAdjusted(std::ssize(arm.seeds), control, plan.other_arms());
    if (plan.other_arms() == 0 || least <= kLevel) continue;
    return UsageError(fmt::format(
        "{}: {} replicas an arm against {} can not decide anything between {} arms: the least "
        "possible p is {:.3f} after Holm's correction, and a verdict needs {}. Use more {}, or "
        "fewer arms",
        file, arm.seeds.size(), control, plan.other_arms(), least, kLevel,
        plan.over_seeds() ? "seeds" : "replicas"));
  }
  return {};
}

Result<ExperimentPlan> ReadPlan(const toml::table& table, const std::string& file) {
  ExperimentPlan plan;
  plan.arms.push_back({.name = kControlName,
                       .hypothesis = "no intervention",
                       .where = file,
                       .interventions = {},
                       .overrides = {},
                       .seeds = {}});
  TableReader reader(table, file);
  RunDefaults defaults;
  RT_RETURN_IF_ERROR(reader.Text("recipe", false, &plan.recipe));
  RT_RETURN_IF_ERROR(
      plan.over_seeds()
          ? reader.Known({"recipe", "set", "steps", "threshold", "seeds", "arm"}, kOverRun,
                         kNotOverSeeds)
          : reader.Known({"run", "steps", "horizon", "threshold", "sigma", "control_replicas",
                          "replicas", "seed", "arm"},
                         kOverSeeds, kNotOverRun));
  RT_RETURN_IF_ERROR(ReadSteps(reader, &plan));
  RT_RETURN_IF_ERROR(reader.Positive("threshold", 1e6, "nats, a number above 0", &plan.threshold));
  if (plan.over_seeds()) {
    RT_RETURN_IF_ERROR(ReadSeedKeys(reader, file, &plan));
  } else {
    RT_RETURN_IF_ERROR(ReadRunKeys(reader, &plan, &defaults));
  }
  const toml::node* arms = reader.Get("arm");
  if (arms == nullptr || !arms->is_array() || arms->as_array()->empty()) {
    return reader.Expected("arm", "[[arm]] tables, at least one");
  }
  std::set<std::string> names = {kControlName};
  for (const toml::node& node : *arms->as_array()) {
    RT_ASSIGN_OR_RETURN(ExperimentArm arm, ReadArm(node, file, plan, defaults));
    if (!names.insert(arm.name).second) {
      return UsageError(fmt::format("{}: name: '{}' is taken", arm.where, arm.name));
    }
    plan.arms.push_back(std::move(arm));
  }
  RT_RETURN_IF_ERROR(CheckPower(plan, file));
  return plan;
}

}  // namespace

Result<ExperimentPlan> ParseExperiment(std::string_view toml, const std::string& file) {
  RT_RETURN_IF_ERROR(CheckTomlSize(toml).Within(file));
  try {
    return ReadPlan(toml::parse(toml, file), file);
  } catch (const toml::parse_error& error) {
    return UsageError(Place(file, error.source()) +
                      ": not TOML: " + std::string(error.description()));
  } catch (const std::exception& error) {
    return UsageError(file + ": can not be parsed: " + error.what());
  }
}

Result<ExperimentPlan> LoadExperiment(const std::string& path) {
  RT_ASSIGN_OR_RETURN(const std::string text, ReadTomlFile(path, "an experiment"));
  return ParseExperiment(text, path);
}

}  // namespace retrace
