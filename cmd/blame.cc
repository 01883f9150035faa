#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "replay/solo_comm.h"
#include "surgery/blame.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace blame runs/demo@6                                   # which layers moved the loss
  retrace blame runs/demo@6 --level tensor --only 'model.layers.39.*'
  retrace blame runs/demo@6 --on update --sequences           # on the update's own batch
  retrace blame runs/demo@6 --level model --alphas 0,0.5,1,1.5,2,4
RUN@k blames update k, which leads from RUN@(k-1) (after the surgery that is dated there) to RUN@k:
forward passes only, of one fixed batch. alone: what the loss becomes when one group's change is
applied and nothing else. last: what the group's change adds when all others are applied already.
The two agree where groups do not act together; neither adds up to the whole, and the difference is
printed. The losses at the two ends are those of the records, bit for bit, where the run has them.
Along the update: the loss at w + alpha dw. Its curvature d'Hd is a central second difference of
losses, taken twice with different steps. d'Hd / d'Pd, with P what AdamW divides by, is at most the
largest eigenvalue of the preconditioned Hessian; on a quadratic, steps of that rate diverge where
this eigenvalue is above 2/lr without momentum, and above (2 + 2 beta1) / ((1 - beta1) lr) with Adam's
(Cohen et al. 2022, arXiv 2207.14484). d'Hd / d'd says the same of plain gradient descent only.)";

struct BlameFlags {
  std::string address, on, level = "layer";
  std::vector<double> alphas = {0, 0.25, 0.5, 1, 2};
  int64_t top = 20;
  bool positions = false, sequences = false;
  BlameOptions blame;
  JobFlags job;
  OutputFlags output;
};

Json NumberJson(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

const char* BatchName(BlameBatch batch) {
  return batch == BlameBatch::kUpdate       ? "update"
         : batch == BlameBatch::kEvaluation ? "evaluation"
                                            : "next";
}

std::string BatchText(const BlameFlags& flags, const BlameReport& report) {
  const std::string tokens = fmt::format("{} tokens", Grouped(report.tokens));
  if (flags.blame.on == BlameBatch::kEvaluation) return "the evaluation batch, " + tokens;
  const int64_t update = report.update + (flags.blame.on == BlameBatch::kNext ? 1 : 0);
  return fmt::format("the batch of update {}, {}", update, tokens);
}

std::string ProvenText(const BlameReport& report) {
  if (!report.before_recorded && !report.after_recorded) return "";
  return fmt::format(
      "; {} the records', bit for bit",
      report.before_recorded && report.after_recorded ? "both are"
      : report.before_recorded                        ? "the first is"
                                                      : "the second is");
}

// --- JSON ---

Json TokensJson(const std::vector<double>& before, const std::vector<double>& after) {
  Json json = Json::array();
  for (size_t i = 0; i < before.size(); ++i) {
    json.push_back({{"before", NumberJson(before[i])}, {"after", NumberJson(after[i])}});
  }
  return json;
}

Json CurvatureJson(const UpdateCurvature& c) {
  return {{"step", c.step},
          {"slope", NumberJson(c.slope)},
          {"second", NumberJson(c.second)},
          {"second_wide", NumberJson(c.second_wide)},
          {"change2", NumberJson(c.change2)},
          {"preconditioned2", NumberJson(c.preconditioned2)},
          {"plain", NumberJson(c.Plain())},
          {"preconditioned", NumberJson(c.Preconditioned())},
          {"lr", c.lr},
          {"beta1", c.beta1},
          {"gradient_edge", NumberJson(c.GradientEdge())},
          {"momentum_edge", NumberJson(c.MomentumEdge())}};
}

std::string BlameJson(const BlameFlags& flags, const BlameReport& report) {
  Json json = {{"address", flags.address},
               {"update", report.update},
               {"on", BatchName(flags.blame.on)},
               {"tokens", report.tokens},
               {"before", NumberJson(report.before.mean)},
               {"after", NumberJson(report.after.mean)},
               {"before_is_recorded", report.before_recorded},
               {"after_is_recorded", report.after_recorded},
               {"level", TreeLevelName(flags.blame.level)},
               {"groups", Json::array()}};
  for (const BlameGroup& group : report.groups) {
    json["groups"].push_back({{"name", group.name},
                              {"glob", group.glob},
                              {"tensors", group.tensors},
                              {"elements", group.elements},
                              {"change_norm", NumberJson(group.change)},
                              {"loss_alone", NumberJson(group.alone)},
                              {"loss_without", NumberJson(group.without)}});
  }
  json["sum_alone"] = NumberJson(report.SumAlone());
  json["remainder"] = NumberJson(report.Remainder());
  json["along"] = Json::array();
  for (const auto& [alpha, loss] : report.along) {
    json["along"].push_back({{"alpha", alpha}, {"loss", NumberJson(loss)}});
  }
  json["curvature"] = CurvatureJson(report.curvature);
  json["sequences"] = TokensJson(report.before.BySequence(), report.after.BySequence());
  json["positions"] = TokensJson(report.before.ByPosition(), report.after.ByPosition());
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// --- Text ---

std::string GroupsText(const BlameFlags& flags, const BlameReport& report) {
  std::vector<const BlameGroup*> order;
  for (const BlameGroup& group : report.groups) order.push_back(&group);
  const auto size = [&](const BlameGroup* g) {  // what is not finite stands first
    const double alone = std::fabs(g->alone - report.before.mean);
    return std::isnan(alone) ? INFINITY : alone;
  };
  std::stable_sort(order.begin(), order.end(), [&](const BlameGroup* a, const BlameGroup* b) {
    return size(a) > size(b);
  });
  TextTable table({{"change of", true}, {"tensors"}, {"|dw|"}, {"alone"}, {"last"}});
  const size_t shown = std::min<size_t>(order.size(), flags.top);
  for (size_t i = 0; i < shown; ++i) {
    const BlameGroup& group = *order[i];
    table.AddRow({group.name, fmt::format("{}", group.tensors), fmt::format("{:.4g}", group.change),
                  fmt::format("{:+.4f}", group.alone - report.before.mean),
                  fmt::format("{:+.4f}", report.after.mean - group.without)});
  }
  std::string text = table.Text(flags.output);
  if (shown < order.size()) {
    text += fmt::format("and {} more; --top N shows them\n", order.size() - shown);
  }
  text += fmt::format(
      "Each alone adds up to {:+.4f}; together they make {:+.4f}: {:+.4f} is what they do to each "
      "other.\n",
      report.SumAlone(), report.Change(), report.Remainder());
  return text;
}

std::string AlongText(const BlameFlags& flags, const BlameReport& report) {
  TextTable table({{"alpha"}, {"loss at w + alpha dw"}, {"change"}});
  for (const auto& [alpha, loss] : report.along) {
    table.AddRow({fmt::format("{:g}", alpha), fmt::format("{:.4f}", loss),
                  fmt::format("{:+.4f}", loss - report.before.mean)});
  }
  return table.Text(flags.output);
}

// Of a value against an edge: "0.31 of 2/lr".
std::string AgainstEdge(double value, double edge, const char* name) {
  return fmt::format("{:.3g} of {} = {:.4g}", value / edge, name, edge);
}

std::string CurvatureText(const UpdateCurvature& c) {
  std::string text = fmt::format(
      "At alpha = 0: slope {:.4g}, curvature d'Hd {:.4g} ({:.4g} with twice the step, {:g}).\n",
      c.slope, c.second, c.second_wide, c.step);
  if (std::fabs(c.second - c.second_wide) > 0.25 * std::fabs(c.second)) {
    text += "The two differ: the loss is no parabola over that step; --step takes a smaller one.\n";
  }
  if (c.second > 0 && c.slope < 0) {
    text += fmt::format("The parabola through them is least at alpha = {:.3g}.\n",
                        -c.slope / c.second);
  } else {
    text += "The parabola through them has no least point ahead.\n";
  }
  const char* edge = "Adam's edge (2+2b1)/((1-b1)lr)";
  text += fmt::format("Preconditioned, d'Hd / d'Pd = {:.4g}: ", c.Preconditioned());
  if (c.Preconditioned() > 0) {
    text += AgainstEdge(c.Preconditioned(), c.GradientEdge(), "2/lr") + ";\n" +
            AgainstEdge(c.Preconditioned(), c.MomentumEdge(), edge) + ".\n";
  } else {
    text += fmt::format("below 2/lr = {:.4g} and {} = {:.4g}.\n", c.GradientEdge(), edge,
                        c.MomentumEdge());
  }
  text += fmt::format("Plain, d'Hd / d'd = {:.4g}.\n", c.Plain());
  return text;
}

std::string TokensText(const BlameFlags& flags, const char* what, const std::vector<double>& before,
                       const std::vector<double>& after) {
  TextTable table({{what}, {"before"}, {"after"}, {"change"}});
  for (size_t i = 0; i < before.size(); ++i) {
    table.AddRow({fmt::format("{}", i), fmt::format("{:.4f}", before[i]),
                  fmt::format("{:.4f}", after[i]), fmt::format("{:+.4f}", after[i] - before[i])});
  }
  return "\n" + table.Text(flags.output);
}

std::string BlameText(const BlameFlags& flags, const BlameReport& report) {
  std::string text = fmt::format(
      "Update {}, on {}: loss {:.4f} before, {:.4f} after ({:+.4f}){}.\n\n", report.update,
      BatchText(flags, report), report.before.mean, report.after.mean, report.Change(),
      ProvenText(report));
  text += GroupsText(flags, report) + "\n" + AlongText(flags, report) +
          CurvatureText(report.curvature);
  if (flags.sequences) {
    text += TokensText(flags, "sequence", report.before.BySequence(), report.after.BySequence());
  }
  if (flags.positions) {
    text += TokensText(flags, "position", report.before.ByPosition(), report.after.ByPosition());
  }
  return text;
}

// --- The command ---

int64_t UpdateOf(const StateAddress& address, const std::string& text) {
  if (!address.position) {
    Fail(UsageError("'" + text + "': expected RUN@k, the state that update k leads to"));
  }
  if (!address.glob.empty() || !address.component.empty()) {
    Fail(UsageError("'" + text + "': expected RUN@k alone; --only GLOB chooses tensors"));
  }
  return *address.position;
}

BlameBatch BatchOf(const std::string& on, const Recipe& recipe) {
  if (on == "update") return BlameBatch::kUpdate;
  if (on == "next") return BlameBatch::kNext;
  return on == "evaluation" ? BlameBatch::kEvaluation : DefaultBatch(recipe);
}

void CheckAlphas(const std::vector<double>& alphas) {
  for (const double alpha : alphas) {
    if (std::isfinite(alpha) && std::fabs(alpha) <= 1e6) continue;
    Fail(UsageError(fmt::format("--alphas: expected numbers in -1e6 .. 1e6, got {}", alpha)));
  }
}

void RunBlame(BlameFlags flags) {
  const StateAddress address = OrFail(ParseStateAddress(flags.address));
  const int64_t update = UpdateOf(address, flags.address);
  CheckAlphas(flags.alphas);
  const std::unique_ptr<OpenedRun> run = OrFail(OpenedRun::Open(address.run));
  OrFail(run->CheckPosition(update));
  flags.blame.on = BatchOf(flags.on, run->recipe());
  flags.blame.level = ParseTreeLevel(flags.level);
  flags.blame.shares = flags.alphas;
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (job.launched) Fail(UnsupportedError("blame: runs on one host, without a launcher"));
  const int64_t passes = OrFail(BlamePasses(run->layout(), flags.blame));
  Progress progress(flags.output, fmt::format("blame: {} forward passes", passes), 0, passes);
  flags.blame.progress = [&](int64_t done, int64_t) { progress.Show(done, ""); };
  SoloComm comm;
  const std::unique_ptr<Job> lives = OrFail(Job::Make(run->recipe(), comm, job.options));
  const Result<BlameReport> report = Blame(run->reader(), *lives, update, flags.blame);
  progress.Finish();
  if (!report.ok()) Fail(report.status());
  PrintReport(flags.output.json ? BlameJson(flags, *report) : BlameText(flags, *report));
}

}  // namespace

void AddBlameCommand(CLI::App& app) {
  CLI::App* blame =
      app.add_subcommand("blame", "Which part of one update moved the loss, by forward passes");
  auto flags = std::make_shared<BlameFlags>();
  blame->add_option("address", flags->address, "RUN@k: the update k that leads there")->required();
  blame->add_option("--on", flags->on,
                    "The batch: of the update, of the next one, or the evaluation batch, which is "
                    "the default where the recipe has one")
      ->check(CLI::IsMember({"update", "next", "evaluation"}));
  blame->add_option("--level", flags->level, "What is one group")
      ->check(CLI::IsMember({"model", "layer", "block", "tensor"}))
      ->capture_default_str();
  blame->add_option("--only", flags->blame.only,
                    "Tensors, a glob over their names; all others are one group");
  blame->add_option("--alphas", flags->alphas, "Shares of the update along which to see the loss")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->capture_default_str();
  NumberIn(blame->add_option("--step", flags->blame.step,
                             "Of the curvature's differences, a share of the update"),
           1e-4, 1)
      ->capture_default_str();
  WholeIn(blame->add_option("--top", flags->top, "Groups shown, by their effect alone"), 1)
      ->type_name("N")
      ->capture_default_str();
  blame->add_flag("--sequences", flags->sequences, "Also the loss of each sequence");
  blame->add_flag("--positions", flags->positions, "Also the loss of each position, all sequences");
  WholeIn(blame->add_option("--threads", flags->job.threads, "0: all processors"), 0, 1024)
      ->capture_default_str();
  AddIsaFlag(blame, &flags->job.isa);
  AddOutputFlags(blame, &flags->output, true);
  blame->footer(kExamples);
  blame->callback([flags] { RunBlame(*flags); });
}

}  // namespace retrace
