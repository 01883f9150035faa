// Crashes and failing disks at every file operation of a run of two ranks.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

#include "tests/file_faults.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

constexpr int64_t kLast = 2;  // keyframes at 0 and 2, journals, a partial keyframe

// How often the run does a file operation. It does the same each time, ranks going in turn.
int CountOperations() {
  const TempDir temp;
  TestFaults faults(FaultMode::kCount);
  const Status status = GoOn(temp / "run", kLast, FileOps(&faults));
  EXPECT_TRUE(status.ok()) << status.message();
  return faults.count();
}

// Starts the run under `faults` and commits until something fails. -> the last position whose commit
// succeeded (-1: none), and the first error.
std::pair<int64_t, Status> RunUntilFault(const std::string& dir, TestFaults* faults) {
  Result<SmallJob> job = SmallJob::Start(dir, FileOps(faults));
  if (!job.ok()) return {-1, job.status()};
  for (int64_t k = 0; k <= kLast; ++k) {
    const Status status = job->Commit(k);
    if (!status.ok()) return {k - 1, status};
  }
  return {kLast, job->writer->Drain()};
}

void ExpectPrefixThenResume(const std::string& dir, int64_t committed, int n) {
  if (committed >= 0) {
    const Result<int64_t> last = CheckRun(dir);
    ASSERT_TRUE(last.ok()) << "operation " << n << ": " << last.status().message();
    EXPECT_GE(*last, committed) << "operation " << n << " lost a committed step";
    EXPECT_LE(*last, committed + 1) << "operation " << n;
  }
  const Status resumed = GoOn(dir, kLast);
  ASSERT_TRUE(resumed.ok()) << "operation " << n << ": " << resumed.message();
  const Result<int64_t> last = CheckRun(dir);
  ASSERT_TRUE(last.ok()) << "operation " << n << ": " << last.status().message();
  EXPECT_EQ(kLast, *last);
  // The resumed run holds no file that no line names.
  size_t named = 0, there = 0;
  const RunReader reader = RunReader::Open(dir).value();
  for (int64_t k = 0; k <= kLast; ++k) {
    named += 1 + reader.ReadIndex(k).value().files.size();
  }
  for (const auto& entry : std::filesystem::directory_iterator(dir + "/" + kStepsName)) {
    (void)entry;
    ++there;
  }
  EXPECT_EQ(named, there) << "operation " << n;
}

class Crash : public testing::TestWithParam<FaultMode> {};

TEST_P(Crash, AtAnyFileOperationLeavesAPrefixAndResumes) {
  const int operations = CountOperations();
  ASSERT_GT(operations, 100);
  for (int n = 1; n <= operations; ++n) {
    const TempDir temp;
    TestFaults faults(GetParam(), n);
    const auto [committed, status] = RunUntilFault(temp / "run", &faults);
    if (GetParam() == FaultMode::kPowerLoss) faults.Crash();
    ExpectPrefixThenResume(temp / "run", committed, n);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Crash, testing::Values(FaultMode::kKill, FaultMode::kPowerLoss),
                         [](const auto& info) {
                           return info.param == FaultMode::kKill ? "Kill" : "PowerLoss";
                         });

class FailingDisk : public testing::TestWithParam<FaultMode> {};

TEST_P(FailingDisk, AtAnyFileOperationIsReportedAndTheRetrySucceeds) {
  const int operations = CountOperations();
  const int errors[] = {ENOSPC, EDQUOT, EIO};
  for (int n = 1; n <= operations; ++n) {
    const int error = errors[n % 3];
    const TempDir temp;
    TestFaults faults(GetParam(), n, error);
    Result<SmallJob> job = SmallJob::Start(temp / "run", FileOps(&faults));
    if (!job.ok()) {  // failed before the first step: starting again succeeds
      EXPECT_NE(std::string::npos, job.status().message().find(std::strerror(error)))
          << "operation " << n << ": " << job.status().message();
      faults.Heal();
      ExpectPrefixThenResume(temp / "run", -1, n);
      continue;
    }
    for (int64_t k = 0; k <= kLast; ++k) {
      const Status status = job->Commit(k);
      if (status.ok()) continue;
      EXPECT_EQ(StatusCode::kFailed, status.code()) << status.message();
      EXPECT_NE(std::string::npos, status.message().find(std::strerror(error)))
          << "operation " << n << ": " << status.message();
      EXPECT_TRUE(CheckRun(temp / "run").ok()) << "operation " << n;
      faults.Heal();
      const Status retried = job->Commit(k);  // the same step, the same process
      ASSERT_TRUE(retried.ok()) << "operation " << n << ": " << retried.message();
    }
    job->writer.reset();
    ExpectPrefixThenResume(temp / "run", kLast, n);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, FailingDisk,
                         testing::Values(FaultMode::kFailOnce, FaultMode::kFailOn),
                         [](const auto& info) {
                           return info.param == FaultMode::kFailOnce ? "Once" : "UntilHealed";
                         });

}  // namespace
}  // namespace retrace
