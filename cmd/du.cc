#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "formats/disk_use.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace du runs/demo                 # by kind
  retrace du runs/demo --by step
  retrace du runs/demo --by tensor --top 20
  retrace du runs/demo --json          # all three
Kinds: g gradients of journals; p, m, v of keyframes; partial_* of partial keyframes. Chunks that several
tensors share are divided by their elements. From the masters alone: no slab is read.)";

struct Flags {
  std::string run, by = "kind";
  int64_t top = 0;
  OutputFlags output;
};

std::string Bytes(double bytes) { return Grouped(static_cast<int64_t>(bytes + 0.5)); }

Json KindsJson(const KindBytes& kinds) {
  Json json = Json::object();
  for (SlabKind kind : kSlabKinds) {
    const double bytes = kinds[static_cast<size_t>(kind)];
    if (bytes > 0) json[SlabKindName(kind)] = static_cast<int64_t>(bytes + 0.5);
  }
  return json;
}

double Sum(const KindBytes& kinds) { return std::accumulate(kinds.begin(), kinds.end(), 0.0); }

struct Rest {
  double container = 0, master = 0;
};

Rest RestOf(const DiskUse& use) {
  Rest rest;
  for (const StepUse& step : use.steps) {
    rest.container += step.container;
    rest.master += step.master;
  }
  return rest;
}

Json JsonOf(const OpenedRun& run, const DiskUse& use) {
  const Rest rest = RestOf(use);
  Json steps = Json::array(), tensors = Json::array();
  for (const StepUse& step : use.steps) {
    steps.push_back({{"position", step.position},
                     {"kinds", KindsJson(step.kinds)},
                     {"container", step.container},
                     {"master", step.master},
                     {"total", step.total()}});
  }
  for (size_t t = 0; t < use.tensors.size(); ++t) {
    const TensorSpec& spec = run.layout().tensors()[t];
    tensors.push_back(
        {{"name", spec.name}, {"elements", spec.numel()}, {"kinds", KindsJson(use.tensors[t])}});
  }
  return {{"run", run.dir()},
          {"parameters", run.layout().parameters()},
          {"total", use.total()},
          {"kinds", KindsJson(use.kinds())},
          {"containers", rest.container},
          {"masters", rest.master},
          {"ledger", use.ledger},
          {"frozen", use.frozen},
          {"unnamed", use.unnamed},
          {"steps", steps},
          {"tensors", tensors}};
}

std::string ByKind(const Flags& flags, const OpenedRun& run, const DiskUse& use) {
  const KindBytes kinds = use.kinds();
  const Rest rest = RestOf(use);
  TextTable table({{"kind", true}, {"bytes"}, {"steps"}, {"bytes/parameter/step"}});
  for (SlabKind kind : kSlabKinds) {
    const size_t i = static_cast<size_t>(kind);
    const auto steps = std::count_if(use.steps.begin(), use.steps.end(),
                                     [i](const StepUse& step) { return step.kinds[i] > 0; });
    if (steps == 0) continue;
    const double each =
        kinds[i] / static_cast<double>(steps) / static_cast<double>(run.layout().parameters());
    table.AddRow({SlabKindName(kind), Bytes(kinds[i]), std::to_string(steps),
                  IsPartial(kind) ? "" : fmt::format("{:.3f}", each)});
  }
  table.AddRow({"containers", Bytes(rest.container), "", ""});
  table.AddRow({"masters", Bytes(rest.master), "", ""});
  table.AddRow({"ledger", Bytes(use.ledger), "", ""});
  table.AddRow({"recipe, manifest", Bytes(use.frozen), "", ""});
  if (use.unnamed > 0) table.AddRow({"of no step", Bytes(use.unnamed), "", ""});
  table.AddRow({"all", Bytes(use.total()), std::to_string(use.steps.size()), ""});
  return table.Text(flags.output);
}

std::string ByStep(const Flags& flags, const DiskUse& use) {
  TextTable table({{"position"}, {"kinds", true}, {"bytes"}});
  std::vector<StepUse> steps = use.steps;
  if (flags.top > 0) {
    std::stable_sort(steps.begin(), steps.end(),
                     [](const StepUse& a, const StepUse& b) { return a.total() > b.total(); });
    steps.resize(std::min(steps.size(), static_cast<size_t>(flags.top)));
  }
  for (const StepUse& step : steps) {
    std::string kinds;
    for (SlabKind kind : kSlabKinds) {
      if (step.kinds[static_cast<size_t>(kind)] == 0) continue;
      kinds += std::string(kinds.empty() ? "" : " ") + SlabKindName(kind);
    }
    table.AddRow({std::to_string(step.position), kinds, Bytes(step.total())});
  }
  return table.Text(flags.output);
}

std::string ByTensor(const Flags& flags, const OpenedRun& run, const DiskUse& use) {
  TextTable table({{"tensor", true}, {"elements"}, {"bytes"}, {"share"}});
  std::vector<size_t> order(use.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return Sum(use.tensors[a]) > Sum(use.tensors[b]); });
  if (flags.top > 0) order.resize(std::min(order.size(), static_cast<size_t>(flags.top)));
  const double all = std::max(1.0, Sum(use.kinds()));
  for (size_t t : order) {
    const TensorSpec& spec = run.layout().tensors()[t];
    const double bytes = Sum(use.tensors[t]);
    table.AddRow({spec.name, Grouped(spec.numel()), Bytes(bytes),
                  fmt::format("{:.2f} %", 100 * bytes / all)});
  }
  return table.Text(flags.output);
}

void RunDu(const Flags& flags) {
  const auto run = OrFail(OpenedRun::Open(flags.run));
  const DiskUse use = OrFail(MeasureDiskUse(run->reader(), run->layout()));
  if (flags.output.json) {
    return PrintReport(JsonOf(*run, use).dump(2, ' ', false, Json::error_handler_t::replace) +
                       "\n");
  }
  if (flags.by == "step") return PrintReport(ByStep(flags, use));
  if (flags.by == "tensor") return PrintReport(ByTensor(flags, *run, use));
  PrintReport(ByKind(flags, *run, use));
}

}  // namespace

void AddDuCommand(CLI::App& app) {
  CLI::App* du = app.add_subcommand("du", "Where a run's bytes are: by kind, by step, by tensor");
  auto flags = std::make_shared<Flags>();
  du->add_option("run", flags->run, "The recording")->required();
  du->add_option("--by", flags->by, "Rows of the table")
      ->check(CLI::IsMember({"kind", "step", "tensor"}))
      ->capture_default_str();
  du->add_option("--top", flags->top, "Only the n largest; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  AddOutputFlags(du, &flags->output, true);
  du->footer(kExamples);
  du->callback([flags] { RunDu(*flags); });
}

}  // namespace retrace
