#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "core/recipe_toml.h"
#include "core/version.h"
#include "replay/train.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace train examples/demo.toml -o runs/demo --tp 2
  retrace train examples/demo.toml -o runs/bf16 --set precision.preset=bf16
  retrace train --resume runs/demo            # go on after a stop, a crash or kill -9
With a flight recorder (store.flight.steps in the recipe), 'touch RUN/fire' or SIGUSR1 makes the ring of
last states stay. Ctrl-C stops at the next update's boundary; the run can be resumed. The digests of its states are the
same for any --tp, --dp, --threads and --isa, and however often it was interrupted.)";

struct TrainFlags {
  std::string recipe, run_dir, resume;
  std::vector<std::string> overrides;
  int64_t until = -1;
  JobFlags job;
  OutputFlags output;
};

Recipe RecipeOf(const TrainFlags& flags) {
  if (flags.resume.empty()) return OrFail(LoadRecipe(flags.recipe, flags.overrides));
  if (!flags.overrides.empty()) {
    Fail(UsageError("--set: the recipe of a run is frozen; 'retrace replay RUN --do ...' makes a "
                    "branch with a change"));
  }
  const RunReader run = OrFail(RunReader::Open(flags.resume));
  return OrFail(ParseRecipe(run.recipe_text(), flags.resume + "/recipe.toml"));
}

std::string NoteOf(const UpdateRecord& record) {
  std::string note = fmt::format("loss {:.4f}", record.loss);
  if (record.evaluation_loss) note += fmt::format("  eval {:.4f}", *record.evaluation_loss);
  return note + fmt::format("  |g| {:.3g}", record.gradient_norm);
}

void PrintEnd(const TrainFlags& flags, const std::string& dir, TrainEnd end, int64_t position,
              const Digest& digest) {
  const char* word = end == TrainEnd::kStopped ? "stopped" : "finished";
  if (flags.output.json) {
    const nlohmann::ordered_json json = {
        {"run", dir}, {"end", word}, {"position", position}, {"digest", digest.Hex()}};
    fmt::print("{}\n", json.dump());
    return;
  }
  fmt::print("{} {} at update {}, state {}\n", dir, word, position, digest.Hex());
  if (end == TrainEnd::kStopped && !flags.output.quiet) {
    SayError("go on with: retrace train --resume " + dir);
  }
}

void RunTrain(TrainFlags flags) {
  const Recipe recipe = RecipeOf(flags);
  const std::string dir = flags.resume.empty() ? flags.run_dir : flags.resume;
  if (dir.empty()) Fail(UsageError("train: expected -o DIR, the directory of the new run"));
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!job.speaks()) flags.output.quiet = true;
  TrainOptions options;
  options.run_dir = dir;
  options.resume = !flags.resume.empty();
  options.until = flags.until;
  options.stop = StopRequested;
  CatchStopSignals();
  options.fire = FireRequested;
  CatchFireSignal();  // before the ranks start: the signal may go to all of them
  std::unique_ptr<Progress> progress;
  const auto say = [&](const std::string& line) {
    if (progress) progress->Say(line);
    else if (!flags.output.quiet)
      SayError(line);
  };
  int64_t position = 0;
  Digest digest;
  TrainEnd end = TrainEnd::kFinished;
  options.notice = say;
  options.started = [&](int64_t first, int64_t last) {
    position = first;
    progress = std::make_unique<Progress>(flags.output, "train", first, last);
    progress->Show(first, "");
  };
  options.updated = [&](const UpdateRecord& record, const Digest& state) {
    position = record.update;
    digest = state;
    progress->Show(record.update, NoteOf(record));
  };
  const Status status = RunJob(job, say, [&](Comm& comm) -> Status {
    RT_ASSIGN_OR_RETURN(end, Train(recipe, comm, job.options, options));
    return {};
  });
  progress.reset();
  OrFail(status);
  if (!job.speaks()) return;
  if (digest == Digest()) {  // nothing was left to do
    const RunReader run = OrFail(RunReader::Open(dir));
    position = run.history().last_position();
    digest = run.history().Find(position)->digest;
  }
  PrintEnd(flags, dir, end, position, digest);
}

}  // namespace

void AddTrainCommand(CLI::App& app) {
  CLI::App* train = app.add_subcommand("train", "Make a recording, or go on with one");
  auto flags = std::make_shared<TrainFlags>();
  CLI::Option* recipe = train->add_option("recipe", flags->recipe, "The recipe (TOML)");
  train->add_option("-o,--out", flags->run_dir, "Directory of the new run");
  train->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  train->add_option("--resume", flags->resume, "Run to go on with")->excludes(recipe);
  WholeIn(train->add_option("--until", flags->until, "Stop after this update"), 0);
  AddJobFlags(train, &flags->job);
  AddOutputFlags(train, &flags->output, true);
  train->footer(kExamples);
  train->callback([flags] {
    if (flags->recipe.empty() && flags->resume.empty()) {
      Fail(UsageError("train: expected a recipe, or --resume RUN"));
    }
    RunTrain(*flags);
  });
}

}  // namespace retrace
