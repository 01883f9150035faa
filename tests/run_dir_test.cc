#include "formats/run_dir.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <future>
#include <thread>

#include "core/version.h"
#include "tests/file_faults.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

void ExpectError(StatusCode code, const std::string& text, const Status& status) {
  EXPECT_EQ(code, status.code()) << status.message();
  EXPECT_NE(std::string::npos, status.message().find(text)) << text << ": " << status.message();
}

class RunDir : public testing::Test {
 protected:
  SmallJob Start() {
    Result<SmallJob> job = SmallJob::Start(run_);
    EXPECT_TRUE(job.ok()) << job.status().message();
    return std::move(job).value();
  }
  void ExpectRun(int64_t last) {
    const Result<int64_t> read = CheckRun(run_);
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_EQ(last, *read);
  }

  TempDir temp_;
  const std::string run_ = temp_ / "run";
  const Layout layout_ = SmallLayout();
};

// ---- what is kept ----

TEST_F(RunDir, WhatIsWrittenIsReadBackBitForBit) {
  ASSERT_TRUE(GoOn(run_).ok());
  ExpectRun(kSmallLast);
}

TEST_F(RunDir, AnyRangeOfShardsReads) {
  ASSERT_TRUE(GoOn(run_).ok());
  const RunReader reader = RunReader::Open(run_).value();
  const State whole = StateAt(layout_, 2);
  for (int shard : {0, 1}) {
    State state;
    ASSERT_TRUE(reader.ReadKeyframe(layout_, 2, shard, 1, &state).ok());
    EXPECT_EQ(shard, state.first_shard);
    EXPECT_EQ(whole.shards[shard].slabs, state.shards[0].slabs);
    EXPECT_EQ(whole.counters, state.counters);
    EXPECT_EQ(whole.memory, state.memory);
    Journal journal;
    ASSERT_TRUE(reader.ReadJournal(layout_, 2, shard, 1, &journal).ok());
    EXPECT_EQ(GradientsOf(layout_, 2)[shard], journal.gradients[0]);
  }
}

TEST_F(RunDir, SaysWhichWayLeadsToAState) {
  ASSERT_TRUE(GoOn(run_).ok());
  const RunReader reader = RunReader::Open(run_).value();
  const RunHistory& history = reader.history();
  EXPECT_EQ(0, history.NearestKeyframe(0));
  EXPECT_EQ(0, history.NearestKeyframe(1));
  EXPECT_EQ(2, history.NearestKeyframe(2));
  EXPECT_EQ(std::nullopt, history.NearestKeyframe(3));  // a ledger line alone
  EXPECT_EQ(4, history.NearestKeyframe(4));
  EXPECT_EQ(std::nullopt, history.NearestKeyframe(5));
  EXPECT_TRUE(history.HasJournals(1, 2));
  EXPECT_FALSE(history.HasJournals(1, 3));
  State state;
  ExpectError(StatusCode::kUsage, "keeps no keyframe", reader.ReadKeyframe(layout_, 1, 0, 2, &state));
  Journal journal;
  ExpectError(StatusCode::kUsage, "keeps no journal", reader.ReadJournal(layout_, 9, 0, 2, &journal));
  ExpectError(StatusCode::kUsage, "virtual shards",
              reader.ReadKeyframe(SmallLayout(1), 0, 0, 1, &state));
}

TEST_F(RunDir, RecipeRecordsAndLineageComeBack) {
  RunPlan plan = SmallPlan();
  plan.first_position = 7;
  plan.lineage = Lineage{"../parent", DigestOf("run"), 7, DigestOf("state"), "skip(7)\nscale(8)"};
  {
    auto writer = RunWriter::Create(run_, layout_, plan).value();
    StepCommit commit = CommitOf(layout_, 7);
    commit.optimizer.reset();
    ASSERT_TRUE(writer->CommitStep(commit).ok());
    commit = CommitOf(layout_, 8);
    commit.optimizer.reset();
    commit.record = "{ \"loss\": 0.1,\n \"name\": \"\\u00e4\" }";
    ASSERT_TRUE(writer->CommitStep(commit).ok());
  }
  const RunReader reader = RunReader::Open(run_).value();
  EXPECT_EQ(plan.recipe_text, reader.recipe_text());
  EXPECT_NE(std::string::npos, reader.manifest_text().find(kNumericsId));
  EXPECT_EQ(plan.lineage, reader.history().header.lineage);
  EXPECT_EQ(7, reader.history().first_position());
  EXPECT_EQ(8, reader.history().last_position());
  EXPECT_EQ("{\"loss\":0.1,\"name\":\"\u00e4\"}", reader.history().Find(8)->record);
  EXPECT_EQ(nullptr, reader.history().Find(6));
}

TEST_F(RunDir, ASnapshotHoldsTheMomentOfTheCall) {
  SmallJob job = Start();
  State state = StateAt(layout_, 0);
  StepCommit commit = CommitOf(layout_, 0);
  for (int rank : {0, 1}) {
    job.ranks[rank]->Snapshot(0, SourcesOf(layout_, state, {}, {.keyframe = true}, rank, 1));
  }
  for (auto& shard : state.shards) {
    for (auto& slab : shard.slabs) slab.assign(slab.size(), -1.0f);
  }
  for (int rank : {0, 1}) commit.files.push_back(job.ranks[rank]->Wait().value());
  ASSERT_TRUE(job.writer->CommitStep(commit).ok());
  ExpectRun(0);
}

// ---- what a commit must be ----

TEST_F(RunDir, StepsThatDoNotFitAreRefusedAndChangeNothing) {
  SmallJob job = Start();
  StepCommit good = CommitOf(layout_, 0);
  ASSERT_TRUE(job.Snapshot(0, &good.files).ok());
  const auto refused = [&](StatusCode code, const std::string& text, const StepCommit& step) {
    ExpectError(code, text, job.writer->CommitStep(step));
  };
  StepCommit bad = good;
  bad.files.pop_back();
  refused(StatusCode::kUsage, "every virtual shard once", bad);
  bad = good;
  bad.files[1].slabs = bad.files[0].slabs;
  refused(StatusCode::kUsage, "more than one rank", bad);
  bad = good;
  bad.files[0].slabs.pop_back();  // v of shard 0
  refused(StatusCode::kUsage, "every virtual shard once", bad);
  bad = good;
  bad.optimizer = OptimizerOf(layout_, 0);
  refused(StatusCode::kUsage, "optimizer block", bad);
  bad = good;
  bad.memory["norm_ema"][0] += 1;
  refused(StatusCode::kFailed, "changed between its digest and its snapshot", bad);
  bad = good;
  bad.files[0].size += 1;
  refused(StatusCode::kFailed, "one shared file system", bad);
  bad = good;
  bad.record = "[1]";
  refused(StatusCode::kUsage, "JSON object", bad);
  refused(StatusCode::kUsage, "expected position 0", CommitOf(layout_, 1));
  EXPECT_EQ(-1, job.writer->history().last_position());
  ASSERT_TRUE(job.writer->CommitStep(good).ok());
  ExpectRun(0);
}

TEST_F(RunDir, APartialKeyframeNeedsEveryPieceOfItsTensors) {
  SmallJob job = Start();
  ASSERT_TRUE(job.Commit(0).ok());
  ASSERT_TRUE(job.Commit(1).ok());
  StepCommit commit = CommitOf(layout_, 2);
  ASSERT_TRUE(job.Snapshot(2, &commit.files).ok());
  StepCommit bad = commit;
  std::erase_if(bad.files[1].slabs, [](const SlabInfo& slab) { return IsPartial(slab.id.kind); });
  ExpectError(StatusCode::kUsage, "partial_p", job.writer->CommitStep(bad));
  ASSERT_TRUE(job.writer->CommitStep(commit).ok());
}

TEST_F(RunDir, AStepThatTheRunHasIsComparedNotOverwritten) {
  ASSERT_TRUE(GoOn(run_).ok());
  SmallJob job = Start();  // resumes from an earlier keyframe, say
  StepCommit other = CommitOf(layout_, 3);
  other.digest = DigestOf("another state");
  ExpectError(StatusCode::kFailed, "the run recorded the digest", job.writer->CommitStep(other));
  ASSERT_TRUE(job.writer->CommitStep(CommitOf(layout_, 3)).ok());
  // Files written anew take the place of the earlier attempt's.
  ASSERT_TRUE(job.Commit(2).ok());
  EXPECT_EQ("000000002.a0002.h5", job.writer->history().Find(2)->master->name);
  EXPECT_FALSE(std::filesystem::exists(run_ + "/steps/000000002.a0001.h5"));
  EXPECT_FALSE(std::filesystem::exists(run_ + "/steps/000000002.a0001.r0001.h5"));
  ExpectRun(kSmallLast);
}

TEST_F(RunDir, RetiredStepsKeepTheirLinesAndLoseTheirFiles) {
  ASSERT_TRUE(GoOn(run_).ok());
  {
    SmallJob job = Start();
    ASSERT_TRUE(job.writer->Retire(0, 1).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(run_ + "/steps/" + MasterFileName(0, 1)));
  EXPECT_FALSE(std::filesystem::exists(run_ + "/steps/" + RankFileName(1, 1, 0)));
  const RunReader reader = RunReader::Open(run_).value();
  EXPECT_EQ(StateDigest(layout_, StateAt(layout_, 1)), reader.history().Find(1)->digest);
  EXPECT_FALSE(reader.history().Find(1)->HasJournal());
  EXPECT_TRUE(reader.history().Find(2)->HasKeyframe());
  ExpectRun(kSmallLast);
}

TEST_F(RunDir, RetiringSurvivesACrashAtAnyFileOperation) {
  int n = 1;
  for (bool done = false; !done; ++n) {
    const TempDir temp;
    const std::string run = temp / "run";
    ASSERT_TRUE(GoOn(run, 2).ok());
    TestFaults faults(FaultMode::kKill, n);
    {
      Result<SmallJob> job = SmallJob::Start(run, FileOps(&faults));
      done = job.ok() && job->writer->Retire(0, 1).ok();
    }
    const Result<int64_t> last = CheckRun(run);
    ASSERT_TRUE(last.ok()) << n << ": " << last.status().message();
    EXPECT_EQ(2, *last);
    ASSERT_TRUE(SmallJob::Start(run).ok());  // removes what the crash left
    const bool retired = !RunReader::Open(run)->history().Find(0)->HasKeyframe();
    EXPECT_EQ(retired, !std::filesystem::exists(run + "/steps/" + MasterFileName(0, 1))) << n;
    EXPECT_EQ(retired, !std::filesystem::exists(run + "/steps/" + RankFileName(1, 1, 1))) << n;
  }
  EXPECT_GT(n, 10);
}

// ---- asynchronous ----

TEST_F(RunDir, CommitsBehindTheCallersBackComeInOrder) {
  {
    SmallJob job = Start();
    for (int64_t k = 0; k <= kSmallLast; ++k) {
      StepCommit commit = CommitOf(layout_, k);
      ASSERT_TRUE(job.Snapshot(k, &commit.files).ok());
      job.writer->CommitLater(std::move(commit));
    }
    ASSERT_TRUE(job.writer->Drain().ok());
    EXPECT_EQ(kSmallLast, job.writer->history().last_position());
  }
  ExpectRun(kSmallLast);
}

TEST_F(RunDir, AFailedCommitStopsTheLaterOnesAndIsReportedOnce) {
  SmallJob job = Start();
  StepCommit bad = CommitOf(layout_, 0);
  bad.record = "1";
  job.writer->CommitLater(bad);
  StepCommit next = CommitOf(layout_, 0);
  next.optimizer.reset();
  job.writer->CommitLater(next);
  ExpectError(StatusCode::kUsage, "JSON object", job.writer->Drain());
  EXPECT_EQ(-1, job.writer->history().last_position());
  EXPECT_TRUE(job.writer->Drain().ok());
}

// Holds every fsync until it is told to go on.
class SlowDisk : public FileFaults {
 public:
  FileFault Before(FileOp op, const std::string&, const std::string&) override {
    if (op == FileOp::kSync && slow) go.get_future().wait();
    return {};
  }
  std::atomic<bool> slow = false;
  std::promise<void> go;
};

TEST_F(RunDir, TrainingWaitsForAStorageThatFellBehind) {
  SmallJob job = Start();
  SlowDisk disk;
  auto rank = RankWriter::Open(layout_, run_, job.writer->attempt(), 0, 1, FileOps(&disk)).value();
  const State state = StateAt(layout_, 0);
  const auto sources = SourcesOf(layout_, state, {}, {.keyframe = true}, 0, 1);
  disk.slow = true;
  rank->Snapshot(0, sources);
  rank->Snapshot(1, sources);
  EXPECT_FALSE(rank->Poll().has_value());
  std::atomic<bool> returned = false;
  std::thread third([&] {
    rank->Snapshot(2, sources);
    returned = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(returned);  // both staging buffers are in use
  disk.slow = false;
  disk.go.set_value();
  third.join();
  for (int64_t k : {0, 1, 2}) EXPECT_EQ(k, rank->Wait().value().position);
  EXPECT_EQ(0u, rank->pending());
}

// ---- who may write ----

TEST_F(RunDir, ASecondWriterIsRefusedAndTheFirstGoesOn) {
  SmallJob job = Start();
  ASSERT_TRUE(job.Commit(0).ok());
  ExpectError(StatusCode::kUsage, "process " + std::to_string(::getpid()),
              SmallJob::Start(run_).status());
  ASSERT_TRUE(job.Commit(1).ok());
  ExpectRun(1);
}

TEST_F(RunDir, ARunWithoutAStateIsReplaced) {
  RunPlan first = SmallPlan(), second = SmallPlan();
  second.recipe_text += "# another\n";
  {
    // Files of a step that was never committed, under the names that the next attempt will use.
    SmallJob job = Start();
    std::vector<RankFileInfo> files;
    ASSERT_TRUE(job.Snapshot(0, &files).ok());
    WriteFileText(run_ + "/steps/" + files[0].name, "other bytes");
    ExpectError(StatusCode::kUsage, "process " + std::to_string(::getpid()),
                RunWriter::Create(run_, layout_, second).status());  // it is being written
  }
  ASSERT_TRUE(RunWriter::Create(run_, layout_, second).ok());
  EXPECT_EQ(second.recipe_text, RunReader::Open(run_).value().recipe_text());
  ASSERT_TRUE(GoOn(run_).ok());
  EXPECT_EQ(second.recipe_text, RunReader::Open(run_).value().recipe_text());
  ExpectError(StatusCode::kUsage, "there is a run already",
              RunWriter::Create(run_, layout_, first).status());
}

TEST_F(RunDir, ARunWhoseLedgerIsDamagedIsNotReplaced) {
  { ASSERT_TRUE(RunWriter::Create(run_, layout_, SmallPlan()).ok()); }
  std::string ledger = ReadFileText(run_ + "/" + kLedgerName);
  ledger[ledger.size() / 2] ^= 1;
  WriteFileText(run_ + "/" + kLedgerName, ledger);
  ExpectError(StatusCode::kUsage, "there is a run already",
              RunWriter::Create(run_, layout_, SmallPlan()).status());
  EXPECT_EQ(ledger, ReadFileText(run_ + "/" + kLedgerName));
}

TEST_F(RunDir, ARunIsNotMadeTwice) {
  ASSERT_TRUE(GoOn(run_, 0).ok());
  ExpectError(StatusCode::kUsage, "there is a run already",
              RunWriter::Create(run_, layout_, SmallPlan()).status());
  ExpectError(StatusCode::kUsage, kLedgerName, RunReader::Open(temp_ / "other").status());
  ExpectError(StatusCode::kUsage, kLedgerName, RunWriter::Open(temp_ / "other", layout_).status());
}

class StaleLock : public RunDir {
 protected:
  // The notice or error of an opening that finds the lock of `holder`.
  Status Open(const LockHolder& holder, FileFaults* faults = nullptr) {
    EXPECT_TRUE(GoOn(run_, 0).ok());
    WriteFileText(run_ + "/" + kLockName, LockText(holder));
    const auto writer = RunWriter::Open(run_, layout_, FileOps(faults));
    if (!writer.ok()) return writer.status();
    EXPECT_EQ(1u, (*writer)->notices().size());
    return FailedError((*writer)->notices().empty() ? "" : (*writer)->notices()[0]);
  }
};

// A file system without advisory locks.
class NoLocks : public FileFaults {
 public:
  FileFault Before(FileOp op, const std::string&, const std::string&) override {
    return {op == FileOp::kLock ? EOPNOTSUPP : 0, 0};
  }
};

TEST_F(StaleLock, OfAProcessThatIsGoneIsTakenOverWithANotice) {
  LockHolder gone = ThisProcess();
  gone.pid = 999999999;
  ExpectError(StatusCode::kFailed, "took over the lock of process 999999999", Open(gone));
}

TEST_F(StaleLock, OfThisHostBeforeItsRestartIsTakenOver) {
  LockHolder before = ThisProcess();
  before.boot_id = "another boot";
  ExpectError(StatusCode::kFailed, "took over the lock", Open(before));
}

TEST_F(StaleLock, OfAnotherHostIsNotOursToJudge) {
  LockHolder other = ThisProcess();
  other.host = "elsewhere";
  other.boot_id = "another boot";
  ExpectError(StatusCode::kUsage, "on host elsewhere", Open(other));
}

TEST_F(StaleLock, IsJudgedByProcessAndStartWhereThereAreNoFileLocks) {
  NoLocks no_locks;
  ExpectError(StatusCode::kUsage, "is held by process", Open(ThisProcess(), &no_locks));
  LockHolder reused = ThisProcess();  // this process id, but of an earlier process
  reused.start_ticks -= 1;
  ExpectError(StatusCode::kFailed, "took over the lock", Open(reused, &no_locks));
}

TEST_F(StaleLock, ThatIsTornIsFree) {
  ASSERT_TRUE(GoOn(run_, 0).ok());
  WriteFileText(run_ + "/" + kLockName, "{\"host\":\"x");
  EXPECT_TRUE(GoOn(run_, 1).ok());
}

TEST_F(RunDir, ALateRankOfAnEarlierAttemptCanNotPublishIntoALaterOne) {
  TestFaults killed(FaultMode::kCount);
  Result<SmallJob> early = SmallJob::Start(run_, FileOps(&killed));
  auto late = RankWriter::Open(layout_, run_, 1, 1, 1).value();  // its process lives on
  StepCommit stale = CommitOf(layout_, 0);
  ASSERT_TRUE(early->Snapshot(0, &stale.files).ok());
  early->writer.reset();

  SmallJob job = Start();
  EXPECT_EQ(2, job.writer->attempt());
  const State state = StateAt(layout_, 0);
  late->Snapshot(0, SourcesOf(layout_, state, {}, {.keyframe = true}, 1, 1));
  ExpectError(StatusCode::kFailed, "the run is at attempt 2", late->Wait().status());
  ExpectError(StatusCode::kFailed, "the run is at attempt 2",
              RankWriter::Open(layout_, run_, 1, 0, 1).status());
  // Its files are gone, and their descriptions are refused.
  ExpectError(StatusCode::kUsage, "attempt 2, got 000000000.a0001", job.writer->CommitStep(stale));
  for (const RankFileInfo& file : stale.files) {
    EXPECT_FALSE(std::filesystem::exists(run_ + "/steps/" + file.name));
  }
  ASSERT_TRUE(job.Commit(0).ok());
  ExpectRun(0);
}

TEST_F(RunDir, ATornLastLineIsCutWithANotice) {
  ASSERT_TRUE(GoOn(run_, 1).ok());
  const std::string ledger = run_ + "/" + kLedgerName, good = ReadFileText(ledger);
  for (const std::string& torn : {std::string("{\"kind\":\"upd"), std::string(100, '\0'),
                                  std::string("{\"kind\"") + std::string(50, '\0')}) {
    WriteFileText(ledger, good + torn);
    ExpectRun(1);  // readers ignore it and do not write
    EXPECT_EQ(good + torn, ReadFileText(ledger));
    const auto writer = RunWriter::Open(run_, layout_).value();
    ASSERT_EQ(1u, writer->notices().size());
    EXPECT_NE(std::string::npos, writer->notices()[0].find("torn")) << writer->notices()[0];
    EXPECT_EQ(good, ReadFileText(ledger).substr(0, good.size()));
    WriteFileText(ledger, good);
  }
}

TEST_F(RunDir, OtherNumericsAreReadButNotContinued) {
  ASSERT_TRUE(GoOn(run_, 0).ok());
  const std::string ledger = run_ + "/" + kLedgerName;
  LedgerContents contents = ReadLedger(FileOps(), ledger).value();
  const auto rewrite = [&](const char* numerics, int format) {
    std::get<OpenLine>(contents.lines[0]).numerics = numerics;
    std::get<OpenLine>(contents.lines[0]).format = format;
    std::string text;
    Digest previous;
    for (const LedgerLine& line : contents.lines) {
      text += LedgerLineText(line, previous, &previous).value();
    }
    WriteFileText(ledger, text);
  };
  rewrite("retrace-numerics-0", kFormatId);
  ExpectError(StatusCode::kUnsupported, "retrace-numerics-0",
              RunWriter::Open(run_, layout_).status());
  ExpectRun(0);
  rewrite(kNumericsId, kFormatId + 1);
  ExpectError(StatusCode::kUnsupported, "newer than this program's",
              RunReader::Open(run_).status());
}

// ---- reading ----

// Fails the test's reads if they try to write.
class ReadOnly : public FileFaults {
 public:
  FileFault Before(FileOp op, const std::string&, const std::string&) override {
    return {op == FileOp::kRead || op == FileOp::kList ? 0 : EROFS, 0};
  }
};

TEST_F(RunDir, AReadOnlyDirectoryIsReadAndNotWritten) {
  ASSERT_TRUE(GoOn(run_).ok());
  ReadOnly read_only;
  const RunReader reader = RunReader::Open(run_, 2, FileOps(&read_only)).value();
  for (int64_t k = 0; k <= kSmallLast; ++k) {
    const Status status = CheckPosition(reader, layout_, k);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  ExpectError(StatusCode::kFailed, "can be read here, but not written",
              RunWriter::Open(run_, layout_, FileOps(&read_only)).status());
}

TEST_F(RunDir, ReadersSeeAPrefixWhileARunIsWritten) {
  constexpr int64_t kLast = 12;
  ASSERT_TRUE(GoOn(run_, 0).ok());
  std::thread writer([&] { EXPECT_TRUE(GoOn(run_, kLast).ok()); });
  int64_t seen = 0;
  while (seen < kLast) {
    const Result<int64_t> last = CheckRun(run_);
    EXPECT_TRUE(last.ok()) << last.status().message();
    if (!last.ok()) break;
    EXPECT_GE(*last, seen);
    seen = *last;
  }
  writer.join();
}

}  // namespace
}  // namespace retrace
