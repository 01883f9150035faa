// The searches of bisect as their user runs them.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "tests/recorded_run.h"
#include "tests/spiking_run.h"

namespace retrace {
namespace {

constexpr char kNorm[] = "model.norm.weight";

class BisectCommand : public SpikingRuns {
 protected:
  static void SetUpTestSuite() {
    SpikingRuns::SetUpTestSuite();
    MakeRun("late", 1, {"lr:scale=300@4"});
    MakeRun("moment", 4, {"perturb:sigma=0.0001,seed=77@4",
                          "scale-moments:m=1000,only=" + std::string(kNorm) + "@4"});
  }
  std::vector<std::string> Words(const std::string& run, const std::vector<std::string>& more) {
    std::vector<std::string> words = {"bisect", *runs_ / run, "--predicate", "jump > 1",
                                      "--sigma", "1e-5", "--replicas", "6", "--jobs", "2",
                                      "--out", out_ / "out"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  std::string Refused(const std::string& run, const std::vector<std::string>& more, int code = 2) {
    const Finished done = RunProgram(Words(run, more));
    EXPECT_EQ(code, done.code) << done.out << done.err;
    return done.err;
  }
};

TEST_F(BisectCommand, ThePointOfNoReturnIsPrintedAndTheSameAsJson) {
  const std::vector<std::string> spike = {"--spike", "--do", "lr:scale=0.0033333333"};
  const Finished text = RunProgram(Words("late", spike));
  ASSERT_EQ(0, text.code) << text.err;
  EXPECT_TRUE(Contains(text.out, "The point of no return is update 4")) << text.out;
  EXPECT_TRUE(Contains(text.err, "At most 4 probes")) << text.err;
  std::vector<std::string> as_json = spike;
  as_json.push_back("--json");
  const Json json = ParseJson(RunProgram(Words("late", as_json)));
  EXPECT_EQ(4, json["last_prevented"]);
  EXPECT_EQ(5, json["first_not_prevented"]);
  EXPECT_EQ(5, json["spike"]);
  EXPECT_EQ(0, json["updates_lived"]) << "all is found in --out";
  EXPECT_EQ("this exact trajectory", json["scope"]) << "given noise was not examined";
}

TEST_F(BisectCommand, ThePlantedCauseIsPrintedAndTheSameAsJson) {
  const std::vector<std::string> cause = {"--cause", "--healthy", *runs_ / "calm", "--at", "4"};
  const Finished text = RunProgram(Words("moment", cause));
  ASSERT_EQ(0, text.code) << text.err;
  EXPECT_TRUE(Contains(text.out, "m of " + std::string(kNorm))) << text.out;
  EXPECT_TRUE(Contains(text.out, "Confirmed")) << text.out;
  std::vector<std::string> as_json = cause;
  as_json.push_back("--json");
  const Json json = ParseJson(RunProgram(Words("moment", as_json)));
  ASSERT_EQ(1u, json["members"].size());
  EXPECT_EQ("m", json["members"][0]["component"]);
  EXPECT_EQ(kNorm, json["members"][0]["glob"]);
  EXPECT_EQ(true, json["confirmed"]);
  EXPECT_EQ(0, json["updates_lived"]);
}

TEST_F(BisectCommand, ABudgetEndsWithTheBestSoFarAndADryRunLivesNothing) {
  const Finished ended = RunProgram(Words(
      "moment", {"--cause", "--healthy", *runs_ / "calm", "--at", "4", "--budget", "80"}));
  EXPECT_EQ(1, ended.code) << ended.err;
  EXPECT_TRUE(Contains(ended.out, "The best so far")) << ended.out;
  const Finished dry = RunProgram(Words(
      "late", {"--spike", "--do", "clip:none", "--dry-run"}));
  EXPECT_EQ(0, dry.code) << dry.err;
  EXPECT_TRUE(Contains(dry.out, "update 5 is the first")) << dry.out;
}

// A stop at the first replica that is finished: what is known is printed, and nothing is repeated.
TEST_F(BisectCommand, AfterAStopTheSameCommandGoesOn) {
  std::vector<std::string> words = Words("moment", {"--cause", "--healthy", *runs_ / "calm", "--at",
                                                    "4", "--json", "--quiet"});
  std::vector<std::string> program = words;
  program.insert(program.begin(), ProgramPath());
  Process stopped(program, out_ / "stopped");
  const std::string log = out_ / "out/replicas.jsonl";
  const auto lines = [&] {
    const std::string text = ReadFileText(log);
    return std::count(text.begin(), text.end(), '\n');
  };
  while (lines() < 4) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  stopped.Signal(SIGINT);
  const Finished end = stopped.Wait();
  if (end.code == 0) GTEST_SKIP() << "the search was over before the signal came";
  EXPECT_EQ(1, end.code) << end.err;
  EXPECT_TRUE(Contains(end.err, "stopped")) << end.err;
  EXPECT_EQ(false, ParseJson(end)["complete"]);
  const int64_t kept = lines();
  const Json rest = ParseJson(RunProgram(words));
  EXPECT_EQ(true, rest["complete"]);
  EXPECT_EQ(true, rest["confirmed"]);
  EXPECT_GE(rest["replicas_found"].get<int64_t>(), kept - 1) << "all but the control's proof";
}

TEST_F(BisectCommand, WrongWordsAreRefusedWithWhatIsRight) {
  EXPECT_TRUE(Contains(Refused("late", {}), "--spike"));
  EXPECT_TRUE(Contains(Refused("late", {"--spike"}), "--do"));
  EXPECT_TRUE(Contains(Refused("late", {"--spike", "--do", "clip:none@4"}), "no date"));
  EXPECT_TRUE(Contains(Refused("late", {"--spike", "--do", "clp:none"}), "the nearest is 'clip'"));
  EXPECT_TRUE(Contains(Refused("calm", {"--spike", "--do", "clip:none"}), "no update of 1..8 has"));
  EXPECT_TRUE(Contains(Refused("late", {"--spike", "--do", "clip:none", "--steps", "2..9"}),
                       "updates 1..8"));
  EXPECT_TRUE(Contains(Refused("late", {"--spike", "--do", "freeze:only=nothing"}), "nothing"));
  EXPECT_TRUE(Contains(Refused("late", {"--cause", "--components", "w,q"}), "expected some of"));
  EXPECT_TRUE(Contains(Refused("late", {"--cause", "--at", "5"}), "--at 5"));
  EXPECT_TRUE(Contains(Refused("late", {"--cause", "--healthy", *runs_ / "none"}),
                       "expected a run directory"));
  EXPECT_TRUE(Contains(Refused("late", {"--cause", "--healthy", "a,b"}), "comma"));
  const Finished predicate = RunProgram(
      {"bisect", *runs_ / "late", "--spike", "--do", "clip:none", "--predicate", "los > 3"});
  EXPECT_EQ(2, predicate.code);
  EXPECT_TRUE(Contains(predicate.err, "the nearest is 'loss'")) << predicate.err;
}

}  // namespace
}  // namespace retrace
