// densify, prune, pack, du, fsck, repair and the flight recorder, as their user runs them.
#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "formats/run_dir.h"
#include "formats/step_file.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr int64_t kLast = 16;

std::vector<std::string> TrainWords(const std::string& run, const std::vector<std::string>& sets) {
  std::vector<std::string> words = {"train",
                                    SourceDir() + "/examples/tiny.toml",
                                    "-o",
                                    run,
                                    "--quiet",
                                    "--threads",
                                    "1",
                                    "--set",
                                    "data.path=" + TestData("dataset/tiny"),
                                    "--set",
                                    "steps=" + std::to_string(kLast)};
  for (const std::string& set : sets) {
    words.push_back("--set");
    words.push_back(set);
  }
  return words;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void FlipMiddle(const std::string& path) {
  std::string text = ReadFileText(path);
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 4);
  std::ofstream(path, std::ios::binary) << text;
}

std::set<int64_t> Reachable(const std::string& run) {
  std::set<int64_t> reachable;
  const RunReader reader = RunReader::Open(run).value();
  const RunHistory& history = reader.history();
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    if (history.NearestKeyframe(k)) reachable.insert(k);
  }
  return reachable;
}

// A sparse run (0, 8, 16) that every test copies.
class Store : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    recorded_ = new TempFolder;
    const Finished done =
        RunProgram(TrainWords(*recorded_ / "run", {"store.window=[]", "store.every=8"}));
    ASSERT_EQ(0, done.code) << done.err;
  }
  static void TearDownTestSuite() { delete recorded_; }
  void SetUp() override { fs::copy(*recorded_ / "run", run_, fs::copy_options::recursive); }

  Finished Run(std::vector<std::string> words, int code = 0) {
    words.push_back("--quiet");
    const Finished done = RunProgram(std::move(words));
    EXPECT_EQ(code, done.code) << done.out << done.err;
    return done;
  }
  Json RunJson(std::vector<std::string> words, int code = 0) {
    words.push_back("--json");
    const Finished done = Run(std::move(words), code);
    const Json json = Json::parse(done.out, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << done.out << done.err;
    return json;
  }
  std::string RankFile(int64_t k) const {
    const RunReader reader = RunReader::Open(run_).value();
    return run_ + "/steps/" + reader.ReadIndex(k).value().files[0].name;
  }

  TempFolder folder_;
  const std::string run_ = folder_ / "run";
  static TempFolder* recorded_;
};
TempFolder* Store::recorded_ = nullptr;

TEST_F(Store, DensifyMakesEveryStateOfARangeAndVerifyProvesThem) {
  ASSERT_EQ((std::set<int64_t>{0, 8, 16}), Reachable(run_));
  const Json plan = RunJson({"densify", run_, "--steps", "4..9", "--dry-run"});
  EXPECT_EQ(Json({3, 7}), plan["keyframes"]);  // keyframe_every is 4
  EXPECT_EQ(Json({4, 5, 6, 9}), plan["journals"]);
  EXPECT_EQ(8, plan["updates"]);  // 1..7 from 0, then 9 from 8
  EXPECT_EQ((std::set<int64_t>{0, 8, 16}), Reachable(run_));
  Run({"densify", run_, "--steps", "4..9", "--tp", "2"});
  EXPECT_EQ((std::set<int64_t>{0, 3, 4, 5, 6, 7, 8, 9, 16}), Reachable(run_));
  const Json proof = RunJson({"verify", run_, "--replay", "4..9"});
  EXPECT_TRUE(proof["fine"]);
  EXPECT_EQ(proof["journals"], proof["walked"]);
  EXPECT_EQ(Json::array(), RunJson({"densify", run_, "--steps", "4..9"})["journals"]);
}

TEST_F(Store, DensifyOfAChangedDatasetStoresNothing) {
  const std::string data = folder_ / "data", changed = folder_ / "changed";
  for (const char* suffix : {".bin", ".idx"}) {
    fs::copy_file(TestData(std::string("dataset/tiny") + suffix), data + suffix);
  }
  ASSERT_EQ(0, RunProgram(TrainWords(changed, {"store.window=[]", "data.path=" + data})).code);
  std::string tokens = ReadFileText(data + ".bin");
  for (size_t i = 0; i < tokens.size(); i += 2) tokens[i] ^= 1;
  std::ofstream(data + ".bin", std::ios::binary) << tokens;
  const auto before = Reachable(changed);
  const Finished done = Run({"densify", changed, "--steps", "2..5"}, 3);
  EXPECT_TRUE(Contains(done.err, "replay parts from the recording")) << done.err;
  EXPECT_EQ(before, Reachable(changed));
}

TEST_F(Store, DensifyKilledGoesOnWhereItEnded) {
  int kills = 0;
  Finished done;
  for (int attempt = 0; attempt < 100; ++attempt) {
    Process process(
        {ProgramPath(), "densify", run_, "--steps", "1..16", "--threads", "1", "--quiet"},
        folder_ / "log");
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + 15 * attempt));
    process.Signal(SIGKILL);
    done = process.Wait();
    if (done.code == 0) break;
    ++kills;
    EXPECT_TRUE(RunJson({"fsck", run_, "--deep"})["fine"]);
  }
  ASSERT_EQ(0, done.code) << done.err;
  EXPECT_GE(kills, 1);
  EXPECT_EQ(size_t{kLast + 1}, Reachable(run_).size());
  EXPECT_TRUE(RunJson({"verify", run_})["fine"]);
}

TEST_F(Store, PruneKeepsWhatThePolicyKeepsAndWhatWasMadeToStay) {
  Run({"densify", run_, "--steps", "4..9"});
  const auto before = Reachable(run_);
  EXPECT_EQ(Json::array(), RunJson({"prune", run_})["positions"]);  // densified states stay
  const Json plan = RunJson({"prune", run_, "--window", "9..9", "--release-held", "--dry-run"});
  EXPECT_EQ(Json({3, 4, 5, 6, 7}), plan["positions"]);
  EXPECT_GT(plan["bytes"], 0);
  EXPECT_EQ(before, Reachable(run_));
  Run({"prune", run_, "--window", "9..9", "--release-held"});
  EXPECT_EQ((std::set<int64_t>{0, 8, 9, 16}), Reachable(run_));
  EXPECT_TRUE(RunJson({"verify", run_})["remarks"].empty());
  // A state in the middle of a segment keeps its way back.
  Run({"densify", run_, "--steps", "11..16"});
  Run({"prune", run_, "--window", "13..13", "--release-held"});
  const auto after = Reachable(run_);
  EXPECT_TRUE(after.contains(12) && after.contains(13) && after.contains(16));
  EXPECT_TRUE(RunJson({"verify", run_, "--replay", "13..13"})["replay"]["identical"]);
}

TEST_F(Store, PackMakesARunSmallerAndChangesNoBit) {
  const std::string ranks = folder_ / "ranks";
  std::vector<std::string> words =
      TrainWords(ranks, {"store.window=[0, 16]", "store.keyframe_every=4"});
  words.insert(words.end(), {"--tp", "4"});
  ASSERT_EQ(0, RunProgram(words).code);
  const double before = RunJson({"du", ranks})["total"];
  const Json plan = RunJson({"pack", ranks, "--dry-run"});
  EXPECT_EQ(kLast + 1, plan["replaced"]);
  EXPECT_EQ(before, RunJson({"du", ranks})["total"]);
  const Json packed = RunJson({"pack", ranks});
  EXPECT_EQ(plan["after_bytes"], packed["after_bytes"]);
  EXPECT_LT(RunJson({"du", ranks})["total"].get<double>(), before);
  const Json proof = RunJson({"verify", ranks});
  EXPECT_TRUE(proof["fine"]) << proof;
  EXPECT_TRUE(proof["remarks"].empty()) << proof;
  EXPECT_EQ(proof["journals"], proof["walked"]);
  EXPECT_EQ(0, RunJson({"pack", ranks})["replaced"]);  // once is enough
}

TEST_F(Store, DuAddsUpToWhatIsOnDisk) {
  Run({"densify", run_, "--steps", "4..9"});
  std::ofstream(run_ + "/steps/000000099.a0001.h5") << "left over";
  double files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(run_)) {
    if (entry.is_regular_file()) files += static_cast<double>(entry.file_size());
  }
  const Json use = RunJson({"du", run_});
  EXPECT_EQ(9, use["unnamed"]);
  EXPECT_NEAR(files, use["total"], 0.5 + static_cast<double>(fs::file_size(run_ + "/lock")));
  double kinds = 0, tensors = 0;
  for (const auto& [kind, bytes] : use["kinds"].items()) kinds += bytes.get<double>();
  for (const Json& tensor : use["tensors"]) {
    for (const auto& [kind, bytes] : tensor["kinds"].items()) tensors += bytes.get<double>();
  }
  EXPECT_NEAR(kinds, tensors, 2.0 * static_cast<double>(use["tensors"].size()));
  EXPECT_EQ(9u, use["steps"].size());
  for (const char* by : {"kind", "step", "tensor"}) {
    EXPECT_FALSE(Run({"du", run_, "--by", by, "--top", "3"}).out.empty());
  }
}

TEST_F(Store, FsckQuickSeesSizesAndDeepSeesEveryBit) {
  EXPECT_TRUE(RunJson({"fsck", run_})["fine"]);
  EXPECT_TRUE(RunJson({"fsck", run_, "--deep"})["fine"]);
  const std::string rank = RankFile(8);
  FlipMiddle(rank);
  EXPECT_TRUE(RunJson({"fsck", run_})["fine"]);
  const Json deep = RunJson({"fsck", run_, "--deep"}, 3);
  ASSERT_EQ(1u, deep["damage"].size());
  EXPECT_EQ(8, deep["damage"][0]["position"]);
  EXPECT_TRUE(Contains(deep["damage"][0]["message"], rank));
  EXPECT_FALSE(deep["damage"][0]["tensors"].empty());
  fs::resize_file(rank, fs::file_size(rank) - 1);
  EXPECT_EQ(8, RunJson({"fsck", run_}, 3)["damage"][0]["position"]);
  fs::remove(rank);
  EXPECT_TRUE(Contains(Run({"fsck", run_}, 3).out, "missing"));
}

TEST_F(Store, RepairMakesDamagedStepsAgainProvenByDigest) {
  Run({"densify", run_, "--steps", "4..9"});
  FlipMiddle(RankFile(0));  // the initial state: from the recipe
  FlipMiddle(RankFile(5));  // a journal
  fs::remove(RankFile(8));  // a keyframe
  const std::string master =
      run_ + "/steps/" + RunReader::Open(run_).value().history().Find(9)->master->name;
  FlipMiddle(master);
  const Json plan = RunJson({"repair", run_, "--dry-run"}, 3);
  EXPECT_EQ(Json({0, 8}), plan["keyframes"]);
  EXPECT_EQ(Json({5, 9}), plan["journals"]);
  EXPECT_FALSE(RunJson({"fsck", run_, "--deep"}, 3)["fine"]);
  Run({"repair", run_, "--tp", "2"});
  const Json proof = RunJson({"verify", run_});
  EXPECT_TRUE(proof["fine"]) << proof;
  EXPECT_TRUE(proof["remarks"].empty()) << proof;
  EXPECT_EQ(proof["journals"], proof["walked"]);
  EXPECT_TRUE(Contains(Run({"repair", run_}).out, "nothing is damaged"));
}

TEST_F(Store, RepairOfALostStepsFolderMakesTheWholeRunAgain) {
  fs::remove_all(run_ + "/steps");
  EXPECT_FALSE(RunJson({"fsck", run_}, 3)["fine"]);
  Run({"repair", run_});
  EXPECT_TRUE(RunJson({"verify", run_})["fine"]);
  EXPECT_EQ((std::set<int64_t>{0, 8, 16}), Reachable(run_));
}

TEST_F(Store, RepairInABranchReplaysItsSurgery) {
  const std::string branch = folder_ / "branch";
  Run({"replay", run_, "--steps", "3..8", "--do", "reset-moments:v,t=keep@5", "--do",
       "clip:none@4..6", "--out", branch});
  const RunReader reader = RunReader::Open(branch).value();
  for (int64_t k : {4, 5, 7}) {
    FlipMiddle(branch + "/steps/" + reader.ReadIndex(k).value().files[0].name);
  }
  Run({"repair", branch});
  EXPECT_TRUE(RunJson({"verify", branch, "--replay"})["replay"]["identical"]);
  // Its first state is the parent's after surgery: that can not be made from here.
  FlipMiddle(branch + "/steps/" + reader.ReadIndex(2).value().files[0].name);
  const Finished lost = Run({"repair", branch}, 3);
  EXPECT_TRUE(Contains(lost.err, "first state of a branch")) << lost.err;
}

TEST_F(Store, RepairCanNotMakeALedgerAgain) {
  FlipMiddle(run_ + "/ledger.jsonl");
  EXPECT_TRUE(Contains(Run({"repair", run_}, 3).out, "restore it from a copy"));
}

TEST_F(Store, ASignalMakesTheFlightRecordersRingStayOnAnyRanks) {
  const std::string run = folder_ / "flight";
  std::vector<std::string> words = TrainWords(
      run, {"store.window=[]", "store.flight.steps=4", "store.flight.after=2", "steps=60"});
  words.insert(words.end(), {"--tp", "2"});
  words.insert(words.begin(), ProgramPath());
  Process process(words, folder_ / "log");
  for (int i = 0; i < 3000 && !Contains(ReadFileText(run + "/ledger.jsonl"), "\"k\":8,"); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  process.Signal(SIGUSR1);
  const Finished done = process.Wait();
  ASSERT_EQ(0, done.code) << done.err;
  const RunReader reader = RunReader::Open(run).value();
  ASSERT_EQ(1u, reader.history().keeps.size());
  const KeepLine keep = reader.history().keeps[0];
  EXPECT_EQ("signal", keep.trigger);
  EXPECT_EQ(keep.update + 2, keep.last);
  for (int64_t k = keep.first; k <= keep.last; ++k) EXPECT_TRUE(Reachable(run).contains(k)) << k;
  EXPECT_LT(Reachable(run).size(), 30u);
  EXPECT_TRUE(RunJson({"verify", run})["fine"]);
}

TEST_F(Store, BadWordsGetAMessageAndExitCodeTwo) {
  const std::string none = folder_ / "none";
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"densify", run_}, "--steps"},
      {{"densify", run_, "--steps", "9"}, "A..B"},
      {{"densify", run_, "--steps", "4..99"}, "0..16"},
      {{"densify", none, "--steps", "1..2"}, none},
      {{"prune", none}, none},
      {{"prune", run_, "--window", "x"}, "--window"},
      {{"prune", run_, "--every", "0"}, "--every"},
      {{"pack", run_, "--level", "99"}, "--level"},
      {{"du", run_, "--by", "colour"}, "--by"},
      {{"fsck", none}, none},
      {{"repair", none}, none},
  };
  for (const auto& [words, expected] : cases) {
    const Finished done = Run(words, 2);
    EXPECT_TRUE(Contains(done.err, expected)) << done.err;
  }
}

}  // namespace
}  // namespace retrace
