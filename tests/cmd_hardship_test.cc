// The program in hardship: too little memory, things in a run directory that are no files, names of
// runs that look like addresses. It ends, says why, and leaves nothing half-made.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> TrainWords(const std::string& run) {
  return {"train",     SourceDir() + "/examples/tiny.toml",
          "-o",        run,
          "--set",     "data.path=" + TestData("dataset/tiny"),
          "--threads", "1",
          "--until",   "2",
          "-q"};
}

std::vector<std::string> With(std::vector<std::string> words,
                              const std::vector<std::string>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

void ExpectEnd(int code, const std::string& text, const Finished& done) {
  EXPECT_EQ(code, done.code) << done.err << " signal " << done.signal;
  EXPECT_NE(std::string::npos, (done.out + done.err).find(text)) << done.out << done.err;
}

class Hardship : public testing::Test {
 protected:
  void Record(const std::string& run) {
    const Finished done = RunProgram(TrainWords(run));
    ASSERT_EQ(0, done.code) << done.err;
  }

  TempFolder folder_;
};

TEST_F(Hardship, ARecipeThatIsTooLargeForTheMachineIsRefusedBeforeARunIsMade) {
  std::vector<std::string> words =
      With(TrainWords(folder_ / "run"), {"--set", "data.micro_batch_size=65536"});
  for (const std::vector<std::string>& ranks : {std::vector<std::string>{}, {"--tp", "2"}}) {
    std::string line = "ulimit -v 4000000; exec '" + ProgramPath() + "'";
    for (const std::string& word : With(words, ranks)) line += " '" + word + "'";
    ExpectEnd(4, "of memory on one host", Process({"/bin/sh", "-c", line}, folder_ / "log").Wait());
    EXPECT_FALSE(fs::exists(folder_ / "run"));
  }
}

TEST_F(Hardship, APipeInARunDirectoryIsDamageAndNoWait) {
  const std::string run = folder_ / "run";
  for (const char* name : {"ledger.jsonl", "recipe.toml", "steps/000000000.a0001.r0000.h5"}) {
    fs::remove_all(run);
    Record(run);
    fs::remove(run + "/" + name);
    ASSERT_EQ(0, mkfifo((run + "/" + name).c_str(), 0600));
    ExpectEnd(3, name, RunProgram({"verify", run, "-q"}));
    ExpectEnd(3, name, RunProgram({"show", run + "@1", "-q"}));
    ExpectEnd(3, name, RunProgram({"train", "--resume", run, "-q"}));
  }
}

TEST_F(Hardship, WithoutItsStepsARunIsDamaged) {
  const std::string run = folder_ / "run";
  Record(run);
  fs::rename(run + "/steps", run + "/elsewhere");
  ExpectEnd(3, "missing", RunProgram({"verify", run}));
  ExpectEnd(3, "steps", RunProgram({"train", "--resume", run}));
  fs::copy_file(run + "/recipe.toml", run + "/steps");
  ExpectEnd(3, "missing", RunProgram({"verify", run}));
  ExpectEnd(3, "steps", RunProgram({"train", "--resume", run}));
  fs::remove(run + "/steps");
  fs::rename(run + "/elsewhere", run + "/steps");
  ExpectEnd(0, "all is fine", RunProgram({"verify", run}));
}

TEST_F(Hardship, ARunMayHaveAnAtInItsName) {
  const std::string run = folder_ / "me@home";
  Record(run);
  ExpectEnd(0, "tiny", RunProgram({"show", run}));
  ExpectEnd(0, "data_cursor", RunProgram({"show", run + "@1"}));
  ExpectEnd(0, "identical", RunProgram({"diff", run, run}));
  ExpectEnd(2, "expected RUN", RunProgram({"show", folder_ / "me@work"}));
}

TEST_F(Hardship, ABranchOfTheRunHereLiesBesideIt) {
  const std::string run = folder_ / "run";
  Record(run);
  const std::string line = "cd '" + run + "' && '" + ProgramPath() +
                           "' replay . --steps 1..1 --do clip:none --threads 1 -q";
  ExpectEnd(0, "run-clip is a branch", Process({"/bin/sh", "-c", line}, folder_ / "log").Wait());
  EXPECT_TRUE(fs::exists(run + "-clip/ledger.jsonl"));
}

TEST_F(Hardship, AFileIsNoDirectoryForARun) {
  const std::string file = folder_ / "file";
  fs::copy_file(TestData("dataset/tiny.idx"), file);
  ExpectEnd(2, "expected a directory", RunProgram(TrainWords(file)));
}

TEST_F(Hardship, RangesOfUpdatesAreReadStrictly) {
  const std::string run = folder_ / "run";
  Record(run);
  for (const char* bad : {"1", "1..", "..2", "1...2", "1.. 2", " 1..2", "+1..2", "0..1", "2..1",
                          "-1..2", "1..2x", "1..99999999999999999999", "a..b"}) {
    ExpectEnd(2, "expected A..B", RunProgram({"log", run, "--steps", bad}));
    ExpectEnd(2, "expected A..B", RunProgram({"replay", run, "--steps", bad}));
  }
  ExpectEnd(0, "update", RunProgram({"log", run, "--steps", "1..2"}));
}

}  // namespace
}  // namespace retrace
