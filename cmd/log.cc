#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/logged_run.h"
#include "cmd/terminal_plot.h"
#include "cmd/text_table.h"
#include "core/update_range.h"
#include "cmd/written_file.h"
#include "formats/event_file.h"
#include "replay/record.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace log runs/demo --steps 1..24             # a table
  retrace log runs/demo runs/demo-clip --plot     # a run and its branch, one over the other
  retrace log runs/demo --csv > demo.csv
  retrace log runs/demo --json | jq .loss         # one record a line (JSONL)
  retrace log runs/demo --tensorboard tb          # event files: tensorboard --logdir tb
The loss of update k is that of its batch (eval: of the fixed evaluation batch) before the update, at
RUN@(k-1). --plot draws the evaluation loss where all runs have one. A rise is counted from the least
loss before it. A tensor moves when its share of the squared gradient norm grows.)";

constexpr size_t kDigestPrefix = 12;
constexpr int kLossRows = 12, kNormRows = 8;
constexpr int kMoversAlone = 6, kMoversEach = 3, kMoverBinsMin = 8, kMoverBinsMax = 32;

struct LogFlags {
  std::vector<std::string> runs;
  std::string steps, tensorboard;
  bool csv = false, plot = false, ascii = false;
  int width = 0;
  OutputFlags output;
};

std::string JsonLines(const std::vector<LoggedRun>& runs) {
  std::string out;
  for (const LoggedRun& run : runs) {
    for (const PositionEntry* entry : run.entries) {
      Json json = {{"run", run.run->dir()}, {"digest", entry->digest.Hex()}};
      json.update(Json::parse(entry->record, nullptr, false));
      out += json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
    }
  }
  return out;
}

std::string CsvLines(const std::vector<LoggedRun>& runs) {
  std::string out =
      "run,update,loss,evaluation_loss,gradient_norm,clip,lr,action,first_sample,samples,digest\n";
  for (const LoggedRun& run : runs) {
    for (size_t i = 0; i < run.records.size(); ++i) {
      const UpdateRecord& r = run.records[i];
      out += fmt::format("{},{},{},{},{},{},{},{},{},{},{}\n", CsvField(run.run->dir()), r.update,
                         r.loss, r.evaluation_loss ? fmt::format("{}", *r.evaluation_loss) : "",
                         r.gradient_norm, r.clip, r.lr, CsvField(r.action), r.first_sample,
                         r.samples, run.entries[i]->digest.Hex());
    }
  }
  return out;
}

// Tags as TensorBoard groups them, by what stands before the slash. Its values are FP32.
EventFile EventsOf(const LoggedRun& run) {
  EventFile file;
  double seconds = 0;
  const std::vector<TensorSpec>& tensors = run.run->layout().tensors();
  for (const UpdateRecord& r : run.records) {
    seconds += r.timing.update_seconds + r.timing.stall_seconds;
    std::vector<std::pair<std::string, double>> values = {{"loss/training", r.loss}};
    if (r.evaluation_loss) values.emplace_back("loss/evaluation", *r.evaluation_loss);
    values.emplace_back("gradient/norm", r.gradient_norm);
    values.emplace_back("gradient/clip", r.clip);
    values.emplace_back("optimizer/lr", r.lr);
    for (size_t t = 0; t < tensors.size(); ++t) {
      values.emplace_back("gradient_norm/" + tensors[t].name, r.tensor_norms[t]);
      if (!r.norms) continue;
      values.emplace_back("parameter_norm/" + tensors[t].name, r.norms->p[t]);
      values.emplace_back("update_norm/" + tensors[t].name, r.norms->change[t]);
    }
    file.Add(r.update, seconds, values);
  }
  return file;
}

void WriteEvents(const LogFlags& flags, const std::vector<LoggedRun>& runs) {
  const std::vector<std::string> names = DistinctNames(flags.runs);
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string folder = flags.tensorboard + "/" + names[i];
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error) Fail(FailedError(fmt::format("{}: can not be made: {}", folder, error.message())));
    const std::string path = folder + "/" + kEventFileName;
    OrFail(WriteWholeFile(path, EventsOf(runs[i]).bytes()));
    if (!flags.output.quiet) {
      SayError(fmt::format("{}: {} updates of {}", path, runs[i].records.size(), flags.runs[i]));
    }
  }
}

std::string Heading(const LogFlags& flags, const LoggedRun& run) {
  std::string text = Tinted(flags.output, Tint::kBold, run.run->dir());
  if (const std::string lineage = run.run->LineageText(); !lineage.empty()) text += ": " + lineage;
  return text + "\n";
}

std::string TableText(const LogFlags& flags, const LoggedRun& run) {
  const bool evaluated = std::any_of(run.records.begin(), run.records.end(),
                                     [](const UpdateRecord& r) { return r.evaluation_loss; });
  std::vector<TextTable::Column> columns = {{"update"}, {"loss"}};
  if (evaluated) columns.push_back({"eval"});
  for (const char* title : {"|g|", "clip", "lr"}) columns.push_back({title});
  columns.push_back({"state", true});
  columns.push_back({"action", true});
  TextTable table(columns);
  for (size_t i = 0; i < run.records.size(); ++i) {
    const UpdateRecord& r = run.records[i];
    std::vector<std::string> cells = {fmt::format("{}", r.update), fmt::format("{:.4f}", r.loss)};
    if (evaluated) {
      cells.push_back(r.evaluation_loss ? fmt::format("{:.4f}", *r.evaluation_loss) : "-");
    }
    cells.push_back(fmt::format("{:.4g}", r.gradient_norm));
    cells.push_back(fmt::format("{:.4g}", r.clip));
    cells.push_back(fmt::format("{:.4g}", r.lr));
    cells.push_back(run.entries[i]->digest.Hex().substr(0, kDigestPrefix));
    cells.push_back(r.action);
    table.AddRow(std::move(cells));
  }
  return table.Text(flags.output);
}

// Three digits, without an exponent where that is short.
std::string NormText(double norm) {
  return norm >= 1000 && norm < 1e6 ? fmt::format("{:.0f}", norm) : fmt::format("{:.3g}", norm);
}

std::string LossText(double loss) { return fmt::format("{:.3f}", loss); }

std::string At(const std::optional<std::pair<int64_t, double>>& point,
               std::string (*text)(double)) {
  return point ? fmt::format("{} @{}", text(point->second), point->first) : "-";
}

// One row a run: how it is drawn, and the numbers that the eye can not read off.
std::string LegendText(const std::vector<LoggedRun>& runs, bool evaluation,
                       const PlotStyle& style) {
  TextTable table({{"", true},
                   {"run", true},
                   {"loss, last"},
                   {style.ascii ? "least v" : "least ▼"},
                   {style.ascii ? "most ^" : "most ▲"},
                   {"largest rise"},
                   {"|g|, most"}});
  for (size_t i = 0; i < runs.size(); ++i) {
    const std::string sample = SeriesSample(style, i, runs.size());
    const std::string name = BaseName(runs[i].run->dir());
    if (runs[i].records.empty()) {
      table.AddRow({sample, name, "none in view", "-", "-", "-", "-"});
      continue;
    }
    const Curve loss = LossCurve(runs[i], evaluation);
    const CurveFacts facts = FactsOf(loss), norm = FactsOf(NormCurve(runs[i]));
    table.AddRow(
        {sample, name,
         fmt::format("{} @{}", LossText(loss.back().second), loss.back().first),
         At(facts.low, LossText), At(facts.high, LossText),
         facts.rise > 0
             ? fmt::format("{} @{}..{}", LossText(facts.rise), facts.rise_from, facts.rise_to)
             : "none",
         At(norm.high, NormText)});
  }
  return table.Text(style.output);
}

// How much of the squared gradient norm is a tensor's, from where to where its share grew most.
struct Mover {
  std::string name;
  std::vector<double> shares;  // by update in view
  size_t from = 0, to = 0;

  double growth() const { return shares[to] - shares[from]; }
};

std::vector<Mover> MoversOf(const LoggedRun& run, int count) {
  std::vector<Mover> movers;
  const std::vector<TensorSpec>& tensors = run.run->layout().tensors();
  std::vector<double> totals;
  for (const UpdateRecord& r : run.records) {
    double total = 0;
    for (double norm : r.tensor_norms) total += norm * norm;
    totals.push_back(total);
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    Mover mover{.name = tensors[t].name, .shares = {}};
    size_t least = 0;
    for (size_t i = 0; i < run.records.size(); ++i) {
      const double norm = run.records[i].tensor_norms[t], share = norm * norm / totals[i];
      mover.shares.push_back(std::isfinite(share) ? share : 0);
      if (mover.shares[i] < mover.shares[least]) least = i;
      if (mover.shares[i] - mover.shares[least] > mover.growth()) {
        mover.from = least;
        mover.to = i;
      }
    }
    if (!mover.shares.empty() && mover.growth() > 0) movers.push_back(std::move(mover));
  }
  std::stable_sort(movers.begin(), movers.end(),
                   [](const Mover& a, const Mover& b) { return a.growth() > b.growth(); });
  if (std::ssize(movers) > count) movers.resize(count);
  return movers;
}

std::string MoversText(const LoggedRun& run, const PlotStyle& style, int count) {
  const std::vector<Mover> movers = MoversOf(run, count);
  if (movers.empty()) return "";
  double full = 0;
  int used = 0;
  std::vector<std::string> moves;
  for (const Mover& mover : movers) {
    full = std::max(full, mover.shares[mover.to]);
    moves.push_back(fmt::format("{} @{} {} {} @{}", PercentText(mover.shares[mover.from]),
                                run.records[mover.from].update, style.ascii ? "->" : "→",
                                PercentText(mover.shares[mover.to]), run.records[mover.to].update));
    used = std::max(used, DisplayWidth(mover.name) + DisplayWidth(moves.back()) + 4);
  }
  const int bins = std::clamp(style.width - used, kMoverBinsMin, kMoverBinsMax);
  TextTable table({{"largest-moving tensors of " + BaseName(run.run->dir()), true},
                   {style.ascii ? "share of |g|^2" : "share of |g|²"},
                   {fmt::format("0..{}", PercentText(full)), true}});
  for (size_t i = 0; i < movers.size(); ++i) {
    table.AddRow({movers[i].name, moves[i], Sparkline(movers[i].shares, bins, full, style.ascii)});
  }
  return table.Text(style.output);
}

// The largest rise of the first run's loss, where it is a spike.
std::vector<PlotMark> SpikeOf(const std::vector<LoggedRun>& runs, const Curve& loss) {
  const CurveFacts facts = FactsOf(loss);
  if (facts.rise < kSpikeNats) return {};
  const std::string whose = runs.size() == 1 ? "" : BaseName(runs[0].run->dir()) + ", ";
  return {{facts.rise_to, fmt::format("{}update {}: {:.2f} nat above {:.2f} at {}", whose,
                                      facts.rise_to, facts.rise, facts.rise_low, facts.rise_from)}};
}

std::string PlotText(const LogFlags& flags, const std::vector<LoggedRun>& runs) {
  const PlotStyle style = {flags.width > 0 ? flags.width : TerminalWidth(), flags.ascii,
                           flags.output};
  const bool evaluation = AllEvaluated(runs);
  PlotPanel loss;
  loss.title = evaluation ? "evaluation loss (nat) by update" : "training loss (nat) by update";
  loss.rows = kLossRows;
  loss.first = INT64_MAX;
  PlotPanel norm;
  norm.title = "gradient norm before clipping (log scale) by update";
  norm.log = true;
  norm.rows = kNormRows;
  for (const LoggedRun& run : runs) {
    loss.series.push_back({LossCurve(run, evaluation)});
    norm.series.push_back({NormCurve(run)});
    if (run.records.empty()) continue;
    loss.first = std::min(loss.first, run.records.front().update);
    loss.last = std::max(loss.last, run.records.back().update);
  }
  loss.marks = norm.marks = SpikeOf(runs, loss.series[0].points);
  for (PlotMark& mark : norm.marks) mark.text.clear();
  norm.first = loss.first;
  norm.last = loss.last;
  std::string out = LegendText(runs, evaluation, style) + "\n" + PanelText(loss, style) + "\n" +
                    PanelText(norm, style);
  for (const LoggedRun& run : runs) {
    const std::string movers =
        MoversText(run, style, runs.size() == 1 ? kMoversAlone : kMoversEach);
    if (!movers.empty()) out += "\n" + movers;
  }
  return out;
}

void RunLog(const LogFlags& flags) {
  UpdateRange view = kAllUpdates;
  if (!flags.steps.empty()) view = OrFail(ParseUpdateRange(flags.steps, "--steps"));
  std::vector<LoggedRun> runs;
  bool any = false;
  for (const std::string& dir : flags.runs) {
    runs.push_back(OrFail(ReadLog(dir, view)));
    any = any || !runs.back().records.empty();
  }
  if (flags.output.json) return PrintReport(JsonLines(runs));
  if (flags.csv) return PrintReport(CsvLines(runs));
  if (!any) {
    const RunHistory& history = runs[0].run->history();
    if (history.last_position() <= history.first_position()) {
      Fail(UsageError(flags.runs[0] + ": the run has no updates yet"));
    }
    Fail(UsageError(fmt::format("--steps {}: {} has updates {}..{}", flags.steps, flags.runs[0],
                                history.first_position() + 1, history.last_position())));
  }
  if (!flags.tensorboard.empty()) return WriteEvents(flags, runs);
  if (flags.plot) return PrintReport(PlotText(flags, runs));
  std::string out;
  for (const LoggedRun& run : runs) {
    if (!out.empty()) out += "\n";
    if (runs.size() > 1) out += Heading(flags, run);
    out += TableText(flags, run);
  }
  PrintReport(out);
}

}  // namespace

void AddLogCommand(CLI::App& app) {
  CLI::App* log = app.add_subcommand("log", "The updates of runs, as a table or drawn");
  auto flags = std::make_shared<LogFlags>();
  log->add_option("run", flags->runs, "Run directories")->required();
  log->add_option("--steps", flags->steps, "Updates A..B; all by default");
  CLI::Option* plot = log->add_flag("--plot", flags->plot, "Draw loss and gradient norm");
  log->add_flag("--ascii", flags->ascii, "Draw with ASCII characters")->needs(plot);
  WholeIn(log->add_option("--width", flags->width, "Columns; those of the terminal by default"), 40,
          400);
  CLI::Option* csv = log->add_flag("--csv", flags->csv, "Print comma-separated values");
  CLI::Option* tensorboard = log->add_option(
      "--tensorboard", flags->tensorboard, "Write TensorBoard event files in DIR, a folder a run");
  tensorboard->type_name("DIR")->excludes(plot)->excludes(csv);
  AddOutputFlags(log, &flags->output, true);
  log->get_option("--json")->description("Print each record, with its state's digest, as JSON");
  csv->excludes(plot)->excludes("--json");
  log->get_option("--json")->excludes(plot)->excludes(tensorboard);
  log->footer(kExamples);
  log->callback([flags] { RunLog(*flags); });
}

}  // namespace retrace
