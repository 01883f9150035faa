#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "replay/record.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace show runs/demo                                    # what the run is, has and keeps
  retrace show runs/demo@12                                 # a state: counters, norms of p, m and v
  retrace show 'runs/demo@12:model.layers.3.*#v' --top 0    # moments of tensors, all that match
  retrace show 'runs/demo@12:model.norm.weight#g'           # the gradient of update 12
RUN@k is the state after k updates. #m and #v are Adam's moments, #g the gradient of update k before
clipping; without it the parameter is meant.)";

constexpr int64_t kFirstValues = 8;

struct ShowFlags {
  std::string address;
  int64_t top = 10;
  bool top_given = false;
  OutputFlags output;
};

Json Number(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

void PrintJson(const Json& json) {
  PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

// --- A run ---

struct DiskUse {
  int64_t files = 0;
  double keyframes = 0, journals = 0, other = 0, ledger = 0;  // bytes

  double total() const { return keyframes + journals + other + ledger; }
};

DiskUse DiskUseOf(const OpenedRun& run) {
  DiskUse use;
  std::error_code error;
  const auto ledger = std::filesystem::file_size(run.dir() + "/" + kLedgerName, error);
  if (!error) use.ledger = static_cast<double>(ledger);
  std::filesystem::directory_iterator files(run.dir() + "/" + kStepsName, error), end;
  for (; !error && files != end; files.increment(error)) {
    std::error_code gone;  // a run being written may retire it
    const auto size = static_cast<double>(files->file_size(gone));
    if (gone) continue;
    StepFileName name;
    const bool named = ParseStepFileName(files->path().filename().string(), &name);
    const PositionEntry* entry = named ? run.history().Find(name.position) : nullptr;
    ++use.files;
    if (entry == nullptr || !entry->master || name.temporary)
      use.other += size;
    else if (entry->HasKeyframe())
      use.keyframes += size;
    else
      use.journals += size;
  }
  return use;
}

// Positions by what is kept of them.
struct Kept {
  std::vector<int64_t> states, keyframes, journals, partials;  // states: that can be rebuilt
};

Kept KeptBy(const RunHistory& history) {
  Kept kept;
  bool reachable = false;
  for (const PositionEntry& entry : history.positions) {
    const int64_t k = entry.counters.position;
    reachable = entry.HasKeyframe() || (reachable && entry.HasJournal());
    if (reachable) kept.states.push_back(k);
    if (entry.HasKeyframe()) kept.keyframes.push_back(k);
    if (entry.HasJournal()) kept.journals.push_back(k);
    if (entry.HasPartial()) kept.partials.push_back(k);
  }
  return kept;
}

struct RunSummary {
  const OpenedRun& run;
  Kept kept;
  DiskUse disk;
  std::set<std::string> hosts;
  std::optional<UpdateRecord> last;  // record
  Json manifest;
};

Result<RunSummary> SummaryOf(const OpenedRun& run) {
  const RunHistory& history = run.history();
  RunSummary summary{run, KeptBy(history), DiskUseOf(run), {}, {}, {}};
  RT_ASSIGN_OR_RETURN(const LedgerContents ledger,
                      ReadLedger(FileOps(), run.dir() + "/" + kLedgerName));
  for (const LedgerLine& line : ledger.lines) {
    if (const auto* attempt = std::get_if<AttemptLine>(&line)) summary.hosts.insert(attempt->host);
  }
  if (history.last_position() > history.first_position()) {
    Result<UpdateRecord> record = ParseRecord(history.positions.back().record);
    if (!record.ok()) return record.status().Within(run.dir());
    summary.last = std::move(record).value();
  }
  summary.manifest = Json::parse(run.reader().manifest_text(), nullptr, false);
  return summary;
}

std::string ManifestText(const RunSummary& summary, const char* name) {
  const Json& manifest = summary.manifest;
  if (!manifest.is_object() || !manifest.contains(name) || !manifest[name].is_string()) return "";
  return manifest[name].get<std::string>();
}

Json JsonOf(const RunSummary& s) {
  const RunHistory& history = s.run.history();
  Json json = {{"run", s.run.dir()},
               {"name", s.run.recipe().name},
               {"parameters", s.run.layout().parameters()},
               {"tensors", s.run.layout().tensors().size()},
               {"layers", s.run.recipe().model.layers},
               {"virtual_shards", s.run.layout().shards()},
               {"first_position", history.first_position()},
               {"last_position", history.last_position()},
               {"steps_planned", s.run.recipe().steps}};
  if (!history.positions.empty()) json["last_digest"] = history.positions.back().digest.Hex();
  json["kept"] = {{"states", s.kept.states},
                  {"keyframes", s.kept.keyframes},
                  {"journals", s.kept.journals},
                  {"partial_keyframes", s.kept.partials}};
  json["held"] = Json::array();
  for (const KeepLine& keep : history.keeps) {
    json["held"].push_back({{"first", keep.first},
                            {"last", keep.last},
                            {"update", keep.update},
                            {"trigger", keep.trigger},
                            {"reason", keep.reason}});
  }
  json["bytes"] = {{"keyframes", s.disk.keyframes},
                   {"journals", s.disk.journals},
                   {"other", s.disk.other},
                   {"ledger", s.disk.ledger}};
  if (const auto& lineage = history.header.lineage) {
    json["lineage"] = {{"parent", lineage->parent},
                       {"parent_run", lineage->parent_run.Hex()},
                       {"position", lineage->position},
                       {"state", lineage->state.Hex()},
                       {"interventions", s.run.Interventions()}};
  }
  if (s.last) json["level"] = s.last->level;
  json["numerics"] = history.header.numerics;
  json["format"] = history.header.format;
  json["version"] = history.header.version;
  json["device"] = ManifestText(s, "device");
  json["driver"] = ManifestText(s, "driver");
  json["isa"] = ManifestText(s, "isa");
  json["libraries"] = ManifestText(s, "libraries");
  json["attempts"] = history.attempts;
  json["hosts"] = s.hosts;
  json["run_id"] = history.run.Hex();
  return json;
}

std::string UpdatesText(const RunSummary& s) {
  const RunHistory& history = s.run.history();
  const int64_t first = history.first_position() + 1, last = history.last_position();
  if (history.positions.empty()) return "none; no state yet";
  if (last < first) return fmt::format("none; planned are {}", s.run.recipe().steps);
  if (history.header.lineage) {
    return fmt::format("{}..{} ({})", first, last, last - first + 1);
  }
  return fmt::format("{} of {} done", last, s.run.recipe().steps);
}

std::string LastStateText(const RunSummary& s) {
  if (s.run.history().positions.empty()) return "none";
  std::string text = fmt::format("@{} {}", s.run.history().last_position(),
                                 s.run.history().positions.back().digest.Hex());
  if (s.last) {
    text += fmt::format("  (update {}: loss {:.4f}", s.last->update, s.last->loss);
    if (s.last->evaluation_loss) text += fmt::format(", eval {:.4f}", *s.last->evaluation_loss);
    text += fmt::format(", |g| {:.3g})", s.last->gradient_norm);
  }
  return text;
}

std::string KeptText(const Kept& kept) {
  std::string text = "states " + RangesText(kept.states);
  if (kept.states.empty()) return text;
  text += "; keyframes " + RangesText(kept.keyframes);
  if (!kept.journals.empty()) text += "; journals " + RangesText(kept.journals);
  if (!kept.partials.empty()) text += "; partial keyframes " + RangesText(kept.partials);
  return text;
}

std::string DiskText(const DiskUse& use) {
  std::string text = fmt::format("{} in {} step files: keyframes {}, journals {}, ledger {}",
                                 ByteText(use.total()), use.files, ByteText(use.keyframes),
                                 ByteText(use.journals), ByteText(use.ledger));
  if (use.other > 0) text += fmt::format(", of no step {}", ByteText(use.other));
  return text;
}

std::string MadeText(const RunSummary& s) {
  std::string text = fmt::format("{} ({}), retrace {}", ManifestText(s, "device"),
                                 ManifestText(s, "isa"), s.run.history().header.version);
  if (const std::string libraries = ManifestText(s, "libraries"); !libraries.empty()) {
    text += ", " + libraries;
  }
  return text + fmt::format("; {} attempt{} on {}", s.run.history().attempts,
                            s.run.history().attempts == 1 ? "" : "s", fmt::join(s.hosts, ", "));
}

void ShowRun(const ShowFlags& flags, const OpenedRun& run) {
  const RunSummary s = OrFail(SummaryOf(run));
  if (flags.output.json) return PrintJson(JsonOf(s));
  const Recipe& recipe = run.recipe();
  std::string out = Tinted(flags.output, Tint::kBold, run.dir()) + "\n";
  const auto line = [&](const char* name, const std::string& text) {
    out += Tinted(flags.output, Tint::kDim, fmt::format("  {:<11}", name)) + text + "\n";
  };
  line("recipe", fmt::format("{}: {} parameters in {} tensors, {} layers, {} virtual shard{}",
                             recipe.name, Grouped(run.layout().parameters()),
                             run.layout().tensors().size(), recipe.model.layers,
                             run.layout().shards(), run.layout().shards() == 1 ? "" : "s"));
  if (const auto& lineage = run.history().header.lineage) {
    line("branch of",
         fmt::format("{}@{} {}", lineage->parent, lineage->position, lineage->state.Hex()));
    for (const std::string& text : run.Interventions()) line("  with", text);
  }
  line("updates", UpdatesText(s));
  line("last state", LastStateText(s));
  line("kept", KeptText(s.kept));
  for (const KeepLine& keep : run.history().keeps) {
    line("  held", fmt::format("{}..{} since update {}: {}", keep.first, keep.last, keep.update,
                               keep.reason));
  }
  line("on disk", DiskText(s.disk));
  line("level", fmt::format("{}, {}", s.last ? s.last->level : "-", run.history().header.numerics));
  line("made on", MadeText(s));
  line("run id", run.history().run.Hex());
  PrintReport(out);
}

// --- Tensors ---

struct ShownTensor {
  NamedTensor tensor;
  TensorStatistics statistics;
};

std::vector<ShownTensor> StatisticsOfAll(std::vector<NamedTensor> tensors, ThreadPool& pool) {
  std::vector<ShownTensor> shown(tensors.size());
  pool.Run(std::ssize(tensors), [&](int64_t i, int) {
    shown[i].statistics = StatisticsOf(tensors[i].view);
    shown[i].tensor = std::move(tensors[i]);
  });
  return shown;
}

Json JsonOf(const ShownTensor& shown) {
  const TensorStatistics& s = shown.statistics;
  return {{"name", shown.tensor.name},
          {"component", shown.tensor.component},
          {"shape", shown.tensor.shape},
          {"norm", Number(s.norm)},
          {"mean", Number(s.mean)},
          {"min", Number(s.min)},
          {"max", Number(s.max)},
          {"elements", s.elements},
          {"zeros", s.zeros},
          {"nans", s.nans},
          {"infinities", s.infinities}};
}

// "3 zeros, 1 NaN": what deserves a word, or "".
std::string CountsText(const TensorStatistics& s) {
  std::string text;
  const auto add = [&](int64_t count, const char* what) {
    if (count > 0) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", Grouped(count), what);
  };
  add(s.zeros, "zeros");
  add(s.nans, "NaN");
  add(s.infinities, "infinite");
  return text;
}

TensorStatistics Together(const std::vector<ShownTensor>& shown, const std::string& component) {
  TensorStatistics all;
  double squares = 0;
  bool any = false;
  for (const ShownTensor& tensor : shown) {
    const TensorStatistics& s = tensor.statistics;
    if (tensor.tensor.component != component) continue;
    all.elements += s.elements;
    all.zeros += s.zeros;
    all.nans += s.nans;
    all.infinities += s.infinities;
    squares += s.norm * s.norm;
    if (s.elements == s.nans) continue;
    all.min = any ? std::min(all.min, s.min) : s.min;
    all.max = any ? std::max(all.max, s.max) : s.max;
    any = true;
  }
  all.norm = std::sqrt(squares);
  return all;
}

// How the state comes about, and what else it is made of.
std::string StateHead(const ShowFlags& flags, OpenedRun& run, int64_t k, const State& state) {
  const PositionEntry& entry = *run.history().Find(k);
  const SeekPlan plan = OrFail(run.timeline().Plan(k));
  std::string out =
      fmt::format("{}  {}\n", Tinted(flags.output, Tint::kBold, fmt::format("{}@{}", run.dir(), k)),
                  entry.digest.Hex());
  out += plan.journals == 0
             ? "  kept as a keyframe\n"
             : fmt::format("  rebuilt from keyframe {} and {} journal{}\n", plan.keyframe,
                           plan.journals, plan.journals == 1 ? "" : "s");
  const Counters& c = state.counters;
  out += fmt::format("  schedule_index {}, data_cursor {}, ", c.schedule_index, c.data_cursor);
  const auto [least, most] = std::minmax_element(c.adam_t.begin(), c.adam_t.end());
  if (least == c.adam_t.end())
    out += "no adam_t\n";
  else if (*least == *most)
    out += fmt::format("adam_t {} of every tensor\n", *least);
  else
    out += fmt::format("adam_t {}..{}\n", *least, *most);
  for (const auto& [name, values] : state.memory) {
    out += fmt::format("  memory {} = {}\n", name, fmt::join(values, ", "));
  }
  return out;
}

std::string ComponentTable(const ShowFlags& flags, const std::vector<ShownTensor>& shown) {
  TextTable table({{"", true}, {"norm"}, {"min"}, {"max"}, {"elements"}, {"", true}});
  for (const char* component : {"p", "m", "v"}) {
    const TensorStatistics s = Together(shown, component);
    table.AddRow({component, fmt::format("{:.6g}", s.norm), fmt::format("{:.4g}", s.min),
                  fmt::format("{:.4g}", s.max), Grouped(s.elements), CountsText(s)});
  }
  return table.Text(flags.output, 2);
}

// One row a tensor, by the norm of p.
std::string TopTable(const ShowFlags& flags, const std::vector<ShownTensor>& shown,
                     size_t tensors) {
  std::vector<size_t> order(tensors);
  for (size_t t = 0; t < tensors; ++t) order[t] = t;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return shown[a].statistics.norm > shown[b].statistics.norm;
  });
  const size_t top = flags.top > 0 ? std::min<size_t>(tensors, flags.top) : tensors;
  TextTable table({{fmt::format("by norm, {} of {} tensors", top, tensors), true},
                   {"shape", true},
                   {"|p|"},
                   {"|m|"},
                   {"|v|"},
                   {"p min"},
                   {"p max"},
                   {"", true}});
  for (size_t i = 0; i < top; ++i) {
    const ShownTensor& p = shown[order[i]];
    table.AddRow({p.tensor.name, ShapeText(p.tensor.shape),
                  fmt::format("{:.4g}", p.statistics.norm),
                  fmt::format("{:.3g}", shown[tensors + order[i]].statistics.norm),
                  fmt::format("{:.3g}", shown[2 * tensors + order[i]].statistics.norm),
                  fmt::format("{:.3g}", p.statistics.min), fmt::format("{:.3g}", p.statistics.max),
                  CountsText(p.statistics)});
  }
  return table.Text(flags.output, 2);
}

void ShowState(const ShowFlags& flags, OpenedRun& run, int64_t k) {
  const State state = OrFail(run.timeline().Seek(k));
  const std::vector<ShownTensor> shown =
      StatisticsOfAll(StateTensors(run.layout(), state, Selection()), run.engine().pool());
  if (flags.output.json) {
    Json json = {{"run", run.dir()},
                 {"position", k},
                 {"digest", run.history().Find(k)->digest.Hex()},
                 {"schedule_index", state.counters.schedule_index},
                 {"data_cursor", state.counters.data_cursor},
                 {"adam_t", state.counters.adam_t}};
    json["memory"] = Json::object();
    for (const auto& [name, values] : state.memory) {
      for (double value : values) json["memory"][name].push_back(Number(value));
    }
    for (const ShownTensor& tensor : shown) json["tensors"].push_back(JsonOf(tensor));
    return PrintJson(json);
  }
  PrintReport(StateHead(flags, run, k, state) + "\n" + ComponentTable(flags, shown) + "\n" +
              TopTable(flags, shown, run.layout().tensors().size()));
}

void PrintTensors(const ShowFlags& flags, const OpenedRun& run, const StateAddress& address,
                  const std::vector<ShownTensor>& shown) {
  size_t top = shown.size();
  if (flags.top > 0 && (flags.top_given || !flags.output.json)) {
    top = std::min<size_t>(top, flags.top);
  }
  if (flags.output.json) {
    Json json = {{"run", run.dir()},
                 {"position", *address.position},
                 {"digest", run.history().Find(*address.position)->digest.Hex()},
                 {"matching", shown.size()}};
    for (size_t i = 0; i < top; ++i) {
      Json tensor = JsonOf(shown[i]);
      for (float x : FirstValues(shown[i].tensor.view, kFirstValues)) {
        tensor["first_values"].push_back(Number(x));
      }
      json["tensors"].push_back(std::move(tensor));
    }
    return PrintJson(json);
  }
  std::string out;
  for (size_t i = 0; i < top; ++i) {
    const TensorStatistics& s = shown[i].statistics;
    const std::string counts = CountsText(s);
    out += fmt::format("{} {}\n  norm {:.6g}, mean {:.4g}, min {:.6g}, max {:.6g}{}{}\n  {}{}\n",
                       Tinted(flags.output, Tint::kBold,
                              TensorLabel(shown[i].tensor.name, shown[i].tensor.component)),
                       ShapeText(shown[i].tensor.shape), s.norm, s.mean, s.min, s.max,
                       counts.empty() ? "" : "; ", counts,
                       fmt::join(FirstValues(shown[i].tensor.view, kFirstValues), " "),
                       s.elements > kFirstValues ? " ..." : "");
  }
  if (top < shown.size()) out += fmt::format("{} more; --top 0 shows all\n", shown.size() - top);
  PrintReport(out);
}

void ShowTensors(const ShowFlags& flags, OpenedRun& run, const StateAddress& address) {
  const bool gradient = address.component == "g";
  const Selection selection = OrFail(SelectionOf(
      run.layout(), address.glob, address.component.empty() || gradient ? "p" : address.component));
  if (gradient) {
    const Journal journal = OrFail(run.ReadJournal(*address.position));
    return PrintTensors(flags, run, address,
                        StatisticsOfAll(GradientTensors(run.layout(), journal.gradients, selection),
                                        run.engine().pool()));
  }
  const State state = OrFail(run.timeline().Seek(*address.position));
  PrintTensors(flags, run, address,
               StatisticsOfAll(StateTensors(run.layout(), state, selection), run.engine().pool()));
}

void RunShow(const ShowFlags& flags) {
  const StateAddress address = OrFail(ParseStateAddress(flags.address));
  const std::unique_ptr<OpenedRun> run = OrFail(OpenedRun::Open(address.run));
  if (!address.position) return ShowRun(flags, *run);
  OrFail(run->CheckPosition(*address.position));
  if (address.glob.empty() && address.component.empty()) {
    return ShowState(flags, *run, *address.position);
  }
  ShowTensors(flags, *run, address);
}

}  // namespace

void AddShowCommand(CLI::App& app) {
  CLI::App* show = app.add_subcommand("show", "What a run has, what a state or a tensor is");
  auto flags = std::make_shared<ShowFlags>();
  show->add_option("address", flags->address, "RUN, RUN@k or RUN@k:GLOB[#m|#v|#g]")->required();
  CLI::Option* top = WholeIn(show->add_option("--top", flags->top, "Tensors to show; 0: all"), 0)
                         ->capture_default_str();
  AddOutputFlags(show, &flags->output, true);
  show->footer(kExamples);
  show->callback([flags, top] {
    flags->top_given = top->count() > 0;
    RunShow(*flags);
  });
}

}  // namespace retrace
