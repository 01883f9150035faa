#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"
#include "formats/store_bench.h"
#include "kernels/thread_pool.h"
#include "replay/random_batches.h"
#include "replay/rebuild_bench.h"
#include "replay/stall_bench.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kStoreExamples[] = R"(Examples:
  retrace bench store runs/demo
  retrace bench store runs/demo --threads 2 --seconds 5 --json
Of a recording: bytes a parameter and step; making a journal beside shuffle + zstd level 1 alone; rebuilding
a state from its predecessor and a journal beside memcpy; comparing two states of equal digest.)";

constexpr char kStallExamples[] = R"(Examples:
  retrace bench stall examples/demo.toml --set data.path=data/gcide
  retrace bench stall examples/bench_100m.toml --random-tokens --updates 3 --rounds 2 --dir /mnt/scratch
The same updates with a journal each and with none, in turns; both include the digest of the state. The
files go to a folder of their own, which is removed.)";

struct Flags {
  std::string run, recipe, dir;
  std::vector<std::string> overrides;
  bool random_tokens = false;
  int updates = 5, rounds = 3, threads = 0;
  double seconds = 1;
  JobFlags job;
  OutputFlags output;
};

void PrintJson(const Json& json) {
  PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

// ------------------------------------------------------------------------------------------ store

// Seconds to find that a state equals itself: by digest, so without reading a tensor.
double SecondsOfEqualDiff(const OpenedRun& run, Engine& engine, int64_t position) {
  RecordedState a(run.reader(), run.layout(), engine, position);
  RecordedState b(run.reader(), run.layout(), engine, position);
  const auto begin = std::chrono::steady_clock::now();
  const StateDifference difference = OrFail(DiffRecorded(a, b, Selection()));
  const double took =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (!difference.identical() || a.was_read() || b.was_read()) {
    Fail(FailedError(run.dir() + ": equal digests did not answer the comparison of a state with "
                                 "itself"));
  }
  return took;
}

struct StoreFigures {
  StoreSize size;
  JournalSpeed speed;
  RebuildSpeed rebuild;
  double diff_seconds = 0;
  int threads = 1;
};

StoreFigures MeasureAll(const Flags& flags, const OpenedRun& run) {
  StoreFigures figures;
  figures.size = OrFail(MeasureStore(run.reader(), run.layout()));
  if (figures.size.journals == 0) {
    Fail(UsageError(flags.run + ": expected a run that keeps journals"));
  }
  const int64_t position = figures.size.last_journal;
  figures.speed = OrFail(MeasureJournalSpeed(run.reader(), run.layout(), position, flags.seconds));
  figures.threads = flags.threads > 0 ? flags.threads : AvailableCpus();
  Engine engine(BestIsa(), figures.threads);
  const RunReader reader = OrFail(RunReader::Open(flags.run, figures.threads));
  figures.rebuild = OrFail(MeasureRebuild(reader, run.layout(), engine, flags.seconds));
  figures.diff_seconds = SecondsOfEqualDiff(run, engine, position);
  return figures;
}

Json JsonOf(const Flags& flags, const StoreFigures& figures) {
  const StoreSize& size = figures.size;
  const JournalSpeed& speed = figures.speed;
  const double megabytes = static_cast<double>(speed.input_bytes) / 1e6;
  const double rebuild = figures.rebuild.RebuildGigabytes(size.parameters);
  return {{"run", flags.run},
          {"journals", size.journals},
          {"keyframes", size.keyframes},
          {"parameters", size.parameters},
          {"rank_file_bytes", size.journal_rank_bytes},
          {"master_bytes", size.journal_master_bytes},
          {"ledger_bytes", size.ledger_bytes},
          {"bytes_per_parameter", size.JournalBytes()},
          {"keyframe_bytes_per_parameter", size.KeyframeBytes()},
          {"amortised_bytes_per_parameter", size.AmortisedBytes(16)},
          {"file_megabytes_per_second", megabytes / speed.file.wall},
          {"bare_megabytes_per_second", megabytes / speed.bare.wall},
          {"file_megabytes_per_processor_second", megabytes / speed.file.processor},
          {"bare_megabytes_per_processor_second", megabytes / speed.bare.processor},
          {"file_bytes", speed.file_bytes},
          {"bare_bytes", speed.bare_bytes},
          {"ratio", speed.bare.processor / speed.file.processor},
          {"threads", figures.threads},
          {"rebuild_keyframe", figures.rebuild.keyframe},
          {"rebuild_steps", figures.rebuild.steps},
          {"rebuild_seconds_per_step", figures.rebuild.step_seconds},
          {"rebuild_gigabytes_per_second", rebuild},
          {"copy_gigabytes_per_second", figures.rebuild.copy_gigabytes},
          {"rebuild_ratio", rebuild / figures.rebuild.copy_gigabytes},
          {"equal_diff_seconds", figures.diff_seconds}};
}

void RunStore(const Flags& flags) {
  const auto run = OrFail(OpenedRun::Open(flags.run));
  const StoreFigures figures = MeasureAll(flags, *run);
  const Json json = JsonOf(flags, figures);
  if (flags.output.json) return PrintJson(json);
  const auto number = [&](const char* name) { return json[name].get<double>(); };
  const StoreSize& size = figures.size;
  fmt::print("{}: {} journals and {} keyframes of {} parameters\n", flags.run, size.journals,
             size.keyframes, size.parameters);
  fmt::print(
      "size     {:.3f} bytes a parameter and step: rank files {:.3f}, masters {:.3f}, ledger "
      "{:.3f}\n",
      size.JournalBytes(),
      static_cast<double>(size.journal_rank_bytes) / size.journals / size.parameters,
      static_cast<double>(size.journal_master_bytes) / size.journals / size.parameters,
      static_cast<double>(size.ledger_bytes) / size.positions / size.parameters);
  fmt::print("         keyframes {:.3f}; with one every 16 steps {:.3f} a step; a raw state 12\n",
             size.KeyframeBytes(), size.AmortisedBytes(16));
  fmt::print(
      "making   {:.0f} MB/s of processor time (wall {:.0f}), one thread, to a finished file\n",
      number("file_megabytes_per_processor_second"), number("file_megabytes_per_second"));
  fmt::print("  peer   {:.0f} MB/s (wall {:.0f}), shuffle and zstd level 1 alone; ratio {:.2f}\n",
             number("bare_megabytes_per_processor_second"), number("bare_megabytes_per_second"),
             number("ratio"));
  fmt::print(
      "rebuild  {:.1f} ms a step (the walk from {} to {}, its digest included), {:.2f} GB/s at {} "
      "bytes a parameter, {} threads\n",
      figures.rebuild.step_seconds * 1e3, figures.rebuild.keyframe,
      figures.rebuild.keyframe + figures.rebuild.steps, number("rebuild_gigabytes_per_second"),
      kRebuildBytes, figures.threads);
  fmt::print("  peer   {:.2f} GB/s, memcpy, read and written; ratio {:.2f}\n",
             figures.rebuild.copy_gigabytes, number("rebuild_ratio"));
  fmt::print("diff     {:.3f} ms for two states of equal digest; no tensor is read\n",
             figures.diff_seconds * 1e3);
}

// ------------------------------------------------------------------------------------------ stall

// A folder that goes with the command.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& parent) {
    std::string path =
        ((parent.empty() ? std::filesystem::temp_directory_path() : std::filesystem::path(parent)) /
         "retrace-stall-XXXXXX")
            .string();
    if (mkdtemp(path.data()) == nullptr) Fail(FailedError(path + ": can not be made"));
    path_ = path;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

void PrintStall(const Flags& flags, const ResolvedJob& job, const StallSeconds& stall) {
  const double bare = MedianOf(stall.bare), recorded = MedianOf(stall.recorded);
  const int used = job.options.threads * job.options.tp * job.options.dp;
  const int idle = std::max(0, AvailableCpus() - used);
  const Json json = {{"recipe", flags.recipe},
                     {"updates", stall.recorded.size()},
                     {"bare_seconds", bare},
                     {"recorded_seconds", recorded},
                     {"copy_seconds", MedianOf(stall.copied)},
                     {"durable_seconds", MedianOf(stall.durable)},
                     {"waited_seconds", stall.waited},
                     {"stall", recorded / bare - 1},
                     {"idle_processors", idle}};
  if (flags.output.json) return PrintJson(json);
  fmt::print(
      "{}: {} updates of each kind, tp {}, dp {}, {} threads a rank; processors that training "
      "leaves idle: {}\n",
      flags.recipe, stall.recorded.size(), job.options.tp, job.options.dp, job.options.threads,
      idle);
  fmt::print("bare       {:.1f} ms an update (median), digest of the state included\n", bare * 1e3);
  fmt::print("recorded   {:.1f} ms, with a journal each: {:+.1f} %\n", recorded * 1e3,
             100 * (recorded / bare - 1));
  fmt::print("  of it    {:.1f} ms copying and committing; waited for storage {:.1f} ms in all\n",
             MedianOf(stall.copied) * 1e3, stall.waited * 1e3);
  fmt::print("durable    after {:.1f} ms, with training at rest\n", MedianOf(stall.durable) * 1e3);
}

void RunStall(Flags flags) {
  const Recipe recipe = OrFail(LoadRecipe(flags.recipe, flags.overrides));
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!job.speaks()) flags.output.quiet = true;
  if (job.launched) Fail(UsageError("bench stall: expected ranks of this host, not a launcher's"));
  std::shared_ptr<const BatchSource> batches;
  if (flags.random_tokens) {
    batches = std::make_shared<RandomBatches>(recipe.model.vocab_size, recipe.data.sequence_length,
                                              recipe.data.seed);
  }
  StallSeconds stall;
  Status status;
  {
    const ScratchFolder scratch(flags.dir);
    Progress progress(flags.output, "stall", 0, int64_t{2} * flags.updates * flags.rounds);
    const auto note = [&](const std::string& line) { progress.Say(line); };
    status = RunJob(job, note, [&](Comm& comm) -> Status {
      RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank,
                          Job::Make(recipe, comm, job.options, batches));
      RT_RETURN_IF_ERROR(rank->StartFresh());
      RT_ASSIGN_OR_RETURN(stall,
                          MeasureStall(*rank, scratch.path() + "/run", flags.updates, flags.rounds,
                                       [&](int done) { progress.Show(done, ""); }));
      return {};
    });
    progress.Finish();
  }
  OrFail(status);
  PrintStall(flags, job, stall);
}

}  // namespace

void AddBenchStoreCommands(CLI::App& bench) {
  auto flags = std::make_shared<Flags>();
  CLI::App* store = bench.add_subcommand("store", "Bytes and speed of a run's journals");
  store->add_option("run", flags->run, "A recording that keeps journals")->required();
  CLI::Option* seconds =
      store->add_option("--seconds", flags->seconds, "About how long each part is measured");
  NumberIn(seconds, 0.001, 3600)->capture_default_str();
  CLI::Option* threads = store->add_option("--threads", flags->threads,
                                           "Threads of the rebuild; 0: one for each processor");
  WholeIn(threads, 0, 1024)->capture_default_str();
  AddOutputFlags(store, &flags->output, true);
  store->footer(kStoreExamples);
  store->callback([flags] { RunStore(*flags); });

  CLI::App* stall = bench.add_subcommand("stall", "What a journal at every step costs an update");
  stall->add_option("recipe", flags->recipe, "The recipe (TOML)")->required();
  stall->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  CLI::Option* updates = stall->add_option("--updates", flags->updates,
                                           "Updates of a kind in a round; one is not counted");
  WholeIn(updates, 2, 100000)->capture_default_str();
  WholeIn(stall->add_option("--rounds", flags->rounds, "Rounds"), 1, 1000)->capture_default_str();
  stall->add_option("--dir", flags->dir, "Where the scratch folder is made; /tmp by default");
  stall->add_flag("--random-tokens", flags->random_tokens,
                  "Random tokens instead of the recipe's dataset");
  AddJobFlags(stall, &flags->job);
  AddOutputFlags(stall, &flags->output, true);
  stall->footer(kStallExamples);
  stall->callback([flags] { RunStall(*flags); });
}

}  // namespace retrace
