// train and replay as their user runs them: killed, stopped, resumed, with dying and hanging ranks.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <thread>

#include <nlohmann/json.hpp>

#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int kUpdates = 40;

std::vector<std::string> TrainWords(const std::string& run, int updates = kUpdates) {
  return {"train", SourceDir() + "/examples/tiny.toml", "-o", run, "--set",
          "data.path=" + TestData("dataset/tiny"), "--set", "steps=" + std::to_string(updates),
          "--set", "store.window=[0, " + std::to_string(updates) + "]", "--threads", "1",
          "--quiet"};
}

std::vector<std::string> Program(std::vector<std::string> words) {
  words.insert(words.begin(), ProgramPath());
  return words;
}

std::vector<std::string> With(std::vector<std::string> words, const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// State digests by position, from the ledger; a torn last line is left out.
std::map<int64_t, std::string> StatesOf(const std::string& run) {
  std::map<int64_t, std::string> states;
  std::istringstream lines(ReadFileText(run + "/ledger.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_discarded() && json.contains("state")) states[json["k"]] = json["state"];
  }
  return states;
}

void SleepMilliseconds(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// Waits until the run has got to `position`; false after 60 s.
bool AwaitPosition(const std::string& run, int64_t position) {
  for (int i = 0; i < 6000; ++i) {
    const auto states = StatesOf(run);
    if (!states.empty() && states.rbegin()->first >= position) return true;
    SleepMilliseconds(10);
  }
  return false;
}

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::istringstream in(ReadFileText("/proc/" + std::to_string(pid) + "/task/" +
                                     std::to_string(pid) + "/children"));
  std::vector<pid_t> children;
  for (pid_t child; in >> child;) children.push_back(child);
  return children;
}

class Train : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    const Finished done = RunProgram(TrainWords(*folder_ / "whole"));
    ASSERT_EQ(0, done.code) << done.err;
    whole_ = StatesOf(*folder_ / "whole");
    ASSERT_EQ(size_t{kUpdates + 1}, whole_.size());
  }
  static void TearDownTestSuite() { delete folder_; }

  static TempFolder* folder_;
  static std::map<int64_t, std::string> whole_;  // of the uninterrupted run
};
TempFolder* Train::folder_ = nullptr;
std::map<int64_t, std::string> Train::whole_;

TEST_F(Train, KilledAtAnyMomentAndResumedGivesTheStatesOfTheUninterruptedRun) {
  const std::string run = *folder_ / "killed";
  int kills = 0;
  Finished done;
  for (int attempt = 0; attempt < 200; ++attempt) {
    const bool exists = std::filesystem::exists(run + "/ledger.jsonl");
    const std::vector<std::string> words =
        exists ? With({"train", "--resume", run, "--quiet", "--threads", "1"}, {"--tp", "2"})
               : With(TrainWords(run), {"--tp", "2"});
    Process process(Program(words), *folder_ / "log");
    SleepMilliseconds(40 + attempt * 37 % 230 + 10 * attempt);  // longer and longer: it ends on any machine
    process.Signal(SIGKILL);
    done = process.Wait();
    if (done.code == 0) break;
    ASSERT_EQ(SIGKILL, done.signal) << done.err;
    ++kills;
  }
  ASSERT_EQ(0, done.code) << done.err;
  EXPECT_GE(kills, 2);
  EXPECT_EQ(whole_, StatesOf(run));
}

TEST_F(Train, CtrlCStopsAtAnUpdateAndTheRunGoesOn) {
  const std::string run = *folder_ / "stopped";
  Process process(Program(With(TrainWords(run), {"--tp", "2"})), *folder_ / "log");
  ASSERT_TRUE(AwaitPosition(run, 3));
  process.Signal(SIGINT);
  const Finished stopped = process.Wait();
  EXPECT_EQ(0, stopped.code) << stopped.err;
  EXPECT_NE(std::string::npos, stopped.out.find("stopped at update")) << stopped.out;
  EXPECT_LT(StatesOf(run).rbegin()->first, kUpdates);
  const Finished resumed = RunProgram({"train", "--resume", run, "--quiet", "--tp", "4"});
  EXPECT_EQ(0, resumed.code) << resumed.err;
  EXPECT_EQ(whole_, StatesOf(run));
}

TEST_F(Train, ARankThatDiesEndsTheJobAndLeavesAResumableRun) {
  const std::string run = *folder_ / "died";
  Process process(Program(With(TrainWords(run), {"--tp", "2", "--dp", "2"})), *folder_ / "log");
  ASSERT_TRUE(AwaitPosition(run, 2));
  const std::vector<pid_t> children = ChildrenOf(process.pid());
  ASSERT_EQ(3u, children.size());
  kill(children[1], SIGKILL);
  const Finished died = process.Wait();
  EXPECT_EQ(5, died.code);
  EXPECT_NE(std::string::npos, died.err.find("rank 2")) << died.err;
  for (pid_t child : children) EXPECT_NE(0, kill(child, 0)) << "rank " << child << " lives on";
  const Finished resumed = RunProgram({"train", "--resume", run, "--quiet", "--threads", "1"});
  EXPECT_EQ(0, resumed.code) << resumed.err;
  EXPECT_EQ(whole_, StatesOf(run));
}

TEST_F(Train, ARankThatHangsEndsTheJobWithinTheTimeLimit) {
  const std::string run = *folder_ / "hung";
  Process process(Program(With(TrainWords(run), {"--tp", "2", "--timeout", "1"})),
                  *folder_ / "log");
  ASSERT_TRUE(AwaitPosition(run, 2));
  const std::vector<pid_t> children = ChildrenOf(process.pid());
  ASSERT_EQ(1u, children.size());
  kill(children[0], SIGSTOP);
  const Finished hung = process.Wait();
  EXPECT_EQ(5, hung.code);
  EXPECT_NE(std::string::npos, hung.err.find("update")) << hung.err;
  const Finished resumed = RunProgram({"train", "--resume", run, "--quiet", "--threads", "1"});
  EXPECT_EQ(0, resumed.code) << resumed.err;
  EXPECT_EQ(whole_, StatesOf(run));
}

TEST_F(Train, ResumeGoesBackBeyondDamageAndMendsIt) {
  const std::string run = *folder_ / "damaged";
  ASSERT_EQ(0, RunProgram(With(TrainWords(run), {"--until", "15", "--tp", "2"})).code);
  // Keyframes are 0, 4, 8 and 12: of what leads to 15, nothing before 8 and its journals is whole.
  for (const auto& file : std::filesystem::directory_iterator(run + "/steps")) {
    const std::string name = file.path().filename();
    if (name.starts_with("000000012.")) std::filesystem::remove(file.path());
    if (name.starts_with("000000011.") && name.find(".r0001.") != std::string::npos) {
      std::filesystem::resize_file(file.path(), 1000);
    }
  }
  EXPECT_EQ(3, RunProgram({"verify", run}).code);
  const Finished resumed = RunProgram({"train", "--resume", run, "--tp", "2", "--threads", "1"});
  EXPECT_EQ(0, resumed.code) << resumed.err;
  EXPECT_NE(std::string::npos, resumed.err.find("going on from " + run + "@10")) << resumed.err;
  EXPECT_EQ(whole_, StatesOf(run));
  const Finished verified = RunProgram({"verify", run});
  EXPECT_EQ(0, verified.code) << verified.out;
}

TEST_F(Train, ReplayFromEveryKeptStateIsIdenticalOnAnyRanks) {
  const std::string run = *folder_ / "whole";
  for (int first = 1; first <= 10; ++first) {
    const Finished done = RunProgram({"replay", run, "--steps", std::to_string(first) + ".." +
                                          std::to_string(first + 1),
                                      "--tp", std::to_string(1 << first % 4), "--threads", "1",
                                      "--json", "--quiet"});
    ASSERT_EQ(0, done.code) << done.err;
    EXPECT_TRUE(nlohmann::json::parse(done.out)["identical"]);
  }
}

TEST_F(Train, ABranchReplaysAndItsParentStaysAsItWas) {
  const std::string run = *folder_ / "whole", branch = *folder_ / "branch";
  const Finished made = RunProgram({"replay", run, "--steps", "4..9", "--do", "clip:none@5..7",
                                    "--do", "reset-moments:v,t=keep@6", "--out", branch, "--quiet"});
  ASSERT_EQ(0, made.code) << made.err;
  const auto states = StatesOf(branch);
  EXPECT_EQ(whole_[3], states.at(3));
  EXPECT_EQ(whole_[4], states.at(4));  // nothing is in force yet
  EXPECT_NE(whole_[5], states.at(5));
  EXPECT_EQ(whole_, StatesOf(run));
  const Finished again = RunProgram({"replay", branch, "--tp", "2", "--quiet"});
  EXPECT_EQ(0, again.code) << again.out << again.err;
  const Finished part = RunProgram({"replay", branch, "--steps", "7..9", "--quiet"});
  EXPECT_EQ(0, part.code) << part.out << part.err;
}

TEST_F(Train, AChangedTokenOfTheDatasetShowsInTheReplay) {
  const std::string data = *folder_ / "data", run = *folder_ / "changed";
  for (const char* suffix : {".bin", ".idx"}) {
    std::filesystem::copy_file(TestData(std::string("dataset/tiny") + suffix), data + suffix);
  }
  std::vector<std::string> words = TrainWords(run, 6);
  words[5] = "data.path=" + data;
  ASSERT_EQ(0, RunProgram(words).code);
  std::string tokens = ReadFileText(data + ".bin");
  for (size_t i = 0; i < tokens.size(); i += 2) tokens[i] ^= 1;
  std::ofstream(data + ".bin", std::ios::binary) << tokens;
  const Finished replayed = RunProgram({"replay", run, "--quiet"});
  EXPECT_EQ(1, replayed.code) << replayed.err;
  EXPECT_NE(std::string::npos, replayed.out.find("tokens  expected")) << replayed.out;
}

TEST_F(Train, ANonFiniteValueHaltsBeforeTheUpdateAndLeavesAStateThatReplayOpens) {
  const std::string run = *folder_ / "halted";
  const Finished halted = RunProgram(With(
      TrainWords(run), {"--set", "schedule.peak=1e25", "--set", "schedule.warmup_steps=0",
                        "--set", "schedule.shape=constant", "--set", "store.window=[0, 0]"}));
  EXPECT_EQ(5, halted.code);
  EXPECT_NE(std::string::npos, halted.err.find("halted before it changed anything")) << halted.err;
  EXPECT_NE(std::string::npos, halted.err.find("mb0/")) << halted.err;
  const int64_t last = StatesOf(run).rbegin()->first;
  EXPECT_NE(std::string::npos, halted.err.find(run + "@" + std::to_string(last))) << halted.err;
  const Finished replayed =
      RunProgram({"replay", run, "--steps", "1.." + std::to_string(last), "--quiet"});
  EXPECT_EQ(0, replayed.code) << replayed.out << replayed.err;
  const Finished resumed = RunProgram({"train", "--resume", run, "--quiet"});
  EXPECT_EQ(5, resumed.code);
  const Finished branch =
      RunProgram({"replay", run, "--steps", std::to_string(last) + ".." + std::to_string(last + 1),
                  "--do", "lr:constant=0.001", "--out", *folder_ / "rescued", "--quiet"});
  EXPECT_EQ(0, branch.code) << branch.err;
}

TEST_F(Train, BadWordsGetAMessageAndExitCodeTwo) {
  const std::string run = *folder_ / "whole", none = *folder_ / "none";
  const std::string tiny = SourceDir() + "/examples/tiny.toml";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"train"}, "expected a recipe"},
      {{"train", tiny}, "-o DIR"},
      {{"train", none + ".toml", "-o", none}, "none.toml"},
      {{"train", tiny, "-o", none, "--set", "model.vocab_sze=3"}, "model.vocab_size"},
      {{"train", tiny, "-o", none, "--tp", "3"}, "virtual_shards"},
      {{"train", tiny, "-o", run, "--set", "data.path=" + TestData("dataset/tiny")}, run},
      {{"train", "--resume", none}, none},
      {{"replay", none}, none},
      {{"replay", run, "--steps", "9..3"}, "A..B"},
      {{"replay", run, "--out", none}, "--out requires --do"},
      {{"replay", run, "--keep", "records"}, "--keep requires --do"},
      {{"replay", run, "--steps", "3..41", "--do", "clip:none", "--out", none},
       "update 41 would consume sample"},
      {{"replay", run, "--steps", "1..999"}, "1..40"},
      {{"replay", run, "--do", "clop:none", "--out", none}, "'clip'"},
      {{"replay", run, "--do", "clip:-1", "--out", none}, "above 0"},
      {{"replay", run, "--do", "clip:none@50", "--out", none}, "1..40"},
      {{"replay", run, "--do", "reset-moments:v", "--out", none}, "t: Adam's step counter"},
      {{"replay", run, "--do", "init:hf,only=model.layrs.*", "--out", none}, "no tensor matches"},
  };
  for (const auto& [words, expected] : cases) {
    const Finished done = RunProgram(words);
    EXPECT_EQ(2, done.code) << words.back();
    EXPECT_NE(std::string::npos, done.err.find(expected)) << done.err;
  }
  EXPECT_FALSE(std::filesystem::exists(none));
}

}  // namespace
}  // namespace retrace
