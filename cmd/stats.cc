#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/logged_run.h"
#include "cmd/stats_table.h"
#include "cmd/text_table.h"
#include "core/glob.h"
#include "core/update_range.h"
#include "replay/solo_comm.h"
#include "replay/state_norms.h"
#include "surgery/diagnose.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace stats runs/demo --steps 5..14                            # all tensors together
  retrace stats runs/demo --steps 9..12 --by layer                 # a row a layer and update
  retrace stats runs/demo --steps 9..12 --by tensor --only '*.q_proj.*' --csv > q.csv
  retrace stats runs/demo --steps 12..12 --rows 20                 # the embedding's rows
  retrace stats runs/demo --steps 9..12 --replay --by layer        # forward and backward pass
No forward pass: norms, shares, update RMS and counts come from the records of the ledger, the rest
from keyframes and journals, where they are kept ('-': not known). w is the parameter before the
update, dw its change; update RMS is that of dw in learning rates, weight decay included; g is the
gradient before clipping, g' that of the update before, m Adam's first moment before the update, v^ its
second after it, bias-corrected. q1 to q99 are quantiles of (clipped g)^2 / v^, right to 2 %; signs is
the share of elements whose g and g' have one sign, of those where neither is zero. Counts of zero,
subnormal, infinite and NaN elements of g, and of p, m and v after the update, stand in --csv and
--json.
--replay lives the updates again, proven by digest, and tells of their passes, --by layer or all. By
layer: RMS of the residual after it, RMS of what attention and MLP add over that of what they are added
to, the largest attention logit, a query's largest probability and its entropy (nats; means), |dL/dx|
of the layer's output. Of the update: the embedding's RMS and gradient, logits, share of them beyond
9/10 of the softcap, cosine of pairs of tokens after the last norm, the token that is predicted most
often, for what share of tokens and with what probability, the losses of sequences (all in --csv,
--json).)";

constexpr char kEmbeddingName[] = "model.embed_tokens.weight";

struct StatsFlags {
  std::string run, steps, by = "all", only;
  int64_t rows = 0;
  bool replay = false, csv = false;
  JobFlags job;
  OutputFlags output;
};

// --- Which tensors are one row ---

struct Group {
  std::string name;
  std::vector<size_t> tensors;
};

std::string GroupName(const TensorSpec& spec, const std::string& by) {
  if (by == "tensor") return spec.name;
  if (by == "kind" || (by == "layer" && spec.layer < 0)) return TensorKind(spec);
  return by == "layer" ? fmt::format("layer {}", spec.layer) : "all";
}

std::vector<Group> GroupsOf(const Layout& layout, const StatsFlags& flags) {
  std::vector<Group> groups;
  std::vector<int64_t> order;  // layers by number, what is outside the layers first
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const TensorSpec& spec = layout.tensors()[t];
    if (!GlobMatches(flags.only, spec.name)) continue;
    const std::string name = GroupName(spec, flags.by);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const Group& g) { return g.name == name; });
    if (group == groups.end()) group = groups.insert(groups.end(), {name, {}});
    group->tensors.push_back(t);
  }
  if (flags.by == "layer") {
    std::stable_sort(groups.begin(), groups.end(), [&](const Group& a, const Group& b) {
      return layout.tensors()[a.tensors[0]].layer < layout.tensors()[b.tensors[0]].layer;
    });
  }
  return groups;
}

// --- What is said of them ---

// One group in one update.
struct Subject {
  const UpdateRecord& record;
  const Layout& layout;
  const Group& group;
  const TensorMotion* motion;  // of the group; null: no states are kept

  double Elements() const {
    double sum = 0;
    for (size_t t : group.tensors) sum += static_cast<double>(layout.tensors()[t].numel());
    return sum;
  }
  // Of the group, from the norms of tensors.
  double Norm(const std::vector<double>& norms) const {
    double sum = 0;
    for (size_t t : group.tensors) sum += norms[t] * norms[t];
    return std::sqrt(sum);
  }
  // From the record, else from the states.
  Value Norm(std::vector<double> TensorNorms::*norms, double TensorMotion::*squares) const {
    if (record.norms) return Norm((*record.norms).*norms);
    return motion != nullptr ? Value(std::sqrt(motion->*squares)) : Value();
  }
  Value Change() const { return Norm(&TensorNorms::change, &TensorMotion::change2); }
  // From the states; NaN there: not known.
  Value Kept(const std::function<double(const TensorMotion&)>& get) const {
    const double value = motion != nullptr ? get(*motion) : std::nan("");
    return std::isnan(value) ? Value() : Value(value);
  }
  Value Share(double TensorMotion::*count) const {
    return Kept([&](const TensorMotion& m) { return m.*count / m.elements; });
  }
  Value Odd(const std::string& of, int64_t TensorNorms::Odd::*count) const {
    if (!record.norms) return {};
    double sum = 0;
    for (const TensorNorms::Odd& odd : record.norms->odd) {
      const auto tensor = static_cast<size_t>(odd.tensor);
      const bool in = std::find(group.tensors.begin(), group.tensors.end(), tensor) !=
                      group.tensors.end();
      if (in && odd.of == of) sum += static_cast<double>(odd.*count);
    }
    return sum;
  }
};

Value ShareOfGradient(const Subject& s) {
  const double norm = s.Norm(s.record.tensor_norms);
  double total = 0;
  for (double n : s.record.tensor_norms) total += n * n;
  return total > 0 ? Value(norm * norm / total) : Value();
}

Value Over(const Value& above, double below) {
  return above && below > 0 ? Value(*above / below) : Value();
}

// A column, and how a group has it.
struct Measure {
  StatsColumn column;
  std::function<Value(const Subject&)> get;
};

void AddQuantiles(std::vector<Measure>* measures) {
  for (const int percent : {1, 10, 50, 90, 99}) {
    const Shown shown = percent == 10 || percent == 90 ? Shown::kNotInTable : Shown::kNumber;
    measures->push_back({{fmt::format("ratio_q{}", percent), fmt::format("q{}", percent), shown},
                        [percent](const Subject& s) {
                          return s.Kept([percent](const TensorMotion& m) {
                            return m.ratios.Quantile(percent / 100.0);
                          });
                        }});
  }
}

void AddCounts(std::vector<Measure>* measures) {
  for (const char* of : {"g", "p", "m", "v"}) {
    for (const auto& [name, count] :
         {std::pair("zero", &TensorNorms::Odd::zero),
          std::pair("subnormal", &TensorNorms::Odd::subnormal),
          std::pair("infinite", &TensorNorms::Odd::infinite),
          std::pair("nan", &TensorNorms::Odd::nan)}) {
      const int64_t TensorNorms::Odd::*member = count;
      measures->push_back({{fmt::format("{}_{}", of, name), "", Shown::kNotInTable},
                          [of, member](const Subject& s) {
                            return s.Odd(of, const_cast<int64_t TensorNorms::Odd::*>(member));
                          }});
    }
  }
}

std::vector<Measure> Measures() {
  using S = const Subject&;
  const auto share = [](double TensorMotion::*count) {
    return [count](S s) { return s.Share(count); };
  };
  const auto kept = [](double (TensorMotion::*get)() const) {
    return [get](S s) { return s.Kept([get](const TensorMotion& m) { return (m.*get)(); }); };
  };
  const auto parameter = [](S s) { return s.Norm(&TensorNorms::p, &TensorMotion::parameter2); };
  std::vector<Measure> measures = {
      {{"clip", "clip"}, [](S s) { return Value(s.record.clip); }},
      {{"g_norm", "|g|"}, [](S s) { return Value(s.Norm(s.record.tensor_norms)); }},
      {{"g_share", "of |g|²", Shown::kPercent}, ShareOfGradient},
      {{"p_norm", "|w|"}, parameter},
      {{"m_norm", "", Shown::kNotInTable},
       [](S s) { return s.Norm(&TensorNorms::m, &TensorMotion::first2); }},
      {{"v_norm", "", Shown::kNotInTable},
       [](S s) { return s.record.norms ? Value(s.Norm(s.record.norms->v)) : Value(); }},
      {{"change_norm", "", Shown::kNotInTable}, [](S s) { return s.Change(); }},
      {{"update_rms", "RMS"},
       [](S s) { return Over(s.Change(), std::sqrt(s.Elements()) * s.record.lr); }},
      {{"relative_update", "|dw|/|w|"},
       [parameter](S s) { return Over(s.Change(), parameter(s).value_or(0)); }},
      {{"root_v", "", Shown::kNotInTable}, kept(&TensorMotion::RootV)}};
  AddQuantiles(&measures);
  measures.push_back({{"v_below_eps", "√v^<ε", Shown::kPercent}, share(&TensorMotion::below_eps)});
  measures.push_back(
      {{"g_below_eps", "|g|<ε", Shown::kPercent}, share(&TensorMotion::gradient_below)});
  measures.push_back(
      {{"cos_m_g", "cos(m,g)", Shown::kCosine}, kept(&TensorMotion::CosineWithM)});
  measures.push_back(
      {{"signs_m_g", "", Shown::kNotInTable}, kept(&TensorMotion::SignsWithM)});
  measures.push_back(
      {{"cos_g_g", "cos(g,g')", Shown::kCosine}, kept(&TensorMotion::CosineWithLast)});
  measures.push_back(
      {{"signs_g_g", "signs", Shown::kPercent}, kept(&TensorMotion::SignsWithLast)});
  AddCounts(&measures);
  return measures;
}

// --- Reading ---

// Motions of the updates in view that the store can rebuild, to `took`.
void WalkKept(OpenedRun& run, const UpdateRange& view, const MotionOptions& options,
              const OutputFlags& output, const std::function<void(UpdateMotion)>& took) {
  int64_t last = view.last;
  while (true) {
    const UpdateRange range = KeptUpdates(run.history(), view.first, last);
    if (range.first > range.last) return;
    Progress progress(output, "states of " + BaseName(run.dir()), range.first - 1, range.last);
    OrFail(WalkNorms(run.reader(), run.layout(), run.engine(), range, options,
                     [&](UpdateMotion motion) {
                       progress.Show(motion.update, "");
                       took(std::move(motion));
                     }));
    progress.Finish();
    last = range.first - 1;
  }
}

StatsRow RowOf(const std::vector<Measure>& measures, const UpdateRecord& record,
               const Layout& layout, const Group& group, const UpdateMotion* motion) {
  TensorMotion sum;
  for (size_t t : group.tensors) {
    if (motion != nullptr) sum += motion->tensors[t];
  }
  const Subject subject = {record, layout, group, motion != nullptr ? &sum : nullptr};
  StatsRow row = {record.update, group.name, {}};
  for (const Measure& measure : measures) row.values.push_back(measure.get(subject));
  return row;
}

StatsTable OfTensors(const StatsFlags& flags, LoggedRun& run, const UpdateRange& view) {
  const Layout& layout = run.run->layout();
  const std::vector<Group> groups = GroupsOf(layout, flags);
  const std::vector<Measure> measures = Measures();
  // Of an update only what is printed is kept: the states of many would not fit into memory.
  std::map<int64_t, std::vector<StatsRow>> rows;
  const auto add = [&](const UpdateRecord& record, const UpdateMotion* motion) {
    std::vector<StatsRow>& of = rows[record.update];
    of.clear();
    for (const Group& group : groups) of.push_back(RowOf(measures, record, layout, group, motion));
  };
  for (const UpdateRecord& record : run.records) add(record, nullptr);
  WalkKept(*run.run, view, {.ratios = true}, flags.output, [&](const UpdateMotion& motion) {
    add(run.records[motion.update - run.records[0].update], &motion);
  });
  StatsTable table;
  if (flags.by != "all" || !flags.only.empty()) table.of = "of";
  for (const Measure& measure : measures) table.columns.push_back(measure.column);
  for (auto& [update, of] : rows) table.rows.insert(table.rows.end(), of.begin(), of.end());
  return table;
}

// --- The embedding's rows ---

// The rows with the largest gradients, of a tensor of gradient norm squared `all2`.
std::vector<StatsRow> LargestRows(UpdateMotion motion, double all2, int64_t count) {
  const auto known = [](double squares) {
    return std::isnan(squares) ? Value() : Value(std::sqrt(squares));
  };
  const int64_t kept = std::min(count, std::ssize(motion.rows));
  std::partial_sort(motion.rows.begin(), motion.rows.begin() + kept, motion.rows.end(),
                    [](const RowMotion& a, const RowMotion& b) {
                      const double x = a.gradient2, y = b.gradient2;
                      // Where no gradient is kept, by change.
                      if (std::isnan(x) || std::isnan(y)) return a.change2 > b.change2;
                      return x > y || (x == y && a.row < b.row);
                    });
  std::vector<StatsRow> rows;
  for (int64_t i = 0; i < kept; ++i) {
    const RowMotion& r = motion.rows[i];
    const Value change = known(r.change2);
    rows.push_back({motion.update, fmt::format("{}", r.row),
                    {known(r.gradient2), Over(r.gradient2, all2), known(r.parameter2), change,
                     Over(change, std::sqrt(r.parameter2))}});
  }
  return rows;
}

StatsTable OfRows(const StatsFlags& flags, LoggedRun& run, const UpdateRange& view) {
  const int tensor = run.run->layout().Find(kEmbeddingName);
  StatsTable table{.of = "row",
                   .columns = {{"g_norm", "|g|"},
                               {"g_share", "of |g|²", Shown::kPercent},
                               {"p_norm", "|w|"},
                               {"change_norm", "|dw|"},
                               {"relative_update", "|dw|/|w|"}},
                   .rows = {}};
  std::map<int64_t, std::vector<StatsRow>> rows;
  WalkKept(*run.run, view, {.rows_of = tensor}, flags.output, [&](UpdateMotion motion) {
    const int64_t k = motion.update;
    const double all2 = motion.tensors[tensor].gradient2;
    rows[k] = LargestRows(std::move(motion), all2, flags.rows);
  });
  if (rows.empty()) {
    Fail(UsageError(fmt::format("{}: no states are kept of updates {}..{}, which --rows needs",
                                run.run->dir(), view.first, view.last)));
  }
  for (auto& [update, of] : rows) table.rows.insert(table.rows.end(), of.begin(), of.end());
  return table;
}

// --- The passes, by replay ---

StatsTable TableOfUpdates(int64_t sequences) {
  StatsTable table{.of = "",
                   .columns = {{"embedding_rms", "embed RMS"},
                               {"embedding_gradient", "|dL/dx|"},
                               {"logit_rms", "logit RMS"},
                               {"softcap_saturated", "softcap", Shown::kPercent},
                               {"logsumexp_mean", "logsumexp"},
                               {"logsumexp_max", "most"},
                               {"token_cosine", "cosine", Shown::kCosine},
                               {"predicted_token", "token", Shown::kWhole},
                               {"predicted_share", "share", Shown::kPercent},
                               {"predicted_probability", "prob.", Shown::kPercent},
                               {"loss_least", "loss, least"},
                               {"loss_most", "most"}},
                   .rows = {}};
  for (int64_t i = 0; i < sequences; ++i) {
    table.columns.push_back({fmt::format("loss_{}", i), "", Shown::kNotInTable});
  }
  return table;
}

StatsRow RowOfUpdate(int64_t update, const PassDiagnostics& d) {
  const auto [least, most] = std::minmax_element(d.sequence_losses.begin(), d.sequence_losses.end());
  StatsRow row = {update,
                  "all",
                  {d.embedding_rms, d.embedding_gradient, d.logit_rms, d.softcap_saturated,
                   d.logsumexp_mean, d.logsumexp_max, d.token_cosine,
                   static_cast<double>(d.predicted_token), d.predicted_share,
                   d.predicted_probability, *least, *most}};
  row.values.insert(row.values.end(), d.sequence_losses.begin(), d.sequence_losses.end());
  return row;
}

StatsTable TableOfLayers() {
  return {.of = "of",
          .columns = {{"residual_rms", "residual RMS"},
                      {"attention_ratio", "attn/res"},
                      {"mlp_ratio", "mlp/res"},
                      {"attention_logit", "attn logit"},
                      {"attention_peak", "peak p", Shown::kCosine},
                      {"attention_entropy", "entropy", Shown::kCosine},
                      {"gradient_norm", "|dL/dx|"}},
          .rows = {}};
}

StatsRow RowOfLayer(int64_t update, size_t l, const LayerDiagnostics& d) {
  return {update,
          fmt::format("layer {}", l),
          {d.residual_rms, d.attention_ratio, d.mlp_ratio, d.attention_logit, d.attention_peak,
           d.attention_entropy, d.gradient_norm}};
}

StatsTable OfPasses(const StatsFlags& flags, const OpenedRun& run, const UpdateRange& view) {
  const bool layers = flags.by == "layer";
  StatsTable table =
      layers ? TableOfLayers() : TableOfUpdates(run.recipe().data.SamplesPerStep());
  Progress progress(flags.output, "replay", view.first - 1, view.last);
  SoloComm comm;
  const std::unique_ptr<Job> job = OrFail(Job::Make(run.recipe(), comm, OrFail(ResolveJob(flags.job)).options));
  OrFail(Diagnose(run.reader(), *job, view, [&](int64_t update, const PassDiagnostics& d) {
    progress.Show(update, "");
    if (!layers) table.rows.push_back(RowOfUpdate(update, d));
    for (size_t l = 0; layers && l < d.layers.size(); ++l) {
      table.rows.push_back(RowOfLayer(update, l, d.layers[l]));
    }
  }));
  progress.Finish();
  return table;
}

void RunStats(const StatsFlags& flags) {
  UpdateRange view = kAllUpdates;
  if (!flags.steps.empty()) view = OrFail(ParseUpdateRange(flags.steps, "--steps"));
  LoggedRun run = OrFail(ReadLog(flags.run, view));
  const RunHistory& history = run.run->history();
  if (run.records.empty()) {
    Fail(UsageError(history.last_position() <= history.first_position()
                        ? flags.run + ": the run has no updates yet"
                        : fmt::format("--steps {}: {} has updates {}..{}", flags.steps, flags.run,
                                      history.first_position() + 1, history.last_position())));
  }
  if (flags.replay && (flags.by == "kind" || flags.by == "tensor")) {
    Fail(UsageError("--by " + flags.by + ": --replay tells of passes: expected all or layer"));
  }
  view = {run.records.front().update, run.records.back().update};
  std::vector<std::string> names;
  for (const TensorSpec& spec : run.run->layout().tensors()) names.push_back(spec.name);
  if (!flags.only.empty()) OrFail(CheckGlob(names, flags.only, "--only"));
  const StatsTable table = flags.replay    ? OfPasses(flags, *run.run, view)
                           : flags.rows > 0 ? OfRows(flags, run, view)
                                            : OfTensors(flags, run, view);
  PrintReport(flags.output.json ? JsonText(table)
              : flags.csv       ? CsvText(table)
                                : TableText(table, flags.output));
}

}  // namespace

void AddStatsCommand(CLI::App& app) {
  CLI::App* stats = app.add_subcommand("stats", "Norms, ratios and counts of tensors, by update");
  auto flags = std::make_shared<StatsFlags>();
  stats->add_option("run", flags->run, "Run directory")->required();
  stats->add_option("--steps", flags->steps, "Updates A..B; all by default");
  stats->add_option("--by", flags->by, "What is one row")
      ->check(CLI::IsMember({"all", "layer", "kind", "tensor"}))
      ->capture_default_str();
  stats->add_option("--only", flags->only, "Tensors, a glob over their names");
  CLI::Option* rows = WholeIn(
      stats->add_option("--rows", flags->rows,
                        "The N rows of the embedding with the largest gradients instead"),
      1);
  rows->type_name("N")->excludes("--by")->excludes("--only");
  CLI::Option* replay =
      stats->add_flag("--replay", flags->replay, "Of forward and backward pass, by replay");
  replay->excludes(rows)->excludes("--only");
  WholeIn(stats->add_option("--threads", flags->job.threads,
                            "Threads of --replay; all processors by default"),
          1, 1024)
      ->needs(replay);
  CLI::Option* csv = stats->add_flag("--csv", flags->csv, "Print comma-separated values");
  AddOutputFlags(stats, &flags->output, true);
  csv->excludes("--json");
  stats->footer(kExamples);
  stats->callback([flags] { RunStats(*flags); });
}

}  // namespace retrace
