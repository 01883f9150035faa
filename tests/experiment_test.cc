// Experiments: refused without an equal control, honest without an effect, resumed without
// repeating.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/philox.h"
#include "core/recipe_toml.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "surgery/ensemble.h"
#include "surgery/statistics.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int64_t kUpdates = 6;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// tiny.toml with fewer sequences, as overrides: hundreds of replicas of it are lived.
std::vector<std::string> SmallOverrides(const std::string& peak) {
  return {"data.path=" + TestData("dataset/tiny"),
          "model.layers=2",
          "model.layer_scalar=1.0",
          "data.sequence_length=6",
          "data.micro_batch_size=1",
          "data.micro_batches=2",
          "data.evaluation_samples=2",
          "topology.lanes=1",
          "topology.virtual_shards=1",
          "steps=" + std::to_string(kUpdates),
          "schedule.warmup_steps=0",
          "store.window=[0,6]",
          "schedule.peak=" + peak};
}

std::string TinyPath() { return SourceDir() + "/examples/tiny.toml"; }

// Calm: the loss falls, by and large. Rough: the learning rate is so large that it jumps about.
Recipe Calm() { return LoadRecipe(TinyPath(), SmallOverrides("0.1")).value(); }
Recipe Rough() { return LoadRecipe(TinyPath(), SmallOverrides("10")).value(); }

ExperimentPlan PlanOf(const std::string& toml) {
  Result<ExperimentPlan> plan = ParseExperiment(toml, "plan.toml");
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? *plan : ExperimentPlan();
}

// An experiment over one run with given noise, which costs no ladder.
std::string Head(const std::string& more = "") {
  return "steps = \"2..6\"\nsigma = 0.0009765625\nthreshold = 0.5\n" + more;
}
std::string Arm(const std::string& name, const std::string& interventions) {
  return "[[arm]]\nname = \"" + name + "\"\ndo = [" + interventions + "]\n";
}

Status RecordRun(const Recipe& recipe, const std::string& dir) {
  SoloComm comm;
  TrainOptions options;
  options.run_dir = dir;
  return Train(recipe, comm, {}, options).status();
}

class Experiment : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // In memory where there is such a place: hundreds of replicas are made durable.
    const bool shm = ::access("/dev/shm", W_OK) == 0;
    if (shm) ::setenv("TMPDIR", "/dev/shm", 0);
    runs_ = new TempFolder;
    ASSERT_EQ("", RecordRun(Calm(), *runs_ / "calm").message());
    ASSERT_EQ("", RecordRun(Rough(), *runs_ / "rough").message());
  }
  static void TearDownTestSuite() { delete runs_; }

  Result<ExperimentResult> Run(const std::string& run_name, const ExperimentPlan& plan,
                               ExperimentOptions options = {}) {
    RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(*runs_ / run_name));
    options.out = Out();
    return RunExperiment(&run, plan, options);
  }
  std::string Out() const { return out_ / "out"; }

  static TempFolder* runs_;
  TempFolder out_;
};
TempFolder* Experiment::runs_ = nullptr;

std::vector<Digest> StatesOf(const ArmResult& arm) {
  std::vector<Digest> states;
  for (const Replica& replica : arm.replicas) states.push_back(replica.state);
  return states;
}

// ---- Guards ----

TEST_F(Experiment, ANullArmIsWithinNoiseInNineteenOfTwentyRepetitions) {
  int within = 0;
  std::set<double> different;
  for (int repetition = 0; repetition < 20; ++repetition) {
    const int64_t seed = 1000 * repetition;
    const ExperimentPlan plan =
        PlanOf(Head("seed = " + std::to_string(seed) + "\n") + Arm("null", "") +
               "seed = " + std::to_string(seed + 500) + "\n");
    const Result<ExperimentResult> result = Run("rough", plan);
    ASSERT_TRUE(result.ok()) << result.status().message();
    EXPECT_EQ(12 + 6, result->replicas_run);
    within += result->arms[1].verdict == Verdict::kWithinNoise ? 1 : 0;
    different.insert(result->arms[0].jumps.begin(), result->arms[0].jumps.end());
    EXPECT_GT(result->arms[0].median, 0.2) << "a run without jumps would test nothing";
  }
  EXPECT_GE(within, 19);
  EXPECT_GT(different.size(), 200u) << "without scatter there is nothing to be within";
}

TEST_F(Experiment, ThePlantedCauseIsFoundAndItsRemovalRemovesTheSpike) {
  const ExperimentPlan planted = PlanOf(Head() + Arm("planted", "\"lr:scale=30@3\""));
  ExperimentOptions options;
  options.jobs = 2;
  const Result<ExperimentResult> found = Run("calm", planted, options);
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_STREQ("worsens", VerdictName(found->arms[1].verdict)) << found->arms[1].delta;
  // A run that has the cause in it.
  const RunReader calm = RunReader::Open(*runs_ / "calm").value();
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Calm(), comm, {}).value();
  BranchPlan plan;
  plan.first = 2;
  plan.last = kUpdates;
  plan.interventions = {ParseIntervention("lr:scale=30@3").value()};
  plan.out = *runs_ / "planted";
  ASSERT_EQ("", MakeBranch(calm, *job, plan, nullptr).message());
  const ExperimentPlan removal = PlanOf(
      Head() + Arm("removed", "\"lr:scale=0.033333333333333333@3\"") + Arm("clip", "\"clip:0.9\""));
  const Result<ExperimentResult> removed = Run("planted", removal, options);
  ASSERT_TRUE(removed.ok()) << removed.status().message();
  EXPECT_STREQ("removes", VerdictName(removed->arms[1].verdict)) << removed->arms[1].delta;
  EXPECT_STREQ("within noise", VerdictName(removed->arms[2].verdict));
}

TEST_F(Experiment, ArmsThatDifferInANoOpHaveEqualDigests) {
  const ExperimentPlan plan =
      PlanOf(Head() + Arm("a", "\"clip:none@3\"") + Arm("b", "\"clip:none@3\", \"lr:scale=1\"") +
             Arm("nothing", "") + Arm("c", "\"clip:none@4\"") + Arm("A", "\"clip:none@3\""));
  const Result<ExperimentResult> result = Run("rough", plan);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_EQ(12 + 3 * 6, result->replicas_run) << "an arm that does nothing is the control";
  EXPECT_EQ(StatesOf(result->arms[1]), StatesOf(result->arms[2]));
  EXPECT_NE(StatesOf(result->arms[1]), StatesOf(result->arms[4]));
  EXPECT_EQ(StatesOf(result->arms[1]), StatesOf(result->arms[5])) << "said twice, lived once";
  std::vector<Digest> control = StatesOf(result->arms[0]);
  control.resize(6);
  EXPECT_EQ(control, StatesOf(result->arms[3]));
}

// The same updates, one digest altered on its way into the ledger.
Status RecordAltered(const std::string& dir, int64_t altered) {
  SoloComm comm;
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(Calm(), comm, {}));
  RunPlan plan;
  plan.recipe_text = PrintRecipe(Calm());
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<RunWriter> writer,
                      RunWriter::Create(dir, job->layout(), plan));
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Recorder> recorder,
                      Recorder::Make(*job, writer.get(), dir));
  RT_RETURN_IF_ERROR(job->StartFresh());
  RT_ASSIGN_OR_RETURN(const Digest first, job->StateDigestNow());
  RT_RETURN_IF_ERROR(recorder->RecordFirst(first, true));
  while (job->position() < kUpdates) {
    RT_ASSIGN_OR_RETURN(Job::Step step, job->Advance());
    if (job->position() == altered) step.digest.bytes[5] ^= 1;
    RT_RETURN_IF_ERROR(recorder->Record(step, 0, Keep::kNothing));
  }
  return recorder->Finish();
}

TEST_F(Experiment, WithoutAnEqualControlThereIsNoVerdict) {
  const ExperimentPlan plan = PlanOf(Head() + Arm("a", "\"clip:none\""));
  ASSERT_EQ("", RecordAltered(*runs_ / "altered", 4).message());
  const Result<ExperimentResult> result = Run("altered", plan);
  ASSERT_TRUE(result.ok()) << result.status().message();
  ASSERT_TRUE(result->control_differs.has_value());
  EXPECT_EQ(4, result->control_differs->update);
  EXPECT_TRUE(result->arms.empty());
  // With the unaltered one it is there: the digest is what was refused.
  ASSERT_EQ("", RecordAltered(*runs_ / "unaltered", -1).message());
  EXPECT_FALSE(Run("unaltered", plan)->control_differs.has_value());
}

// ---- Noise ----

TEST_F(Experiment, SaturatedNoiseAllowsAClaimAboutTheRun) {
  std::vector<std::string> overrides = SmallOverrides("10");
  overrides.push_back("steps=10");
  ASSERT_EQ("", RecordRun(LoadRecipe(TinyPath(), overrides).value(), *runs_ / "wild").message());
  const ExperimentPlan plan =
      PlanOf("steps = \"2..10\"\n" + Arm("slow", "\"lr:scale=0.1\"") + Arm("null", ""));
  const Result<ExperimentResult> result = Run("wild", plan);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_TRUE(result->saturated);
  const ExperimentResult::Rung top = result->ladder.back(), below = *(result->ladder.end() - 2);
  EXPECT_LT(top.spread, 2 * below.spread);
  EXPECT_EQ(below.sigma, result->sigma) << "the rung below already was saturated";
  EXPECT_STREQ("this run", ScopeOf(plan, *result));
  EXPECT_STREQ("removes", VerdictName(result->arms[1].verdict));
}

TEST_F(Experiment, NoiseThatIsNotSaturatedLimitsTheClaim) {
  const ExperimentPlan plan =
      PlanOf("steps = \"2..6\"\nthreshold = 0.05\n" + Arm("planted", "\"lr:scale=30@3\""));
  const Result<ExperimentResult> result = Run("calm", plan);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_FALSE(result->saturated) << "this run is calm: its spread grows with the noise";
  EXPECT_EQ(3u, result->ladder.size());
  EXPECT_EQ(0x1p-10, result->sigma);
  EXPECT_STREQ("this exact trajectory", ScopeOf(plan, *result));
  EXPECT_STREQ("this exact trajectory", ScopeOf(PlanOf(Head() + Arm("a", "")), ExperimentResult{}))
      << "given noise is not examined";
}

// ---- Replicas ----

TEST_F(Experiment, ReplicasAreTheSameHoweverManyRunSideBySide) {
  const ExperimentPlan plan = PlanOf(Head() + Arm("a", "\"clip:none\"") + Arm("b", "\"eps:1e-3\""));
  ExperimentOptions one;
  one.only = {"a"};
  const ExperimentResult first = Run("rough", plan, one).value();
  ASSERT_EQ(2u, first.arms.size());
  std::filesystem::remove_all(Out());
  ExperimentOptions three;
  three.jobs = 3;
  three.job.isa = Isa::kScalar;
  const ExperimentResult second = Run("rough", plan, three).value();
  ASSERT_EQ(3u, second.arms.size());
  for (size_t a = 0; a < 2; ++a) {
    EXPECT_EQ(StatesOf(first.arms[a]), StatesOf(second.arms[a]));
    EXPECT_EQ(first.arms[a].jumps, second.arms[a].jumps);
  }
  EXPECT_EQ(first.arms[1].p_below, second.arms[1].p_below) << "--only leaves the family as it is";
}

TEST_F(Experiment, WhatLiesBeforeTheFirstDifferenceIsLivedOnce) {
  const ExperimentPlan plan = PlanOf(Head() + Arm("late", "\"reset-moments:v,t=keep@5\""));
  ExperimentOptions options;
  const ExperimentResult shared = Run("rough", plan, options).value();
  const RunReader replica = RunReader::Open(Out() + "/" + shared.arms[1].replicas[2].dir).value();
  EXPECT_EQ(4, replica.history().first_position());
  EXPECT_EQ(Out() + "/" + shared.arms[0].replicas[2].dir, replica.history().header.lineage->parent);
  // Records only: no state of the control's replica is left either.
  for (const auto& entry : std::filesystem::recursive_directory_iterator(Out())) {
    EXPECT_NE(".h5", entry.path().extension()) << entry.path();
  }
  // Lived whole, since the control's states are gone, it is the same.
  std::string kept;
  std::ifstream log(Out() + "/replicas.jsonl");
  for (std::string line; std::getline(log, line);) {
    if (line.find("late") == std::string::npos) kept += line + "\n";
  }
  std::ofstream(Out() + "/replicas.jsonl") << kept;
  const ExperimentResult whole = Run("rough", plan, options).value();
  EXPECT_EQ(6, whole.replicas_run);
  EXPECT_EQ(StatesOf(shared.arms[1]), StatesOf(whole.arms[1]));
  EXPECT_EQ(shared.arms[1].jumps, whole.arms[1].jumps);
  EXPECT_EQ(1, RunReader::Open(Out() + "/" + whole.arms[1].replicas[2].dir)
                   .value()
                   .history()
                   .first_position());
}

TEST_F(Experiment, ReplicasKeepStatesWhereThatIsAsked) {
  const ExperimentPlan plan = PlanOf(Head() + Arm("late", "\"clip:none@5\""));
  ExperimentOptions options;
  options.keep_states = true;
  const ExperimentResult result = Run("rough", plan, options).value();
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Rough(), comm, {}).value();
  for (const ArmResult& arm : result.arms) {
    const RunReader run = RunReader::Open(Out() + "/" + arm.replicas[1].dir).value();
    const bool same =
        ReplayAsRecorded(run, *job, run.history().first_position() + 1, kUpdates, nullptr).value();
    EXPECT_TRUE(same) << arm.name;
    EXPECT_EQ(arm.replicas[1].state, run.history().Find(kUpdates)->digest);
  }
}

TEST_F(Experiment, AHaltedReplicaHasAnInfiniteJump) {
  const ExperimentPlan plan = PlanOf(Head() + Arm("burnt", "\"lr:constant=1e30@3..6\""));
  const Result<ExperimentResult> result = Run("calm", plan);
  ASSERT_TRUE(result.ok()) << result.status().message();
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_TRUE(result->arms[1].replicas[i].halted);
    EXPECT_EQ(kInfinity, result->arms[1].jumps[i]);
  }
  EXPECT_STREQ("worsens", VerdictName(result->arms[1].verdict));
  EXPECT_EQ(0, Run("calm", plan)->replicas_run) << "halted is finished";
}

TEST_F(Experiment, KilledAndResumedItRepeatsNoFinishedReplica) {
  const std::string file = out_ / "plan.toml", log = Out() + "/replicas.jsonl";
  std::ofstream(file) << Head() + Arm("a", "\"clip:none\"") + Arm("b", "\"eps:1e-3@4\"");
  const std::vector<std::string> words = {"experiment", file, *runs_ / "rough", "--out", Out(),
                                          "--jobs",     "2",  "--json"};
  const auto lines = [&] {
    const std::string text = ReadFileText(log);
    return std::count(text.begin(), text.end(), '\n');
  };
  std::vector<std::string> all = words;
  all.insert(all.begin(), ProgramPath());
  int64_t before = 0;
  for (const int64_t target : {3, 16}) {
    Process process(all, out_ / "log");
    while (lines() < target && ::waitpid(process.pid(), nullptr, WNOHANG) == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    process.Signal(SIGKILL);
    process.Wait();
    before = lines();
    EXPECT_GE(before, target);
  }
  std::ofstream(log, std::ios::app) << "{\"key\":\"torn";
  const Finished ran = RunProgram(words);
  ASSERT_EQ(0, ran.code) << ran.err;
  const nlohmann::json result = nlohmann::json::parse(ran.out);
  EXPECT_EQ(before - 1, result["replicas_found"]) << "one line is the control's proof";
  EXPECT_EQ(24 - (before - 1), result["replicas_run"]);
  std::filesystem::remove_all(Out());
  const nlohmann::json whole = nlohmann::json::parse(RunProgram(words).out);
  EXPECT_EQ(24, whole["replicas_run"]);
  EXPECT_EQ(whole["arms"], result["arms"]);
}

TEST_F(Experiment, TheTableShowsEachReplicaAndTheFilesEachNumber) {
  const std::string file = out_ / "plan.toml", csv = out_ / "arms.csv";
  std::ofstream(file) << Head("run = \"" + (*runs_ / "calm") + "\"\n") +
                             Arm("planted, \\\"x30\\\"", "\"lr:scale=30@3\"") +
                             Arm("burnt", "\"lr:constant=1e30@3\"");
  const Finished ran =
      RunProgram({"experiment", file, "--out", Out(), "--csv", csv, "--color", "never"});
  ASSERT_EQ(0, ran.code) << ran.err;
  std::istringstream lines(ran.out);
  std::string line;
  std::getline(lines, line);
  EXPECT_NE(std::string::npos, line.find("verdict (this exact trajectory)")) << line;
  const size_t strip = line.find("  0 ") + 2;
  for (const auto& [arm, replicas] : {std::pair("control", 12), std::pair("planted", 6)}) {
    std::getline(lines, line);
    EXPECT_EQ(0u, line.find(arm)) << line;
    int marks = 0;
    for (size_t at = strip; at < line.find("  ", strip); ++at) {
      if (line.compare(at, 3, "●") == 0) ++marks;
      if (line[at] >= '2' && line[at] <= '9') marks += line[at] - '0';
      if (line[at] == '+') marks += 12;  // ten or more
    }
    EXPECT_EQ(replicas, marks) << line;
  }
  std::getline(lines, line);
  EXPECT_NE(std::string::npos, line.find("6∞")) << line;
  EXPECT_NE(std::string::npos, line.find("worsens")) << line;
  const std::string text = ReadFileText(csv);
  EXPECT_EQ(1 + 12 + 6 + 6, std::count(text.begin(), text.end(), '\n'));
  EXPECT_NE(std::string::npos, text.find("\n\"planted, \"\"x30\"\"\",1,")) << text;
  const Finished again =
      RunProgram({"experiment", file, "--out", Out(), "--json", "--only", "burnt"});
  const nlohmann::json json = nlohmann::json::parse(again.out);
  EXPECT_EQ(0, json["replicas_run"]);
  EXPECT_EQ(2u, json["arms"].size());
  EXPECT_EQ("inf", json["arms"][1]["replicas"][0]["jump"]);
  const Finished dry = RunProgram({"experiment", file, "--dry-run", "--json"});
  EXPECT_EQ(5 + 24 * 5, nlohmann::json::parse(dry.out)["updates_at_most"]);
}

TEST_F(Experiment, BadCommandLinesEndBeforeAnythingRuns) {
  const std::string file = out_ / "plan.toml";
  std::ofstream(file) << Head() + Arm("a", "");
  const auto fails = [&](int code, const std::string& expected, std::vector<std::string> words) {
    words.insert(words.begin(), "experiment");
    const Finished ran = RunProgram(words);
    EXPECT_EQ(code, ran.code) << ran.err;
    EXPECT_NE(std::string::npos, ran.err.find(expected)) << ran.err;
  };
  const std::string run = *runs_ / "calm";
  fails(2, "RUN on the command line", {file});
  fails(2, "no ledger.jsonl", {file, out_.path()});
  fails(2, "can not be opened", {out_ / "none.toml", run});
  fails(2, "at most 1 MiB", {"/dev/zero", run});
  fails(2, "the nearest is 'a'", {file, run, "--only", "aa"});
  fails(5, "can not be written", {file, run, "--out", Out(), "--csv", out_ / "none/x.csv"});
  EXPECT_FALSE(std::filesystem::exists(Out()));
}

TEST_F(Experiment, TwoAtATimeAreRefused) {
  const Result<std::unique_ptr<ReplicaLog>> log = ReplicaLog::Open(Out());
  ASSERT_TRUE(log.ok());
  const Status status = Run("calm", PlanOf(Head() + Arm("a", ""))).status();
  EXPECT_NE(std::string::npos, status.message().find("another process")) << status.message();
}

TEST_F(Experiment, ADamagedLogIsNamedByLine) {
  std::filesystem::create_directories(Out());
  std::ofstream(Out() + "/replicas.jsonl") << "{\"key\":1}\n";
  const Status status = Run("calm", PlanOf(Head() + Arm("a", ""))).status();
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_NE(std::string::npos, status.message().find("replicas.jsonl:1:")) << status.message();
}

TEST_F(Experiment, APlanThatDoesNotFitTheRunIsRefusedBeforeAnythingRuns) {
  const auto error = [&](const std::string& toml, const ExperimentOptions& options) {
    return Run("calm", PlanOf(toml), options).status().message();
  };
  EXPECT_NE(std::string::npos,
            error("steps = \"2..9\"\n" + Arm("a", ""), {}).find("has updates 1..6"));
  const std::string glob = error(Head() + Arm("a", "\"scale:2,only=model.layers.9.*\""), {});
  EXPECT_NE(std::string::npos, glob.find("plan.toml:4:")) << glob;
  EXPECT_NE(std::string::npos, glob.find("arm 'a'")) << glob;
  const std::string samples = error(Head() + Arm("a", "\"skip-batch:count=1000000@3\""), {});
  EXPECT_NE(std::string::npos, samples.find("arm 'a': update 3 would consume sample")) << samples;
  ExperimentOptions options;
  options.only = {"plantd"};
  EXPECT_NE(std::string::npos,
            error(Head() + Arm("planted", ""), options).find("the nearest is 'planted'"));
  EXPECT_FALSE(std::filesystem::exists(Out()));
}

// ---- Over seeds ----

class SeedExperiment : public Experiment {
 protected:
  // Beside a recipe of its own.
  std::string WriteFile(const std::string& arms) {
    std::ofstream(out_ / "recipe.toml") << PrintRecipe(Calm());
    std::ofstream(out_ / "seeds.toml")
        << "recipe = \"recipe.toml\"\nset = [\"optimizer.eps=1e-7\"]\nsteps = \"1..5\"\n"
           "threshold = 0.5\nseeds = [1, 2, 3, 4, 5]\n" +
               arms;
    return out_ / "seeds.toml";
  }
  static std::string SetArm(const std::string& name, const std::string& set) {
    return "[[arm]]\nname = \"" + name + "\"\nset = [" + set + "]\n";
  }
};

TEST_F(SeedExperiment, RecipesAreComparedOverSeeds) {
  const std::string file = WriteFile(SetArm("rough", "\"schedule.peak=1.0\"") +
                                     SetArm("same", "\"optimizer.eps=1e-7\""));
  const ExperimentPlan plan = LoadExperiment(file).value();
  ExperimentOptions options;
  options.out = Out();
  options.jobs = 2;
  const Result<ExperimentResult> result = RunExperiment(nullptr, plan, options);
  ASSERT_TRUE(result.ok()) << result.status().message();
  EXPECT_STREQ("this recipe", ScopeOf(plan, *result));
  EXPECT_EQ(10, result->replicas_run) << "an arm with the same recipe is the control";
  EXPECT_STREQ("worsens", VerdictName(result->arms[1].verdict)) << result->arms[1].delta;
  EXPECT_STREQ("within noise", VerdictName(result->arms[2].verdict));
  EXPECT_EQ(StatesOf(result->arms[0]), StatesOf(result->arms[2]));
  const std::vector<Digest> states = StatesOf(result->arms[0]);
  EXPECT_EQ(5u, std::set<Digest>(states.begin(), states.end()).size());
  // A replica is the run that train would record.
  const RunReader replica = RunReader::Open(Out() + "/" + result->arms[1].replicas[2].dir).value();
  Recipe recipe = LoadRecipe(out_ / "recipe.toml", {"optimizer.eps=1e-7", "schedule.peak=1.0",
                                                    "init.seed=3", "data.seed=3"})
                      .value();
  EXPECT_EQ(PrintRecipe(recipe), replica.recipe_text());
  ASSERT_EQ("", RecordRun(recipe, out_ / "trained").message());
  EXPECT_EQ(RunReader::Open(out_ / "trained").value().history().Find(5)->digest,
            replica.history().Find(5)->digest);
  EXPECT_EQ(0, RunExperiment(nullptr, plan, options)->replicas_run);
}

TEST_F(SeedExperiment, ABadRecipeOfAnArmIsNamedBeforeAnythingRuns) {
  const std::string file = WriteFile(SetArm("x", "\"optimizer.ep=1\""));
  ExperimentOptions options;
  options.out = Out();
  const Status status = RunExperiment(nullptr, LoadExperiment(file).value(), options).status();
  EXPECT_EQ(StatusCode::kUsage, status.code());
  EXPECT_NE(std::string::npos, status.message().find("seeds.toml:6:")) << status.message();
  EXPECT_NE(std::string::npos, status.message().find("optimizer.eps")) << status.message();
  EXPECT_FALSE(std::filesystem::exists(Out()));
}

// ---- The file ----

TEST(ExperimentFile, BadFilesAreNamedByPlaceKeyAndExpectation) {
  const std::string arm = "[[arm]]\nname = \"a\"\ndo = [\"clip:none\"]\n";
  const std::string seeds = "recipe = \"r\"\nsteps = \"1..9\"\n";
  const std::string set = "[[arm]]\nname = \"a\"\nset = []\n";
  const std::vector<std::pair<std::string, std::string>> kBad = {
      {"", "steps: expected"},
      {"steps = \"5..2\"\n" + arm, "got \"5..2\""},
      {"steps = \"1..9\"\nhorizn = 3\n" + arm,
       "f:2:1: unknown key 'horizn'; the nearest is 'horizon'"},
      {"steps = \"1..9\"\nhorizon = 10\n" + arm,
       "f:2:11: horizon: expected a whole number in 2 .. 9"},
      {"steps = \"1..9\"\nsigma = 2.0\n" + arm, "sigma: expected \"auto\""},
      {"steps = \"1..9\"\nsigma = nan\n" + arm, "sigma: expected \"auto\""},
      {"steps = \"1..9\"\nreplicas = 5\n" + arm, "in 6 .. 64"},
      {"steps = \"1..9\"\ncontrol_replicas = 11\n" + arm, "in 12 .. 64"},
      {"steps = \"1..9\"\nthreshold = 0\n" + arm, "threshold: expected nats"},
      {"steps = \"1..9\"\n", "[[arm]] tables"},
      {"steps = \"1..9\"\narm = []\n", "[[arm]] tables"},
      {"steps = \"1..9\"\narm = [1]\n", "[[arm]] tables"},
      {"steps = \"1..9\"\n" + arm + arm, "'a' is taken"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"control\"\ndo = []\n", "'control' is taken"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"\"\ndo = []\n", "name: expected text"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"b\"\n", "do: expected a list"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"b\"\ndo = [1]\n", "do: expected a list of texts"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"b\"\ndo = [\"clap:none\"]\n", "f:4:7: 'clap:none'"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"b\"\ndo = [\"clip:none@12\"]\n", "within the replayed"},
      {"steps = \"1..9\"\n[[arm]]\nname = \"b\"\ndoo = []\ndo = []\n", "the nearest is 'do'"},
      {"steps = \"1..9\"\nseeds = [1]\n" + arm,
       "f:2:1: seeds: belongs to an experiment over seeds"},
      {"steps = \"1..9\"\n" + set, "set: belongs to an experiment over seeds"},
      {"steps = \"1..9\"\n[[arm]]\nnmae = \"b\"\ndo = []\n",
       "f:3:1: unknown key 'nmae'; the nearest is 'name'"},
      {"step = \"1..9\"\n" + arm, "f:1:1: unknown key 'step'; the nearest is 'steps'"},
      {seeds + "seeds = [1, 2, 3, 4, 5]\n" + arm, "do: belongs to an experiment over one run"},
      {seeds + set, "seeds: expected a list of 5 to 64"},
      {seeds + "seeds = [1, 2, 3, 4]\n" + set, "seeds: expected a list of 5 to 64"},
      {seeds + "seeds = [1, 2, 3, 4, 4]\n" + set, "different whole numbers"},
      {seeds + "seeds = [1, 2, 3, 4, \"5\"]\n" + set, "different whole numbers"},
      {seeds + "seeds = [1, 2, 3, 4, 4294967296]\n" + set, "in 0 .. 4294967295"},
      {seeds + "seeds = [1, 2, 3, 4, 5]\nsigma = 0.1\n" + set,
       "f:4:1: sigma: belongs to an experiment over one run"},
      {seeds + "seeds = [1, 2, 3, 4, 5]\n[[arm]]\nname = \"a\"\nset = []\ndo = []\n",
       "do: belongs to an experiment over one run"},
      {"recipe = \"r\"\nsteps = \"2..9\"\nseeds = [1, 2, 3, 4, 5]\n" + set,
       "begin at the beginning"},
      {"steps = ", "not TOML"},
      {std::string(5000, '.'), "4096 dots"},
  };
  for (const auto& [text, expected] : kBad) {
    const Result<ExperimentPlan> plan = ParseExperiment(text, "f");
    ASSERT_FALSE(plan.ok()) << text;
    EXPECT_EQ(StatusCode::kUsage, plan.status().code());
    EXPECT_NE(std::string::npos, plan.status().message().find(expected))
        << text << ": " << plan.status().message();
  }
}

TEST(ExperimentFile, SeedsThatCouldNotDecideAnythingAreRefused) {
  std::string text = "recipe = \"r\"\nsteps = \"1..9\"\nseeds = [1, 2, 3, 4, 5]\n";
  for (int arm = 1; arm <= 4; ++arm) {
    text += "[[arm]]\nname = \"" + std::to_string(arm) + "\"\nset = []\n";
  }
  EXPECT_TRUE(ParseExperiment(text, "f").ok()) << "12 / binomial(10, 5) = 0.0476";
  text += "[[arm]]\nname = \"5\"\nset = []\n";
  const Status status = ParseExperiment(text, "f").status();
  EXPECT_NE(std::string::npos, status.message().find("0.060 after Holm")) << status.message();
}

TEST(ExperimentFile, TheShippedOnesAreRead) {
  const std::string examples = SourceDir() + "/examples/";
  for (const char* name : {"five_hypotheses.toml", "seed_report.toml"}) {
    const Result<ExperimentPlan> plan = LoadExperiment(examples + name);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    if (!plan->over_seeds()) continue;
    for (const ExperimentArm& arm : plan->arms) {
      const Result<Recipe> recipe = LoadRecipe(plan->recipe, arm.overrides);
      EXPECT_TRUE(recipe.ok()) << recipe.status().message();
    }
  }
}

// ---- Judging alone ----

ArmResult ArmOf(const std::vector<double>& jumps) {
  ArmResult arm;
  for (double jump : jumps) {
    arm.replicas.push_back({.losses = {9, 8, 8 + jump}, .halted = false, .state = {}, .dir = {}});
  }
  return arm;
}

constexpr JudgePlan kJudgePlan = {.first_position = 3, .threshold = 0.5, .other_arms = 1};

std::string VerdictOn(const std::vector<double>& arm) {
  std::vector<ArmResult> arms = {
      ArmOf({1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1}), ArmOf(arm)};
  Judge(kJudgePlan, &arms);
  return VerdictName(arms[1].verdict);
}

TEST(Judge, SaysWhatTheEnsemblesSay) {
  EXPECT_EQ("removes", VerdictOn({0.1, 0.2, 0.3, 0.4, 0.0, 0.5}));
  EXPECT_EQ("shrinks", VerdictOn({0.1, 0.2, 0.3, 0.4, 0.0, 0.6})) << "one replica still spikes";
  EXPECT_EQ("worsens", VerdictOn({3, 4, 5, 6, 7, kInfinity}));
  EXPECT_EQ("within noise", VerdictOn({1.05, 1.25, 1.45, 1.65, 1.85, 2.05}));
  EXPECT_EQ("within noise", VerdictOn({2.0, 1.9, 1.91, 1.92, 1.93, 1.94}))
      << "beyond chance, but smaller than what counts as an effect";
}

TEST(Judge, ALaterSpikeOfTheSameHeightIsADelay) {
  std::vector<ArmResult> arms(2);
  for (int i = 0; i < 12; ++i) {
    const double late = 9.35 + 0.2 * i;
    arms[0].replicas.push_back(
        {.losses = {9, 8, 9.5 + 0.1 * i, 7, 7, 7}, .halted = false, .state = {}, .dir = {}});
    if (i < 6) {
      arms[1].replicas.push_back(
          {.losses = {9, 8, 7.9, 7.8, 7.8, late}, .halted = false, .state = {}, .dir = {}});
    }
  }
  Judge(kJudgePlan, &arms);
  EXPECT_STREQ("delays", VerdictName(arms[1].verdict));
  EXPECT_EQ(5, arms[0].spikes[0]) << "RUN@5 is the third state from RUN@3";
  EXPECT_EQ(8, arms[1].spikes[0]);
  EXPECT_EQ(arms[1].p_later, arms[1].tested());
}

TEST(Judge, WithoutAnEffectAtLeastNineteenOfTwentyArmsAreWithinNoise) {
  int within = 0, arms_judged = 0;
  for (uint64_t trial = 0; trial < 50; ++trial) {
    std::vector<ArmResult> arms;
    for (uint64_t a = 0; a < 5; ++a) {
      std::vector<double> jumps;
      const RandomStream random = MakeRandomStream(trial, 98, a);
      for (int i = 0; i < (a == 0 ? 12 : 6); ++i) {
        jumps.push_back(std::exp(RandomNormal(random, i)));
      }
      arms.push_back(ArmOf(jumps));
    }
    Judge({.first_position = 3, .threshold = 0.5, .other_arms = 4}, &arms);
    for (size_t a = 1; a < arms.size(); ++a, ++arms_judged) {
      within += arms[a].verdict == Verdict::kWithinNoise ? 1 : 0;
    }
  }
  EXPECT_EQ(200, arms_judged);
  EXPECT_GE(within, 190);
}

TEST(Judge, TheLeastProbabilityIsThatOfArmsWhollyApart) {
  EXPECT_EQ(3 * ProbabilityBelow({1, 2, 3, 4, 5}, {6, 7, 8, 9, 10, 11}), LeastAdjusted(5, 6, 1));
  EXPECT_EQ(1, LeastAdjusted(1, 2, 9));
}

}  // namespace
}  // namespace retrace
