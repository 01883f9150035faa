#include "cmd/report_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "cmd/report_motion.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"
#include "core/version.h"
#include "formats/ledger.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kBandRuns = 3;  // fewer replicas are drawn one by one

Json Number(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

// One member of every record.
template <class Get>
Json Column(const LoggedRun& run, Get get) {
  Json column = Json::array();
  for (const UpdateRecord& r : run.records) column.push_back(Number(get(r)));
  return column;
}

bool Evaluated(const LoggedRun& run) {
  return !run.records.empty() &&
         std::all_of(run.records.begin(), run.records.end(),
                     [](const UpdateRecord& r) { return r.evaluation_loss.has_value(); });
}

Json CurvesJson(const LoggedRun& run) {
  Json json = {{"first", run.records.empty() ? 0 : run.records.front().update},
               {"loss", Column(run, [](const UpdateRecord& r) { return r.loss; })}};
  if (Evaluated(run)) {
    json["evaluation_loss"] = Column(run, [](const UpdateRecord& r) { return *r.evaluation_loss; });
  }
  json["gradient_norm"] = Column(run, [](const UpdateRecord& r) { return r.gradient_norm; });
  json["clip"] = Column(run, [](const UpdateRecord& r) { return r.clip; });
  json["lr"] = Column(run, [](const UpdateRecord& r) { return r.lr; });
  Json actions = Json::object();
  for (const UpdateRecord& r : run.records) {
    if (r.action != "applied") actions[std::to_string(r.update)] = r.action;
  }
  json["actions"] = std::move(actions);
  return json;
}

// --- Where a run comes from, and where it was made ---

struct LineageParts {
  std::vector<std::string> changes;  // without noise
  std::string noise;                 // perturb's text without its seed; "": none
};

LineageParts PartsOf(const OpenedRun& run) {
  LineageParts parts;
  for (const std::string& text : run.Interventions()) {
    if (!text.starts_with("perturb:")) {
      parts.changes.push_back(text);
      continue;
    }
    parts.noise = text;
    const size_t seed = text.find("seed=");
    if (seed == std::string::npos) continue;
    size_t end = seed;
    while (end < text.size() && text[end] != ',' && text[end] != '@') ++end;
    if (end < text.size() && text[end] == ',') ++end;
    parts.noise.erase(seed, end - seed);
  }
  return parts;
}

Json LineageJson(const ReportSources& sources, const OpenedRun& run) {
  const std::optional<Lineage>& lineage = run.history().header.lineage;
  if (!lineage) return nullptr;
  Json json = {{"parent", lineage->parent},
               {"position", lineage->position},
               {"state", lineage->state.Hex()},
               {"interventions", run.Interventions()},
               {"run", nullptr}};
  for (size_t i = 0; i < sources.runs.size(); ++i) {
    if (sources.runs[i].run->history().run == lineage->parent_run) {
      json["run"] = i;
      break;
    }
  }
  return json;
}

std::string ManifestText(const Json& manifest, const char* name) {
  const auto value = manifest.is_object() ? manifest.find(name) : manifest.end();
  return manifest.is_object() && value != manifest.end() && value->is_string()
             ? value->get<std::string>()
             : "";
}

Result<Json> EnvironmentJson(const LoggedRun& logged) {
  const OpenedRun& run = *logged.run;
  RT_ASSIGN_OR_RETURN(const LedgerContents ledger,
                      ReadLedger(FileOps(), run.dir() + "/" + kLedgerName));
  std::set<std::string> hosts;
  for (const LedgerLine& line : ledger.lines) {
    if (const auto* attempt = std::get_if<AttemptLine>(&line)) hosts.insert(attempt->host);
  }
  const Json manifest = Json::parse(run.reader().manifest_text(), nullptr, false);
  std::set<std::string> levels;
  for (const UpdateRecord& r : logged.records) levels.insert(r.level);
  return Json{{"level", fmt::format("{}", fmt::join(levels, ", "))},
              {"numerics", run.history().header.numerics},
              {"version", run.history().header.version},
              {"format", run.history().header.format},
              {"device", ManifestText(manifest, "device")},
              {"isa", ManifestText(manifest, "isa")},
              {"libraries", ManifestText(manifest, "libraries")},
              {"hosts", hosts},
              {"attempts", run.history().attempts},
              {"virtual_shards", run.layout().shards()},
              {"lanes", run.recipe().topology.lanes}};
}

Json FactsJson(const LoggedRun& run) {
  const CurveFacts facts = FactsOf(LossCurve(run, Evaluated(run)));
  return {{"rise", facts.rise},
          {"rise_low", facts.rise_low},
          {"rise_from", facts.rise_from},
          {"rise_to", facts.rise_to}};
}

Result<Json> RunJson(const ReportSources& sources, size_t index, const std::string& name) {
  const LoggedRun& logged = sources.runs[index];
  const OpenedRun& run = *logged.run;
  const RunHistory& history = run.history();
  Json json = {{"name", name},
               {"dir", run.dir()},
               {"id", history.run.Hex()},
               {"recipe", run.recipe().name},
               {"recipe_digest", history.header.recipe.Hex()},
               {"parameters", run.layout().parameters()},
               {"tensors", run.layout().tensors().size()},
               {"layers", run.recipe().model.layers},
               {"first_position", history.first_position()},
               {"last_position", history.last_position()},
               {"lineage", LineageJson(sources, run)},
               {"curves", CurvesJson(logged)},
               {"facts", FactsJson(logged)}};
  json["last_state"] = history.positions.empty() ? "" : history.positions.back().digest.Hex();
  std::vector<int64_t> kept;
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    if (history.NearestKeyframe(k)) kept.push_back(k);
  }
  json["kept"] = RangesText(kept);
  RT_ASSIGN_OR_RETURN(json["environment"], EnvironmentJson(logged));
  return json;
}

// Replicas of one thing: branches of one state that differ in the seed of their noise alone.
Json GroupsJson(const ReportSources& sources) {
  std::map<std::string, Json> groups;
  for (size_t i = 0; i < sources.runs.size(); ++i) {
    const std::optional<Lineage>& lineage = sources.runs[i].run->history().header.lineage;
    if (!lineage) continue;
    const LineageParts parts = PartsOf(*sources.runs[i].run);
    if (parts.noise.empty()) continue;
    const std::string changes = fmt::format("{}", fmt::join(parts.changes, " "));
    Json& group = groups[fmt::format("{}@{} {} {}", lineage->parent_run.Hex(), lineage->position,
                                     parts.noise, changes)];
    if (group.is_null()) {
      group = {{"name", changes.empty() ? "noise alone" : changes},
               {"noise", parts.noise},
               {"runs", Json::array()}};
    }
    group["runs"].push_back(i);
  }
  Json list = Json::array();
  for (auto& [key, group] : groups) {
    if (group["runs"].size() >= kBandRuns) list.push_back(std::move(group));
  }
  std::sort(list.begin(), list.end(),
            [](const Json& a, const Json& b) { return a["runs"][0] < b["runs"][0]; });
  return list;
}

// Keys that are not the same in all runs, with the value of each.
Json RecipesJson(const ReportSources& sources) {
  std::set<std::string> keys;
  for (const LoggedRun& run : sources.runs) {
    for (const RecipeDifference& d :
         DiffRecipes(sources.runs[0].run->recipe(), run.run->recipe())) {
      keys.insert(d.key);
    }
  }
  Json list = Json::array();
  std::vector<Json> recipes;
  for (const LoggedRun& run : sources.runs) {
    recipes.push_back(Json::parse(RecipeJson(run.run->recipe())));
  }
  for (const std::string& key : keys) {
    Json values = Json::array();
    for (const Json& recipe : recipes) {
      const auto value = recipe.find(key);
      values.push_back(value == recipe.end() ? "-" : value->dump());
    }
    list.push_back({{"key", key}, {"values", std::move(values)}});
  }
  return list;
}

std::string TitleOf(const ReportSources& sources, const std::vector<std::string>& names,
                    const Json& experiment) {
  if (!sources.title.empty()) return sources.title;
  if (names.empty()) return BaseName(experiment.value("file", "experiment"));
  if (names.size() == 1) return names[0];
  return names.size() == 2 ? names[0] + " and " + names[1]
                           : fmt::format("{} and {} other runs", names[0], names.size() - 1);
}

}  // namespace

Result<std::string> ReportJson(ReportSources& sources) {
  std::vector<std::string> dirs;
  for (const LoggedRun& run : sources.runs) dirs.push_back(run.run->dir());
  const std::vector<std::string> names = DistinctNames(dirs);
  const Json experiment =
      sources.experiment.empty() ? Json(nullptr) : Json::parse(sources.experiment);
  Json json = {{"format", 1},
               {"version", kVersion},
               {"title", TitleOf(sources, names, experiment)},
               {"spike_nats", kSpikeNats},
               {"runs", Json::array()}};
  for (size_t i = 0; i < sources.runs.size(); ++i) {
    RT_ASSIGN_OR_RETURN(Json run, RunJson(sources, i, names[i]));
    json["runs"].push_back(std::move(run));
  }
  json["groups"] = GroupsJson(sources);
  json["recipes"] = sources.runs.empty() ? Json::array() : RecipesJson(sources);
  RT_ASSIGN_OR_RETURN(const std::string motion, MotionJson(sources));
  json["motion"] = motion.empty() ? Json(nullptr) : Json::parse(motion);
  json["experiment"] = experiment;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace retrace
