// The flight recorder in a real recording: what is on disk, what stays, and that a resumed run
// decides as if it had never stopped.
#include "replay/flight_recorder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "core/recipe_toml.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "replay/verify.h"
#include "tests/places.h"
#include "tests/small_run.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int64_t kLast = 24;

Recipe RecipeWith(std::vector<std::string> more) {
  std::vector<std::string> overrides = {"data.path=" + TestData("dataset/tiny"),
                                        "steps=" + std::to_string(kLast), "store.window=[]",
                                        "store.keyframe_every=3"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides).value();
}

Status Record(const Recipe& recipe, TrainOptions options) {
  SoloComm comm;
  return Train(recipe, comm, {.tp = 1, .dp = 1, .threads = 1}, options).status();
}

class Flight : public testing::Test {
 protected:
  std::string dir() const { return temp_ / "run"; }

  static std::set<int64_t> Kept(const std::string& dir) {
    std::set<int64_t> kept;
    const RunReader run = RunReader::Open(dir).value();
    for (int64_t k = 0; k <= run.history().last_position(); ++k) {
      if (run.history().Find(k)->master) kept.insert(k);
    }
    return kept;
  }

  // Every kept state follows, and steps/ holds nothing else.
  static void ExpectFine(const std::string& dir) {
    const VerifyReport report = VerifyRun(dir, {}).value();
    EXPECT_TRUE(report.fine() && report.remarks.empty())
        << (report.fine() ? report.remarks[0] : report.damage[0].message);
    EXPECT_EQ(report.journals, report.walked);
  }

  TempDir temp_;
};

TEST_F(Flight, TheRingOnDiskHoldsTheLastStatesAndTheFirst) {
  const Status status = Record(RecipeWith({"store.flight.steps=5"}), {.run_dir = dir()});
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ((std::set<int64_t>{0, 18, 19, 20, 21, 22, 23, 24}), Kept(dir()));
  EXPECT_TRUE(RunReader::Open(dir()).value().history().keeps.empty());
  ExpectFine(dir());
}

TEST_F(Flight, ATouchedFileMakesTheRingStayWithWhatFollows) {
  TrainOptions options{.run_dir = dir()};
  options.updated = [&](const UpdateRecord& record, const Digest&) {
    if (record.update == 10) WriteFileText(dir() + "/" + kFireName, "");
  };
  std::vector<std::string> notices;
  options.notice = [&](const std::string& line) { notices.push_back(line); };
  const Status status =
      Record(RecipeWith({"store.flight.steps=5", "store.flight.after=2"}), options);
  ASSERT_TRUE(status.ok()) << status.message();
  const RunHistory history = RunReader::Open(dir()).value().history();
  ASSERT_EQ(1u, history.keeps.size());
  EXPECT_EQ("file", history.keeps[0].trigger);
  EXPECT_EQ(10, history.keeps[0].update);
  EXPECT_EQ(12, history.keeps[0].last);
  EXPECT_EQ((std::set<int64_t>{0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 18, 19, 20, 21, 22, 23, 24}),
            Kept(dir()));
  EXPECT_FALSE(std::filesystem::exists(dir() + "/" + kFireName));
  ASSERT_EQ(1u, notices.size());
  EXPECT_NE(std::string::npos, notices[0].find("states 3..12 stay")) << notices[0];
  ExpectFine(dir());
}

TEST_F(Flight, AfterSoManyFiringsNothingMoreStays) {
  TrainOptions options{.run_dir = dir()};
  options.fire = [] { return true; };
  ASSERT_TRUE(Record(RecipeWith({"store.flight.steps=2", "store.flight.firings_max=2",
                                 "store.flight.after=0"}),
                     options)
                  .ok());
  EXPECT_EQ(2u, RunReader::Open(dir()).value().history().keeps.size());
  EXPECT_EQ((std::set<int64_t>{0, 1, 21, 22, 23, 24}), Kept(dir()));
}

// The learning rate makes the loss of the tiny run jump.
std::vector<std::string> Spiking() {
  return {"schedule.peak=0.5", "schedule.warmup_steps=6", "store.flight.steps=4",
          "store.flight.after=3", "store.flight.loss_mads=2"};
}

TEST_F(Flight, ALossSpikeFiresAndAResumedRunDecidesTheSame) {
  ASSERT_TRUE(Record(RecipeWith(Spiking()), {.run_dir = dir()}).ok());
  const RunHistory whole = RunReader::Open(dir()).value().history();
  ASSERT_FALSE(whole.keeps.empty());
  EXPECT_EQ("loss", whole.keeps[0].trigger);
  for (int64_t k = whole.keeps[0].first; k <= whole.keeps[0].last && k <= kLast; ++k) {
    EXPECT_TRUE(whole.NearestKeyframe(k).has_value()) << k;
  }
  ExpectFine(dir());
  for (int64_t stop = 1; stop < kLast; stop += 2) {
    const std::string other = temp_ / ("stopped" + std::to_string(stop));
    ASSERT_TRUE(Record(RecipeWith(Spiking()), {.run_dir = other, .until = stop}).ok());
    ASSERT_TRUE(Record(RecipeWith(Spiking()), {.run_dir = other, .resume = true}).ok());
    EXPECT_EQ(whole.keeps, RunReader::Open(other).value().history().keeps) << stop;
    EXPECT_EQ(Kept(dir()), Kept(other)) << stop;
  }
}

TEST_F(Flight, ItsPolicyChangesNoBit) {
  const std::string plain = temp_ / "plain";
  ASSERT_TRUE(Record(RecipeWith(Spiking()), {.run_dir = dir()}).ok());
  std::vector<std::string> off = Spiking();
  off.push_back("store.flight.steps=0");
  ASSERT_TRUE(Record(RecipeWith(off), {.run_dir = plain}).ok());
  const RunHistory a = RunReader::Open(dir()).value().history();
  const RunHistory b = RunReader::Open(plain).value().history();
  for (int64_t k = 0; k <= kLast; ++k) EXPECT_EQ(a.Find(k)->digest, b.Find(k)->digest) << k;
}

TEST_F(Flight, AHaltLeavesTheRingAndSaysWhy) {
  const Status halted = Record(RecipeWith({"schedule.peak=1e25", "schedule.warmup_steps=0",
                                           "schedule.shape=constant", "store.flight.steps=4"}),
                               {.run_dir = dir()});
  ASSERT_EQ(StatusCode::kFailed, halted.code()) << halted.message();
  const RunHistory history = RunReader::Open(dir()).value().history();
  ASSERT_FALSE(history.keeps.empty());
  EXPECT_EQ("non_finite", history.keeps.back().trigger);
  EXPECT_EQ(history.last_position(), history.keeps.back().last);
  EXPECT_TRUE(history.NearestKeyframe(history.last_position()).has_value());
}

TEST_F(Flight, TheRecordHasTheUpdateRmsWhereItIsATrigger) {
  // AdamW's first quotient is g / (|g| + eps): 1 for every element with a gradient.
  ASSERT_TRUE(Record(RecipeWith({"store.flight.steps=2", "store.flight.update_rms=0.1",
                                 "schedule.indexing=step"}),
                     {.run_dir = dir()})
                  .ok());
  const RunHistory history = RunReader::Open(dir()).value().history();
  const UpdateRecord first = ParseRecord(history.Find(1)->record).value();
  ASSERT_TRUE(first.update_rms.has_value());
  EXPECT_GT(*first.update_rms, 0.5);
  EXPECT_LE(*first.update_rms, 1.0);
  ASSERT_FALSE(history.keeps.empty());
  EXPECT_EQ("update_rms", history.keeps[0].trigger);
}

}  // namespace
}  // namespace retrace
