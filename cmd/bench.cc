#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"
#include "formats/file_ops.h"
#include "kernels/attention_bench.h"
#include "kernels/gemm_bench.h"
#include "kernels/op_samples.h"
#include "replay/random_batches.h"
#include "replay/recipe_plan.h"
#include "replay/step_bench.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace bench gemm --threads 1
  retrace bench attention examples/bench_100m.toml
  retrace bench ops --isa avx2
  retrace bench step examples/bench_100m.toml --updates 5 --tp 2 --random-tokens
  retrace bench step examples/bench_spike.toml --random-tokens --profile trace.json
  retrace bench store runs/demo
  retrace bench stall examples/demo.toml --tp 2
Each speed stands beside that of a named peer, measured in the same run: the scalar kernels of the same
bits, zstd alone, memcpy, updates that keep nothing. Nothing here changes a run.)";

struct BenchFlags {
  std::string recipe, profile;
  std::vector<std::string> overrides;
  bool fp64 = false, no_scalar = false, random_tokens = false;
  double seconds = 0.2;
  int updates = 5;
  JobFlags job;
  OutputFlags output;
};

using Flags = std::shared_ptr<BenchFlags>;

void PrintJson(const Json& json) {
  PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// ------------------------------------------------------------------------------------------- gemm

void RunGemm(const BenchFlags& flags) {
  const JobOptions job = OrFail(ResolveJob(flags.job)).options;
  const std::vector<GemmBenchRow> shapes =
      flags.recipe.empty() ? SmallModelProducts()
                           : ProductsOf(OrFail(LoadRecipe(flags.recipe, flags.overrides)));
  const auto measure = [&](Isa isa) {
    return GemmBenchmark(shapes, isa, job.threads, flags.fp64, flags.seconds);
  };
  const std::vector<GemmBenchRow> rows = measure(job.isa);
  std::vector<GemmBenchRow> scalar;
  if (!flags.no_scalar) scalar = measure(Isa::kScalar);
  if (flags.output.json) {
    Json list = Json::array();
    for (size_t i = 0; i < rows.size(); ++i) {
      const GemmBenchRow& r = rows[i];
      Json row = {{"product", r.name}, {"layout", r.layout}, {"products", r.products}, {"m", r.m},
                  {"n", r.n},          {"k", r.k},           {"gflops", r.gflops}};
      if (!scalar.empty()) {
        row["scalar_gflops"] = scalar[i].gflops;
        row["ratio"] = r.gflops / scalar[i].gflops;
      }
      list.push_back(row);
    }
    return PrintJson({{"isa", IsaName(job.isa)},
                      {"threads", job.threads},
                      {"type", flags.fp64 ? "fp64" : "fp32"},
                      {"peer", scalar.empty() ? Json() : Json("scalar")},
                      {"rows", list}});
  }
  fmt::print("{}, {} threads, {}{}\n", IsaName(job.isa), job.threads, flags.fp64 ? "FP64" : "FP32",
             scalar.empty() ? "" : "; peer: scalar kernels of the same bits");
  fmt::print("{:<18} {:<6} {:>8} {:>6} {:>6} {:>6} {:>10}{}\n", "product", "layout", "products",
             "m", "n", "k", "GFLOP/s", scalar.empty() ? "" : "   scalar   ratio");
  for (size_t i = 0; i < rows.size(); ++i) {
    const GemmBenchRow& r = rows[i];
    fmt::print("{:<18} {:<6} {:>8} {:>6} {:>6} {:>6} {:>10.1f}", r.name, r.layout, r.products, r.m,
               r.n, r.k, r.gflops);
    if (!scalar.empty()) {
      fmt::print(" {:>8.1f} {:>7.1f}", scalar[i].gflops, r.gflops / scalar[i].gflops);
    }
    fmt::print("\n");
  }
}

// -------------------------------------------------------------------------------------- attention

Json AttentionJson(const AttentionBenchRow& r, const AttentionBenchRow* scalar) {
  Json row = {{"attention", r.name},
              {"sequences", r.sequences},
              {"length", r.length},
              {"query_heads", r.query_heads},
              {"kv_heads", r.kv_heads},
              {"head_dim", r.dim},
              {"window", r.window},
              {"forward_seconds", r.forward_seconds},
              {"backward_seconds", r.backward_seconds}};
  if (scalar == nullptr) return row;
  row["scalar_forward_seconds"] = scalar->forward_seconds;
  row["scalar_backward_seconds"] = scalar->backward_seconds;
  return row;
}

void PrintAttention(const std::vector<AttentionBenchRow>& rows,
                    const std::vector<AttentionBenchRow>& scalar) {
  fmt::print("{:<24} {:>5} {:>6} {:>6} {:>3} {:>4} {:>7} {:>11} {:>11}{}\n", "attention", "seqs",
             "length", "heads", "kv", "dim", "window", "forward ms", "backward ms",
             scalar.empty() ? "" : "  ratios");
  for (size_t i = 0; i < rows.size(); ++i) {
    const AttentionBenchRow& r = rows[i];
    fmt::print("{:<24} {:>5} {:>6} {:>6} {:>3} {:>4} {:>7} {:>11.3f} {:>11.3f}", r.name,
               r.sequences, r.length, r.query_heads, r.kv_heads, r.dim, r.window,
               r.forward_seconds * 1e3, r.backward_seconds * 1e3);
    if (!scalar.empty()) {
      fmt::print("  {:.1f} {:.1f}", scalar[i].forward_seconds / r.forward_seconds,
                 scalar[i].backward_seconds / r.backward_seconds);
    }
    fmt::print("\n");
  }
}

void RunAttention(const BenchFlags& flags) {
  const JobOptions job = OrFail(ResolveJob(flags.job)).options;
  const std::vector<AttentionBenchRow> shapes =
      AttentionsOf(OrFail(LoadRecipe(flags.recipe, flags.overrides)));
  const auto measure = [&](Isa isa) {
    return AttentionBenchmark(shapes, isa, job.threads, flags.seconds);
  };
  const std::vector<AttentionBenchRow> rows = measure(job.isa);
  std::vector<AttentionBenchRow> scalar;
  if (!flags.no_scalar) scalar = measure(Isa::kScalar);
  if (!flags.output.json) {
    fmt::print("{}, {} threads, FP32{}\n", IsaName(job.isa), job.threads,
               scalar.empty() ? "" : "; peer: scalar kernels of the same bits");
    return PrintAttention(rows, scalar);
  }
  Json list = Json::array();
  for (size_t i = 0; i < rows.size(); ++i) {
    list.push_back(AttentionJson(rows[i], scalar.empty() ? nullptr : &scalar[i]));
  }
  PrintJson({{"isa", IsaName(job.isa)},
             {"threads", job.threads},
             {"peer", scalar.empty() ? Json() : Json("scalar")},
             {"rows", list}});
}

// -------------------------------------------------------------------------------------------- ops

// Nanoseconds an element, of the fastest call. Outputs are restored before each call, untimed.
double NanosecondsPerElement(const OpSample& sample, Isa isa, double seconds) {
  using Clock = std::chrono::steady_clock;
  double fastest = 1e300, spent = 0;
  FloatArrays outputs;
  for (int pass = 0; pass < 3 || spent < seconds; ++pass) {
    outputs = sample.initial;
    const auto begin = Clock::now();
    sample.call(Ops<float>(isa), &outputs);
    const double took = std::chrono::duration<double>(Clock::now() - begin).count();
    fastest = std::min(fastest, took);
    spent += took;
  }
  return fastest / static_cast<double>(sample.elements) * 1e9;
}

void RunOps(const BenchFlags& flags) {
  const JobOptions job = OrFail(ResolveJob(flags.job)).options;
  const std::vector<OpSample> samples = OpSamples({.rows = 256, .n = 256, .scale = 0.3f});
  if (!flags.output.json) {
    fmt::print("{}, one thread; peer: scalar ops of the same bits\n", IsaName(job.isa));
    fmt::print("{:<24} {:>12} {:>12} {:>7}\n", "op", "ns/element", "scalar", "ratio");
  }
  Json list = Json::array();
  std::set<std::string> seen;
  for (const OpSample& sample : samples) {
    if (!seen.insert(sample.op).second) continue;  // another variant of an op that was measured
    const double chosen = NanosecondsPerElement(sample, job.isa, flags.seconds / 4);
    const double scalar = NanosecondsPerElement(sample, Isa::kScalar, flags.seconds / 4);
    if (flags.output.json) {
      list.push_back({{"op", sample.op},
                      {"elements", sample.elements},
                      {"nanoseconds_per_element", chosen},
                      {"scalar_nanoseconds_per_element", scalar},
                      {"ratio", scalar / chosen}});
    } else {
      fmt::print("{:<24} {:>12.3f} {:>12.3f} {:>7.1f}\n", sample.op, chosen, scalar,
                 scalar / chosen);
    }
  }
  if (flags.output.json) {
    PrintJson({{"isa", IsaName(job.isa)}, {"peer", "scalar"}, {"rows", list}});
  }
}

// ------------------------------------------------------------------------------------------- step

struct Phase {
  const char* name;
  double StepSeconds::*seconds;
};
constexpr Phase kPhases[] = {{"forward", &StepSeconds::forward},
                             {"backward", &StepSeconds::backward},
                             {"evaluation", &StepSeconds::evaluation},
                             {"norm, clip, AdamW", &StepSeconds::optimizer},
                             {"digest", &StepSeconds::digest}};

double MedianOf(const std::vector<StepSeconds>& steps, double StepSeconds::*member) {
  std::vector<double> values;
  for (const StepSeconds& step : steps) values.push_back(step.*member);
  return Median(values);
}

void PrintSteps(const BenchFlags& flags, const RecipePlan& plan, const JobOptions& job,
                const std::vector<StepSeconds>& steps) {
  std::vector<double> totals;
  for (const StepSeconds& step : steps) totals.push_back(step.total());
  const double median = Median(totals);
  const double tokens = static_cast<double>(plan.tokens) / median, flops = plan.flops / median;
  if (flags.output.json) {
    Json phases = Json::object();
    for (const Phase& phase : kPhases) phases[phase.name] = MedianOf(steps, phase.seconds);
    return PrintJson({{"recipe", flags.recipe},
                      {"isa", IsaName(job.isa)},
                      {"tp", job.tp},
                      {"dp", job.dp},
                      {"threads", job.threads},
                      {"updates", steps.size()},
                      {"parameters", plan.parameters},
                      {"median_seconds", median},
                      {"fastest_seconds", *std::min_element(totals.begin(), totals.end())},
                      {"tokens_per_second", tokens},
                      {"gflops_estimate", flops / 1e9},
                      {"phases", phases}});
  }
  fmt::print("{}: {} parameters, {} tokens an update; {}, tp {}, dp {}, {} threads a rank\n",
             flags.recipe, plan.parameters, plan.tokens, IsaName(job.isa), job.tp, job.dp,
             job.threads);
  fmt::print("update      {} (median of {}; fastest {})\n", Duration(median), steps.size(),
             Duration(*std::min_element(totals.begin(), totals.end())));
  fmt::print("tokens      {:.0f} a second\n", tokens);
  fmt::print("arithmetic  {:.1f} GFLOP/s (estimate: matrix products alone)\n", flops / 1e9);
  for (const Phase& phase : kPhases) {
    const double seconds = MedianOf(steps, phase.seconds);
    fmt::print("  {:<18} {:>9.2f} ms  {:>5.1f} %\n", phase.name, seconds * 1e3,
               100 * seconds / median);
  }
}

// Chrome's trace event format, which chrome://tracing and ui.perfetto.dev show.
Status WriteProfile(const std::string& path, const std::vector<OpSpan>& spans) {
  Json events = Json::array();
  for (const OpSpan& span : spans) {
    const bool gradient = span.name.find(".grad") != std::string::npos;
    const bool op = span.name.find('/') != std::string::npos;
    events.push_back({{"name", span.name},
                      {"cat", !op        ? "optimizer"
                              : gradient ? "backward"
                                         : "forward"},
                      {"ph", "X"},
                      {"ts", span.begin * 1e6},
                      {"dur", span.seconds * 1e6},
                      {"pid", 0},
                      {"tid", 0}});
  }
  const Json trace = {{"traceEvents", events}, {"displayTimeUnit", "ms"}};
  RT_ASSIGN_OR_RETURN(File file, FileOps().Create(path));
  RT_RETURN_IF_ERROR(file.Write(trace.dump() + "\n"));
  return file.Close();
}

void RunStep(BenchFlags flags) {
  const Recipe recipe = OrFail(LoadRecipe(flags.recipe, flags.overrides));
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  const JobOptions& options = job.options;
  if (!job.speaks()) flags.output.quiet = true;
  const RecipePlan plan = OrFail(PlanRecipe(recipe, options.tp, options.dp));
  if (flags.updates >= recipe.steps && !flags.random_tokens) {
    Fail(UsageError(
        fmt::format("--updates {}: the recipe has {} updates, and one goes first; expected "
                    "fewer, or --random-tokens",
                    flags.updates, recipe.steps)));
  }
  std::shared_ptr<const BatchSource> batches;
  if (flags.random_tokens) {
    batches = std::make_shared<RandomBatches>(recipe.model.vocab_size, recipe.data.sequence_length,
                                              recipe.data.seed);
  }
  std::vector<StepSeconds> steps;
  std::vector<OpSpan> spans;
  Progress progress(flags.output, "bench", 0, flags.updates);
  const auto note = [&](const std::string& line) { progress.Say(line); };
  const Status status = RunJob(job, note, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank, Job::Make(recipe, comm, options, batches));
    RT_RETURN_IF_ERROR(rank->StartFresh());
    RT_ASSIGN_OR_RETURN(steps, MeasureSteps(
                                   *rank, flags.updates, [&](int done) { progress.Show(done, ""); },
                                   flags.profile.empty() ? nullptr : &spans));
    return {};
  });
  progress.Finish();
  OrFail(status);
  if (!job.speaks()) return;
  if (!flags.profile.empty()) OrFail(WriteProfile(flags.profile, spans));
  PrintSteps(flags, plan, options, steps);
}

// --------------------------------------------------------------------------------------- commands

CLI::App* AddPart(CLI::App& bench, const char* name, const char* summary, const Flags& flags,
                  const std::function<void(const BenchFlags&)>& run) {
  CLI::App* part = bench.add_subcommand(name, summary);
  AddOutputFlags(part, &flags->output, true);
  part->callback([flags, run] { run(*flags); });
  return part;
}

void AddSeconds(CLI::App* part, const Flags& flags) {
  CLI::Option* seconds =
      part->add_option("--seconds", flags->seconds, "About how long each row is measured");
  NumberIn(seconds, 0.001, 3600)->capture_default_str();
}

}  // namespace

void AddBenchCommand(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "Measure speed, beside that of a named peer");
  bench->require_subcommand(1);
  bench->footer(kExamples);
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* gemm = AddPart(*bench, "gemm", "Matrix products in a step's shapes", flags, RunGemm);
  gemm->add_option("recipe", flags->recipe,
                   "Products of this recipe (TOML); without it, of a small model");
  gemm->add_flag("--fp64", flags->fp64, "FP64 instead of FP32");
  gemm->add_flag("--no-scalar", flags->no_scalar, "Leave the scalar kernels out");
  CLI::Option* threads =
      gemm->add_option("--threads", flags->job.threads, "Threads; 0: one for each processor");
  WholeIn(threads, 0, 1024)->capture_default_str();
  AddIsaFlag(gemm, &flags->job.isa);
  AddSeconds(gemm, flags);
  CLI::App* attention =
      AddPart(*bench, "attention", "Attention in a recipe's shapes, both kinds", flags, RunAttention);
  attention->add_option("recipe", flags->recipe, "The recipe (TOML)")->required();
  attention->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  attention->add_flag("--no-scalar", flags->no_scalar, "Leave the scalar kernels out");
  WholeIn(attention->add_option("--threads", flags->job.threads,
                                "Threads; 0: one for each processor"), 0, 1024)
      ->capture_default_str();
  AddIsaFlag(attention, &flags->job.isa);
  AddSeconds(attention, flags);
  CLI::App* ops = AddPart(*bench, "ops", "Every op of the op table", flags, RunOps);
  AddIsaFlag(ops, &flags->job.isa);
  AddSeconds(ops, flags);
  CLI::App* step = AddPart(*bench, "step", "Updates of a recipe", flags, RunStep);
  step->add_option("recipe", flags->recipe, "The recipe (TOML)")->required();
  step->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  CLI::Option* updates =
      step->add_option("--updates", flags->updates, "Updates to time; one more goes before");
  WholeIn(updates, 1, 100000)->capture_default_str();
  step->add_flag("--random-tokens", flags->random_tokens,
                 "Random tokens instead of the recipe's dataset");
  step->add_option("--profile", flags->profile,
                   "Write rank 0's time op by op to this file (Chrome trace format)");
  AddJobFlags(step, &flags->job);
  AddBenchStoreCommands(*bench);
}

}  // namespace retrace
