// Pruning and packing, killed or with a failing disk at every file operation: what the policy keeps
// is there at any moment, and doing it again ends well.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "formats/run_pack.h"
#include "replay/prune.h"
#include "tests/file_faults.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

constexpr int64_t kLast = 4;
const std::set<int64_t> kStays = {0, 4};  // keyframes, by the policy below

PrunePolicy Policy() {
  PrunePolicy policy;
  policy.store.window_first = policy.store.window_last = kLast;
  return policy;
}

// A firing's line, then the policy, then every step that is left packed into one file.
Status Upkeep(const std::string& dir, FileOps ops) {
  const Layout layout = SmallLayout();
  RT_ASSIGN_OR_RETURN(const auto writer, RunWriter::Open(dir, layout, ops, OpenFor::kUpkeep));
  RT_RETURN_IF_ERROR(writer->Hold({kLast, kLast + 2, kLast, "signal", "a test"}));
  RT_RETURN_IF_ERROR(Prune(writer.get(), PlanPrune(writer->history(), Policy())));
  RT_ASSIGN_OR_RETURN(const RunReader run, RunReader::Open(dir, 1, ops));
  for (const auto& [position, step] : KeptStepsOf(run.history())) {
    RT_RETURN_IF_ERROR(PackStep(run, layout, position, 3, 1, writer.get(), ops).status());
  }
  return writer->Drain();
}

class UpkeepCrash : public testing::TestWithParam<FaultMode> {
 protected:
  static void SetUpTestSuite() {
    recorded_ = new TempDir();
    const Status status = GoOn(*recorded_ / "run", kLast);
    ASSERT_TRUE(status.ok()) << status.message();
  }
  static void TearDownTestSuite() { delete recorded_; }

  static void Copy(const std::string& to) {
    std::filesystem::copy(*recorded_ / "run", to, std::filesystem::copy_options::recursive);
  }

  static void ExpectKept(const std::string& dir, int n) {
    const Result<int64_t> last = CheckRun(dir);  // every kept step reads as it was written
    ASSERT_TRUE(last.ok()) << "operation " << n << ": " << last.status().message();
    EXPECT_EQ(kLast, *last);
    const RunReader run = RunReader::Open(dir).value();
    for (int64_t k : kStays) {
      EXPECT_TRUE(run.history().Find(k)->HasKeyframe()) << "operation " << n << " lost " << k;
    }
  }

  static void ExpectDone(const std::string& dir, int n) {
    ExpectKept(dir, n);
    const RunReader run = RunReader::Open(dir).value();
    size_t files = 0;
    for (int64_t k = 0; k <= kLast; ++k) {
      EXPECT_EQ(kStays.contains(k), run.history().Find(k)->master.has_value()) << n;
    }
    for (const auto& entry : std::filesystem::directory_iterator(dir + "/" + kStepsName)) {
      (void)entry;
      ++files;
    }
    EXPECT_EQ(2 * kStays.size(), files) << "operation " << n;  // a master and one rank file each
    EXPECT_TRUE(run.history().IsHeld(kLast + 1));
  }

  static TempDir* recorded_;
};
TempDir* UpkeepCrash::recorded_ = nullptr;

TEST_P(UpkeepCrash, AtAnyFileOperationLosesNothingThatIsKept) {
  int operations = 0;
  {
    const TempDir temp;
    Copy(temp / "run");
    TestFaults count(FaultMode::kCount);
    ASSERT_TRUE(Upkeep(temp / "run", FileOps(&count)).ok());
    ExpectDone(temp / "run", 0);
    operations = count.count();
  }
  ASSERT_GT(operations, 40);
  for (int n = 1; n <= operations && !HasFatalFailure(); ++n) {
    const TempDir temp;
    const std::string dir = temp / "run";
    Copy(dir);
    TestFaults faults(GetParam(), n, ENOSPC);
    const Status status = Upkeep(dir, FileOps(&faults));
    if (GetParam() == FaultMode::kPowerLoss) faults.Crash();
    if (GetParam() == FaultMode::kFailOnce && !status.ok()) {
      EXPECT_NE(std::string::npos, status.message().find(std::strerror(ENOSPC)))
          << "operation " << n << ": " << status.message();
    }
    ExpectKept(dir, n);
    const Status again = Upkeep(dir, FileOps());
    ASSERT_TRUE(again.ok()) << "operation " << n << ": " << again.message();
    ExpectDone(dir, n);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, UpkeepCrash,
                         testing::Values(FaultMode::kKill, FaultMode::kPowerLoss,
                                         FaultMode::kFailOnce),
                         [](const auto& info) {
                           return info.param == FaultMode::kKill        ? "Kill"
                                  : info.param == FaultMode::kPowerLoss ? "PowerLoss"
                                                                        : "FullDisk";
                         });

}  // namespace
}  // namespace retrace
