// Crashes and failing disks at every file operation of a run of two ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "tests/file_faults.h"
#include "tests/places.h"
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
    if (GetParam() != FaultMode::kKill) faults.Crash();
    ExpectPrefixThenResume(temp / "run", committed, n);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Crash, testing::Values(FaultMode::kKill, FaultMode::kPowerLoss,
                                                FaultMode::kReordered),
                         [](const auto& info) {
                           return info.param == FaultMode::kKill        ? "Kill"
                                  : info.param == FaultMode::kPowerLoss ? "PowerLoss"
                                                                        : "ReorderedWrites";
                         });

// Lines that were written and not synced, any one or two blocks of them lost: the run opens to what
// was synced, never to less.
TEST(ReorderedWrites, OfTheLedgerLeaveAllThatWasSynced) {
  const TempDir temp;
  const std::string run = temp / "run", ledger = run + "/" + kLedgerName;
  ASSERT_TRUE(GoOn(run, 2).ok());
  const std::string synced = ReadFileText(ledger);
  SmallJob job = SmallJob::Start(run).value();
  const std::string begun = ReadFileText(ledger);  // with the attempt's line
  ASSERT_TRUE(job.Commit(3).ok());                 // a line alone: not synced
  ASSERT_TRUE(job.Commit(4).ok());                 // with files
  const std::string whole = ReadFileText(ledger);
  const size_t first = begun.size() / 512, last = (whole.size() - 1) / 512;
  ASSERT_GE(last, first + 1);
  const std::string other = temp / "other";
  std::filesystem::copy(run, other, std::filesystem::copy_options::recursive);
  for (size_t a = first; a <= last; ++a) {
    for (size_t b = a; b <= last; ++b) {
      std::string text = whole;
      for (size_t block : {a, b}) {
        const size_t from = std::max(begun.size(), block * 512);
        const size_t to = std::min(whole.size(), (block + 1) * 512);
        std::fill(text.begin() + from, text.begin() + to, '\0');
      }
      WriteFileText(other + "/" + kLedgerName, text);
      const Result<int64_t> opened = CheckRun(other);
      ASSERT_TRUE(opened.ok()) << a << ", " << b << ": " << opened.status().message();
      EXPECT_GE(*opened, 2);
    }
  }
  // The same hole in lines that were synced, with steps after them, is damage.
  std::string text = whole;
  const size_t hole = (synced.size() / 2 + 511) / 512 * 512;
  std::fill(text.begin() + hole, text.begin() + hole + 512, '\0');
  WriteFileText(other + "/" + kLedgerName, text);
  EXPECT_EQ(StatusCode::kDamaged, RunReader::Open(other).status().code());
}

// A step that is committed has its files, whatever else is lost; so is a directory that goes away.
TEST(VanishedDirectory, IsAnErrorOfTheStepAndNothingElse) {
  const TempDir temp;
  const std::string run = temp / "run";
  for (const std::string& gone : {run + "/" + kStepsName, run}) {
    SmallJob job = SmallJob::Start(run).value();
    const int64_t k = job.writer->history().last_position() + 1;
    std::filesystem::rename(gone, temp / "elsewhere");
    const Status status = job.Commit(k);
    EXPECT_EQ(StatusCode::kFailed, status.code()) << status.message();
    EXPECT_NE(std::string::npos, status.message().find(run)) << status.message();
    std::filesystem::rename(temp / "elsewhere", gone);
    const Status again = job.Commit(k);
    EXPECT_TRUE(again.ok()) << again.message();
    job.writer.reset();
    EXPECT_EQ(k, CheckRun(run).value());
  }
}

// No decision rests on a clock that can jump or on a file's time.
TEST(ClockJumps, DoNotMatter) {
  const TempDir temp;
  const std::string run = temp / "run";
  ASSERT_TRUE(GoOn(run, 1).ok());
  using FileClock = std::filesystem::file_time_type;
  int number = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(run)) {
    const auto jump = std::chrono::hours(24 * 365 * (number++ % 2 == 0 ? 30 : -30));
    std::filesystem::last_write_time(entry.path(), FileClock::clock::now() + jump);
  }
  ASSERT_TRUE(GoOn(run, kLast).ok());
  EXPECT_EQ(kLast, CheckRun(run).value());
  const std::vector<std::string> clocks = {"system_clock", "CLOCK_REALTIME", "gettimeofday",
                                           "std::time(", "st_mtim", "last_write_time"};
  for (const char* folder : {"core", "formats", "replay", "surgery"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(
             SourceDir() + "/" + folder)) {
      if (!entry.is_regular_file()) continue;
      const std::string text = ReadFileText(entry.path());
      for (const std::string& clock : clocks) {
        EXPECT_EQ(std::string::npos, text.find(clock)) << entry.path() << " reads " << clock;
      }
    }
  }
}

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
