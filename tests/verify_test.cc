// `retrace verify`'s logic on a real recording of the tiny recipe: every planted fault is named,
// and all of several are.
#include "replay/verify.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "formats/step_file.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "surgery/branch.h"
#include "tests/places.h"
#include "tests/small_run.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int64_t kLast = 6;

// Keyframes at 0, 4 and (the last state) 6; journals at 1, 2, 3, 5, 6.
std::vector<std::string> Overrides(const std::string& dataset) {
  return {"data.path=" + dataset, "store.keyframe_every=4", "steps=6", "store.window=[0, 6]"};
}

Recipe TinyRecipe(const std::string& dataset) {
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", Overrides(dataset))
      .value();
}

void RecordTo(const std::string& dir, const std::string& dataset) {
  SoloComm comm;
  TrainOptions options;
  options.run_dir = dir;
  const Result<TrainEnd> end =
      Train(TinyRecipe(dataset), comm, {.tp = 1, .dp = 1, .threads = 1}, options);
  ASSERT_TRUE(end.ok()) << end.status().message();
}

// One recording for all tests; each works on a copy.
class Verify : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    recorded_ = new TempDir();
    RecordTo(*recorded_ / "run", TestData("dataset/tiny"));
  }
  static void TearDownTestSuite() {
    delete recorded_;
    recorded_ = nullptr;
  }
  void SetUp() override {
    std::filesystem::copy(*recorded_ / "run", dir(), std::filesystem::copy_options::recursive);
  }

  std::string dir() const { return temp_ / "run"; }
  std::string Step(const std::string& name) const { return dir() + "/steps/" + name; }
  static std::string Rank(int64_t k) { return RankFileName(k, 1, 0); }

  VerifyReport Report() const {
    Result<VerifyReport> report = VerifyRun(dir(), {.threads = 2});
    EXPECT_TRUE(report.ok()) << report.status().message();
    return report.ok() ? std::move(report).value() : VerifyReport();
  }

  static void FlipBit(const std::string& path, size_t byte, int bit = 0) {
    std::string text = ReadFileText(path);
    ASSERT_LT(byte, text.size()) << path;
    text[byte] = static_cast<char>(text[byte] ^ (1 << bit));
    WriteFileText(path, text);
  }
  static void FlipMiddle(const std::string& path) { FlipBit(path, ReadFileText(path).size() / 2); }

  static std::string Messages(const VerifyReport& report) {
    std::string all;
    for (const Damage& damage : report.damage) {
      all += damage.message + "\n";
      for (const std::string& tensor : damage.tensors) all += "  " + tensor + "\n";
    }
    for (const std::string& remark : report.remarks) all += "note " + remark + "\n";
    return all;
  }

  TempDir temp_;
  static TempDir* recorded_;
};

TempDir* Verify::recorded_ = nullptr;

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(Verify, AnUntouchedRunIsFineAndEveryStateIsProven) {
  const VerifyReport report = Report();
  EXPECT_TRUE(report.fine()) << Messages(report);
  EXPECT_TRUE(report.remarks.empty()) << Messages(report);
  EXPECT_EQ(0, report.first_position);
  EXPECT_EQ(kLast, report.last_position);
  EXPECT_GE(report.keyframes, 2);
  EXPECT_EQ(kLast + 1, report.keyframes + report.journals);
  EXPECT_EQ(report.journals, report.walked);
}

TEST_F(Verify, AFlippedBitInAJournalNamesItsFileAndTensorAndWhatCanNotBeProvenAfterIt) {
  FlipMiddle(Step(Rank(2)));
  const VerifyReport report = Report();
  ASSERT_EQ(1u, report.damage.size()) << Messages(report);
  EXPECT_EQ(2, report.damage[0].position);
  EXPECT_TRUE(Contains(report.damage[0].message, Rank(2))) << Messages(report);
  ASSERT_FALSE(report.damage[0].tensors.empty());
  EXPECT_TRUE(Contains(report.damage[0].tensors[0], "#g (shard ")) << Messages(report);
  EXPECT_TRUE(Contains(Messages(report), "could not be proven, damaged or after damage: 2, 3"))
      << Messages(report);
}

TEST_F(Verify, AFlippedBitInAKeyframeNamesItsFileAndTensor) {
  FlipMiddle(Step(Rank(4)));
  const VerifyReport report = Report();
  ASSERT_EQ(1u, report.damage.size()) << Messages(report);
  EXPECT_EQ(4, report.damage[0].position);
  EXPECT_TRUE(Contains(report.damage[0].message, Rank(4))) << Messages(report);
  EXPECT_FALSE(report.damage[0].tensors.empty());
}

TEST_F(Verify, EveryFlippedByteOfASmallFileIsSeen) {
  const std::string master = Step(MasterFileName(3, 1));
  const std::string original = ReadFileText(master);
  for (size_t byte = 0; byte < original.size(); byte += original.size() / 16) {
    FlipBit(master, byte, static_cast<int>(byte % 8));
    const VerifyReport report = Report();
    EXPECT_EQ(1u, report.damage.size()) << "byte " << byte << "\n" << Messages(report);
    WriteFileText(master, original);
  }
}

TEST_F(Verify, EveryFlippedBitOfALedgerLineIsSeenAndItsLineNamed) {
  const std::string ledger = dir() + "/" + kLedgerName;
  const std::string original = ReadFileText(ledger);
  std::vector<size_t> starts = {0};
  for (size_t i = 0; i + 1 < original.size(); ++i) {
    if (original[i] == '\n') starts.push_back(i + 1);
  }
  for (size_t line = 0; line < starts.size(); ++line) {
    FlipBit(ledger, starts[line] + 20, 1);
    const VerifyReport report = Report();
    ASSERT_FALSE(report.fine()) << "line " << line + 1;
    EXPECT_TRUE(Contains(report.damage[0].message, "line " + std::to_string(line + 1) + ":"))
        << Messages(report);
    WriteFileText(ledger, original);
  }
}

TEST_F(Verify, AMissingLedgerLineIsSeen) {
  const std::string ledger = dir() + "/" + kLedgerName;
  std::string text = ReadFileText(ledger);
  const size_t second = text.find('\n') + 1;
  text.erase(second, text.find('\n', second) + 1 - second);
  WriteFileText(ledger, text);
  const VerifyReport report = Report();
  ASSERT_FALSE(report.fine());
  EXPECT_TRUE(Contains(report.damage[0].message, "line 2: does not follow the line before it"))
      << Messages(report);
}

TEST_F(Verify, AllDamageIsNamedNotOnlyTheFirst) {
  FlipMiddle(Step(Rank(1)));
  std::filesystem::remove(Step(Rank(3)));
  FlipMiddle(Step(MasterFileName(5, 1)));
  FlipBit(dir() + "/" + kRecipeName, 5);
  FlipBit(dir() + "/" + kManifestName, 5);
  const std::string all = Messages(Report());
  for (const std::string& name : {Rank(1), Rank(3), MasterFileName(5, 1), std::string(kRecipeName),
                                  std::string(kManifestName)}) {
    EXPECT_TRUE(Contains(all, "/" + name + ":")) << name << "\n" << all;
  }
}

TEST_F(Verify, DamagedLinesAndFilesAreNamedTogether) {
  const std::string ledger = dir() + "/" + kLedgerName;
  const std::string text = ReadFileText(ledger);
  const size_t third = text.find('\n', text.find('\n') + 1) + 1;
  FlipBit(ledger, third + 30);
  FlipBit(ledger, text.rfind('\n', text.size() - 2) + 30);
  FlipMiddle(Step(Rank(5)));
  const VerifyReport report = Report();
  const std::string all = Messages(report);
  EXPECT_EQ(3u, report.damage.size()) << all;
  EXPECT_TRUE(Contains(all, "line 3:")) << all;
  EXPECT_TRUE(Contains(all, Rank(5))) << all;
  EXPECT_TRUE(Contains(all, "no state was walked")) << all;
}

TEST_F(Verify, ALineOfTwoPositionsWithOneDigestIsFlagged) {
  // A writer that recorded the state of position 3 twice, with a ledger in good order.
  const std::string path = dir() + "/" + kLedgerName;
  const Result<LedgerContents> ledger = ReadLedger(FileOps(), path);
  ASSERT_TRUE(ledger.ok());
  std::string text;
  Digest previous, of_three;
  for (LedgerLine line : ledger->lines) {
    if (StateLine* state = std::get_if<StateLine>(&line)) {
      if (state->position() == 3) of_three = state->digest;
      if (state->position() == 4) state->digest = of_three;
    }
    Digest digest;
    text += LedgerLineText(line, previous, &digest).value();
    previous = digest;
  }
  WriteFileText(path, text);
  const std::string all = Messages(Report());
  EXPECT_TRUE(Contains(all, "positions 3 and 4 have the same digest")) << all;
}

TEST_F(Verify, AJournalThatLeadsElsewhereIsFoundThoughItsFilesAreAsWritten) {
  // The ledger claims another digest for position 2; every line's own digest is right.
  const std::string path = dir() + "/" + kLedgerName;
  const Result<LedgerContents> ledger = ReadLedger(FileOps(), path);
  ASSERT_TRUE(ledger.ok());
  std::string text;
  Digest previous;
  for (LedgerLine line : ledger->lines) {
    if (StateLine* state = std::get_if<StateLine>(&line); state && state->position() == 2) {
      state->digest.bytes[7] ^= 1;
    }
    Digest digest;
    text += LedgerLineText(line, previous, &digest).value();
    previous = digest;
  }
  WriteFileText(path, text);
  const VerifyReport report = Report();
  ASSERT_EQ(1u, report.damage.size()) << Messages(report);
  EXPECT_EQ(2, report.damage[0].position);
  EXPECT_TRUE(Contains(report.damage[0].message, "leads from")) << Messages(report);
}

TEST_F(Verify, OrphansAndATornLineAreMentionedButNoDamage) {
  WriteFileText(Step(RankFileName(9, 7, 0)), "left by a crash");
  WriteFileText(dir() + "/" + kLedgerName,
                ReadFileText(dir() + "/" + kLedgerName) + "{\"kind\":\"upd");
  const VerifyReport report = Report();
  EXPECT_TRUE(report.fine()) << Messages(report);
  ASSERT_EQ(2u, report.remarks.size()) << Messages(report);
  EXPECT_TRUE(Contains(report.remarks[0], RankFileName(9, 7, 0)));
  EXPECT_TRUE(Contains(report.remarks[1], "never finished"));
}

TEST_F(Verify, ADirectoryWithoutARunIsAUsageError) {
  EXPECT_EQ(StatusCode::kUsage, VerifyRun(temp_ / "nothing", {}).status().code());
}

// A branch with surgery in its middle keeps whole states there: each follows.
TEST_F(Verify, ABranchWithSurgeryIsFine) {
  const Result<RunReader> run = RunReader::Open(dir());
  ASSERT_TRUE(run.ok());
  SoloComm comm;
  const Result<std::unique_ptr<Job>> job =
      Job::Make(TinyRecipe(TestData("dataset/tiny")), comm, {.tp = 1, .dp = 1, .threads = 1});
  ASSERT_TRUE(job.ok());
  BranchPlan plan;
  plan.first = 2;
  plan.last = kLast;
  plan.interventions = {ParseIntervention("reset-moments:v,t=keep@4").value(),
                        ParseIntervention("clip:none@3..5").value()};
  plan.out = temp_ / "branch";
  const Status made = MakeBranch(*run, **job, plan, nullptr);
  ASSERT_TRUE(made.ok()) << made.message();
  const Result<VerifyReport> report = VerifyRun(plan.out, {});
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_TRUE(report->fine()) << Messages(*report);
  EXPECT_EQ(1, report->first_position);
  EXPECT_EQ(report->journals, report->walked);
}

}  // namespace
}  // namespace retrace
