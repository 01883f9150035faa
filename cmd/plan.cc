#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"
#include "replay/gpu_plan.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace plan examples/demo.toml --tp 2                         # on this kind of machine
  retrace plan examples/gemma4_31b.toml --gpus 16 --tp 4 --dp 4 --gpu-memory 80G
  retrace plan examples/gemma4_31b.toml --gpus 16 --set topology.virtual_shards=16 --set topology.lanes=1
  retrace plan mine.toml --gpus 8 --peak-fp32 19.5e12 --peak-bf16 312e12 --peak-memory 2.04e12   # A100s
Without --gpus: memory of each rank on a host. With --gpus: on paper, since no GPU has run retrace yet.
Times are a roofline: what no program beats, with peak figures of H100 SXM unless they are given.
Exit code 1: it does not fit.)";

struct PlanFlags {
  std::string recipe;
  std::vector<std::string> overrides;
  int gpus = 0, tp = 0, dp = 0;
  uint64_t gpu_memory = 80'000'000'000, reserve = 2'000'000'000;
  GpuPlanOptions gpu;
  OutputFlags output;
};

void PrintJson(const Json& json) {
  PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

// ------------------------------------------------------------------------------------------- JSON

Json RankJson(const RankPlan& rank) {
  return {{"tp_rank", rank.tp_rank},
          {"parameters", rank.parameters},
          {"replicas", rank.replicas},
          {"parameter_bytes", rank.state_bytes / kNumComponents},
          {"moment_bytes", rank.state_bytes - rank.state_bytes / kNumComponents},
          {"gradient_bytes", rank.gradient_bytes},
          {"weight_copy_bytes", rank.weight_copy_bytes},
          {"activation_bytes", rank.activation_bytes},
          {"staging_bytes", rank.staging_bytes},
          {"bytes", rank.bytes()}};
}

Json RecipeJsonOf(const PlanFlags& flags, const Recipe& recipe, const RecipePlan& plan) {
  Json ranks = Json::array();
  for (const RankPlan& rank : plan.ranks) ranks.push_back(RankJson(rank));
  return {{"recipe", flags.recipe},
          {"name", recipe.name},
          {"parameters", plan.parameters},
          {"tensors", plan.tensors},
          {"tokens_per_update", plan.tokens},
          {"flops_per_update", plan.flops},
          {"tp", flags.gpu.tp},
          {"dp", flags.gpu.dp},
          {"ranks", ranks},
          {"keyframe_bytes", plan.keyframe_bytes},
          {"journal_bytes", plan.journal_bytes},
          {"keyframe_file_bytes_estimate",
           kKeyframeFileBytes * static_cast<double>(plan.parameters)},
          {"journal_file_bytes_estimate", kJournalFileBytes * static_cast<double>(plan.parameters)},
          {"keyframes", plan.keyframes},
          {"journals", plan.journals},
          {"stored_bytes", plan.stored_bytes()}};
}

Json GpuJson(const PlanFlags& flags, const GpuPlan& plan) {
  Json levels = Json::array(), fits = Json::array();
  for (const LevelCost& level : plan.levels) {
    levels.push_back({{"level", level.level},
                      {"arithmetic_seconds", level.arithmetic_s},
                      {"memory_seconds", level.memory_s},
                      {"exchange_seconds", level.exchange_s},
                      {"update_seconds", level.update_s()},
                      {"stall_seconds", level.stall_s}});
  }
  for (const GpuFit& fit : plan.fits) {
    fits.push_back({{"gpus", fit.tp * fit.dp},
                    {"tp", fit.tp},
                    {"dp", fit.dp},
                    {"virtual_shards", fit.virtual_shards},
                    {"lanes", fit.lanes},
                    {"recompute_activations", fit.recompute},
                    {"bytes", fit.bytes},
                    {"same_bits", fit.same_bits}});
  }
  return {{"gpus", flags.gpu.tp * flags.gpu.dp},
          {"nodes", plan.nodes},
          {"gpu_memory", flags.gpu.gpu_memory},
          {"reserve", flags.gpu.reserve},
          {"gpu_bytes", plan.gpu_bytes},
          {"fits", plan.Fits()},
          {"would_fit", fits},
          {"staging_node_bytes", plan.staging_node_bytes},
          {"keyframe_node_bytes", plan.keyframe_node_bytes},
          {"journal_node_bytes", plan.journal_node_bytes},
          {"levels", levels},
          {"walk_seconds_per_journal", plan.walk_s}};
}

// ------------------------------------------------------------------------------------------- text

std::vector<std::string> RankCells(const RankPlan& rank, bool gpus) {
  const int64_t parameters = rank.state_bytes / kNumComponents;
  std::vector<std::string> cells;
  for (const int64_t bytes : {parameters, rank.state_bytes - parameters, rank.gradient_bytes,
                              rank.weight_copy_bytes, rank.activation_bytes}) {
    cells.push_back(ByteText(static_cast<double>(bytes)));
  }
  if (!gpus) cells.push_back(ByteText(static_cast<double>(rank.staging_bytes)));
  cells.push_back(ByteText(static_cast<double>(gpus ? rank.update_bytes() : rank.bytes())));
  return cells;
}

// Ranks that read the same share a line.
std::string RankTable(const PlanFlags& flags, const RecipePlan& plan, bool gpus) {
  std::vector<TextTable::Column> columns = {{"rank"},      {"parameters"}, {"moments"},
                                            {"gradients"}, {"weights"},    {"activations"}};
  if (!gpus) columns.push_back({"staging"});
  columns.push_back({"in all"});
  TextTable table(columns);
  std::vector<std::string> cells, before;
  for (size_t i = 0, first = 0; i <= plan.ranks.size(); ++i) {
    if (i < plan.ranks.size()) cells = RankCells(plan.ranks[i], gpus);
    if (i > 0 && (i == plan.ranks.size() || cells != before)) {
      before.insert(before.begin(), i - first > 1 ? fmt::format("{}..{}", first, i - 1)
                                                  : fmt::format("{}", first));
      table.AddRow(before);
      first = i;
    }
    before = cells;
  }
  return table.Text(flags.output, 2) +
         "  weights: copies in the compute format" +
         (gpus ? "; each data-parallel copy needs the same\n"
               : "; staging: what the recorder may hold\n");
}

std::string StorageText(const Recipe& recipe, const RecipePlan& plan) {
  const double parameters = static_cast<double>(plan.parameters);
  std::string text = "\nstorage\n";
  text += fmt::format("  a keyframe   {} before compression; files of about {}\n",
                      ByteText(plan.keyframe_bytes), ByteText(kKeyframeFileBytes * parameters));
  text += fmt::format("  a journal    {} before compression; files of about {}\n",
                      ByteText(plan.journal_bytes), ByteText(kJournalFileBytes * parameters));
  const double files = static_cast<double>(plan.keyframes) * kKeyframeFileBytes * parameters +
                       static_cast<double>(plan.journals) * kJournalFileBytes * parameters;
  text += fmt::format("  the run      writes {} keyframe{} and {} journal{}: {}, files of about {}\n",
                      Grouped(plan.keyframes), plan.keyframes == 1 ? "" : "s",
                      Grouped(plan.journals), plan.journals == 1 ? "" : "s",
                      ByteText(plan.stored_bytes()), ByteText(files));
  if (recipe.store.HasRing()) text += "               and removes again what leaves its ring\n";
  return text + "  (sizes of files: estimates from small models; `retrace bench store RUN` measures)\n";
}

std::string FitText(const Recipe& recipe, const GpuFit& fit) {
  std::string text = fmt::format("--gpus {} --tp {} --dp {}", fit.tp * fit.dp, fit.tp, fit.dp);
  if (!fit.same_bits) {
    text += fmt::format(" --set topology.virtual_shards={} --set topology.lanes={}",
                        fit.virtual_shards, fit.lanes);
  }
  if (fit.recompute && !recipe.execution.recompute_activations) {
    text += " --set execution.recompute_activations=true";
  }
  return text + fmt::format("   {} each", ByteText(static_cast<double>(fit.bytes)));
}

std::string VerdictText(const PlanFlags& flags, const Recipe& recipe, const GpuPlan& plan) {
  const std::string room = fmt::format("{} of {} (the rest, {}, is for driver and libraries)",
                                       ByteText(static_cast<double>(plan.room_bytes)),
                                       ByteText(static_cast<double>(flags.gpu.gpu_memory)),
                                       ByteText(static_cast<double>(flags.gpu.reserve)));
  const std::string need = ByteText(static_cast<double>(plan.gpu_bytes));
  if (plan.Fits()) {
    return Tinted(flags.output, Tint::kGreen, "  fits:") + fmt::format(" {} within {}\n", need, room);
  }
  std::string text = Tinted(flags.output, Tint::kRed, "  does not fit:") +
                     fmt::format(" {} where there are {}\n", need, room);
  if (plan.fits.empty()) {
    return text + "  nothing that was tried would: GPUs with more memory, a shorter sequence or a "
                  "smaller model do\n";
  }
  text += plan.fits[0].same_bits
              ? "  the same bits with\n"
              : "  no number of GPUs carries these virtual shards and lanes; a run of its own "
                "(other bits) does with\n";
  for (const GpuFit& fit : plan.fits) text += "    " + FitText(recipe, fit) + "\n";
  return text;
}

std::string TimeText(const PlanFlags& flags, const GpuPlan& plan, const Recipe& recipe) {
  TextTable table({{"level", true}, {"arithmetic"}, {"memory"}, {"exchange"}, {"an update"},
                   {"waits for storage"}});
  for (const LevelCost& level : plan.levels) {
    table.AddRow({level.level, Duration(level.arithmetic_s), Duration(level.memory_s),
                  Duration(level.exchange_s), Duration(level.update_s()),
                  Duration(level.stall_s)});
  }
  const double staging = static_cast<double>(plan.staging_node_bytes);
  return "\na node that writes\n" +
         fmt::format("  a keyframe   {}    a journal   {}    host memory for staging   {}\n",
                     ByteText(static_cast<double>(plan.keyframe_node_bytes)),
                     ByteText(static_cast<double>(plan.journal_node_bytes)), ByteText(staging)) +
         "\ntime of an update, recorded or replayed, at least\n" + table.Text(flags.output, 2) +
         fmt::format("  an update: the longer of arithmetic and memory, and exchange. Waits: per "
                     "update, with a journal each\n  and a keyframe every {}. A journal applied on "
                     "the way to a state: {}\n",
                     recipe.store.keyframe_every, Duration(plan.walk_s));
}

std::string HeadText(const PlanFlags& flags, const Recipe& recipe, const RecipePlan& plan) {
  return fmt::format("{}: '{}'\n  parameters   {} in {} tensors\n  an update    {} tokens, {:.4g} "
                     "TFLOP in matrix products\n",
                     flags.recipe, recipe.name, Grouped(plan.parameters), plan.tensors,
                     Grouped(plan.tokens), plan.flops / 1e12);
}

// -------------------------------------------------------------------------------------------- run

// GPUs that are not spoken for are data-parallel; without --tp, as many as the shards allow are
// tensor-parallel.
Status ResolveTopology(const Recipe& recipe, PlanFlags* flags) {
  int tp = flags->tp, dp = flags->dp;
  if (flags->gpus > 0) {
    if (tp == 0 && dp > 0) tp = std::max(1, flags->gpus / dp);
    if (tp == 0) {
      tp = 1;
      while (2 * tp <= recipe.topology.virtual_shards && flags->gpus % (2 * tp) == 0) tp *= 2;
    }
    if (dp == 0) dp = std::max(1, flags->gpus / tp);
    if (int64_t{tp} * dp != flags->gpus) {
      return UsageError(fmt::format("--gpus {}: expected tp x dp of them, got {} x {}",
                                    flags->gpus, tp, dp));
    }
  }
  if (flags->gpu_memory > uint64_t{1} << 60 || flags->reserve >= flags->gpu_memory) {
    return UsageError("--gpu-memory: expected a size above --reserve and below 1 EB, as 80G");
  }
  flags->gpu.tp = std::max(1, tp);
  flags->gpu.dp = std::max(1, dp);
  flags->gpu.gpu_memory = static_cast<int64_t>(flags->gpu_memory);
  flags->gpu.reserve = static_cast<int64_t>(flags->reserve);
  return {};
}

void PrintPlan(PlanFlags flags) {
  const Recipe recipe = OrFail(LoadRecipe(flags.recipe, flags.overrides));
  OrFail(ResolveTopology(recipe, &flags));
  if (flags.gpus == 0) {
    const RecipePlan plan = OrFail(PlanRecipe(recipe, flags.gpu.tp, flags.gpu.dp));
    if (flags.output.json) return PrintJson(RecipeJsonOf(flags, recipe, plan));
    return PrintReport(HeadText(flags, recipe, plan) +
                       fmt::format("\nmemory of each rank, tp {} x dp {} (before anything small)\n",
                                   flags.gpu.tp, flags.gpu.dp) +
                       RankTable(flags, plan, false) + StorageText(recipe, plan));
  }
  const GpuPlan plan = OrFail(PlanOnGpus(recipe, flags.gpu));
  if (flags.output.json) {
    Json json = RecipeJsonOf(flags, recipe, plan.recipe);
    json.update(GpuJson(flags, plan));
    PrintJson(json);
  } else {
    PrintReport(
        HeadText(flags, recipe, plan.recipe) +
        fmt::format("\nmemory of each of {} GPUs, tp {} x dp {}, {} node{} (on paper; before "
                    "anything small)\n",
                    flags.gpus, flags.gpu.tp, flags.gpu.dp, plan.nodes, plan.nodes == 1 ? "" : "s") +
        RankTable(flags, plan.recipe, true) + VerdictText(flags, recipe, plan) +
        StorageText(recipe, plan.recipe) + TimeText(flags, plan, recipe));
  }
  if (!plan.Fits()) Exit(1);
}

void AddPeak(CLI::App* plan, const char* name, double* value, const char* what) {
  NumberIn(plan->add_option(name, *value, what), 1, 1e21)->capture_default_str()->group("Peaks");
}

void AddPeaks(CLI::App* plan, GpuPeaks* peaks) {
  AddPeak(plan, "--peak-fp32", &peaks->fp32, "FP32 operations a second, without tensor cores");
  AddPeak(plan, "--peak-fp64", &peaks->fp64, "FP64 operations a second, without tensor cores");
  AddPeak(plan, "--peak-bf16", &peaks->bf16_tensor, "BF16 operations a second of tensor cores");
  AddPeak(plan, "--peak-fp64-tensor", &peaks->fp64_tensor, "FP64 operations a second of those");
  AddPeak(plan, "--peak-memory", &peaks->memory, "Bytes a second of a GPU's memory");
  AddPeak(plan, "--peak-link", &peaks->link, "Bytes a second and direction between a node's GPUs");
  AddPeak(plan, "--peak-network", &peaks->network, "Bytes a second of each GPU to other nodes");
  AddPeak(plan, "--peak-host-link", &peaks->host_link, "Bytes a second from a GPU to its host");
  AddPeak(plan, "--storage", &peaks->storage,
          "Bytes a second that a node reads or writes; assumed, measure yours");
  AddPeak(plan, "--encode", &peaks->encode,
          "Bytes a second that a node's processors compress; assumed, `bench store` measures");
}

}  // namespace

void AddPlanCommand(CLI::App& app) {
  CLI::App* plan = app.add_subcommand(
      "plan", "Say what memory, storage and time a recipe asks for, on a host or on GPUs");
  auto flags = std::make_shared<PlanFlags>();
  plan->add_option("recipe", flags->recipe, "The recipe (TOML)")->required();
  plan->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  CLI::Option* gpus = WholeIn(plan->add_option("--gpus", flags->gpus, "On so many GPUs"), 1, 1 << 20);
  WholeIn(plan->add_option("--tp", flags->tp, "Tensor-parallel ranks; divides virtual_shards"), 1,
          65536);
  WholeIn(plan->add_option("--dp", flags->dp, "Data-parallel ranks; divides lanes"), 1, 65536);
  plan->add_option("--gpu-memory", flags->gpu_memory, "Of each GPU: 80G, 141GB, 80GiB")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("80G")
      ->needs(gpus);
  plan->add_option("--reserve", flags->reserve,
                   "Of it for driver, NCCL and workspaces (assumed)")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("2G")
      ->needs(gpus);
  WholeIn(plan->add_option("--gpus-per-node", flags->gpu.gpus_per_node, "GPUs of a node"), 1, 1024)
      ->capture_default_str();
  AddPeaks(plan, &flags->gpu.peaks);
  AddOutputFlags(plan, &flags->output, true);
  plan->footer(kExamples);
  plan->callback([flags] { PrintPlan(*flags); });
}

}  // namespace retrace
