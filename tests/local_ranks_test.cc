// RunLocalRanks ends, with the right words, whatever its ranks do. (What the calls between them
// move is tested by comm_contract_test.cc.)
#include "replay/local_ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "kernels/thread_pool.h"

namespace retrace {
namespace {

void SleepSeconds(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

LocalRanksOptions Quick() {
  LocalRanksOptions options;
  options.shm.time_limit_s = 60;
  options.grace_s = 0.2;
  return options;
}

bool Has(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

void ExpectNoChildLeft() {
  EXPECT_EQ(-1, waitpid(-1, nullptr, WNOHANG));
  EXPECT_EQ(ECHILD, errno);
}

Status Gather(Comm& comm) {
  char all[kShmRanksMax] = {};
  return comm.AllGather(comm.World(), all + comm.rank(), all, 1);
}

TEST(LocalRanks, RankZeroIsTheCallerAndTheOthersAreItsChildren) {
  const pid_t caller = getpid();
  const Status status = RunLocalRanks(3, Quick(), [caller](Comm& comm) -> Status {
    if ((comm.rank() == 0) != (getpid() == caller)) return FailedError("wrong process");
    if (comm.rank() > 0 && getppid() != caller) return FailedError("wrong parent");
    if (comm.size() != 3) return FailedError("wrong size");
    return Gather(comm);
  });
  EXPECT_TRUE(status.ok()) << status.message();
  ExpectNoChildLeft();
}

TEST(LocalRanks, OneRankNeedsNoProcess) {
  const Status status = RunLocalRanks(1, Quick(), [](Comm& comm) -> Status {
    return comm.size() == 1 ? UsageError("as it came") : Status();
  });
  EXPECT_EQ("as it came", status.message());
  EXPECT_EQ(StatusCode::kUsage, status.code());
}

TEST(LocalRanks, ImpossibleNumbersOfRanksAreRefused) {
  for (int ranks : {-1, 0, kShmRanksMax + 1}) {
    const Status status = RunLocalRanks(ranks, Quick(), [](Comm&) { return Status(); });
    EXPECT_EQ(StatusCode::kUsage, status.code()) << ranks;
  }
}

TEST(LocalRanks, ErrorOfAChildReachesTheCallerWithCodeRankAndText) {
  const Status status = RunLocalRanks(3, Quick(), [](Comm& comm) -> Status {
    return comm.rank() == 1 ? DamagedError("data.bin: 12 bytes, expected 16") : Gather(comm);
  });
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_TRUE(Has(status.message(), "rank 1 (pid ")) << status.message();
  EXPECT_TRUE(Has(status.message(), "data.bin: 12 bytes, expected 16")) << status.message();
  ExpectNoChildLeft();
}

TEST(LocalRanks, ErrorThatAllRanksFindReadsAsIfThereWereOne) {
  const Status status = RunLocalRanks(
      3, Quick(), [](Comm&) -> Status { return UsageError("recipe.toml:3: no such key"); });
  EXPECT_EQ(StatusCode::kUsage, status.code());
  EXPECT_EQ("recipe.toml:3: no such key", status.message());
}

TEST(LocalRanks, ExceptionInAnyRankIsAnError) {
  for (int thrower : {0, 1}) {
    const Status status = RunLocalRanks(2, Quick(), [thrower](Comm& comm) -> Status {
      if (comm.rank() == thrower) throw std::runtime_error("from a library");
      return Gather(comm);
    });
    EXPECT_EQ(StatusCode::kFailed, status.code());
    EXPECT_TRUE(Has(status.message(), "from a library")) << status.message();
    EXPECT_TRUE(Has(status.message(), fmt::format("rank {}", thrower))) << status.message();
    ExpectNoChildLeft();
  }
}

TEST(LocalRanks, ChildThatExitsEarlyIsLost) {
  const Status status = RunLocalRanks(2, Quick(), [](Comm& comm) -> Status {
    if (comm.rank() == 1) _exit(0);
    return Gather(comm);
  });
  EXPECT_EQ(StatusCode::kFailed, status.code());
  EXPECT_TRUE(Has(status.message(), "exited with code 0 before the end")) << status.message();
}

TEST(LocalRanks, KilledChildIsSeenByItsSiblingWhileRankZeroComputes) {
  const Status status = RunLocalRanks(3, Quick(), [](Comm& comm) -> Status {
    comm.set_phase("update 8");
    if (comm.rank() == 2) raise(SIGKILL);
    if (comm.rank() == 0) SleepSeconds(0.5);
    const Status gathered = Gather(comm);
    if (comm.rank() == 1 && !Has(gathered.message(), "signal 9")) abort();
    return gathered;
  });
  EXPECT_EQ(StatusCode::kFailed, status.code());
  EXPECT_TRUE(Has(status.message(), "rank 2 (pid ")) << status.message();
  EXPECT_TRUE(Has(status.message(), "signal 9")) << status.message();
  ExpectNoChildLeft();
}

TEST(LocalRanks, ChildThatDoesNotComeBackIsKilledAfterTheGrace) {
  const Status status = RunLocalRanks(2, Quick(), [](Comm& comm) -> Status {
    if (comm.rank() == 1) SleepSeconds(10000);
    return UnsupportedError("rank 0 gives up");
  });
  EXPECT_EQ("rank 0 gives up", status.message());
  ExpectNoChildLeft();
}

TEST(LocalRanks, StuckRankZeroIsReported) {
  int pipe_ends[2];
  ASSERT_EQ(0, pipe(pipe_ends));
  LocalRanksOptions options = Quick();
  options.shm.time_limit_s = 0.2;
  options.rank0_is_stuck = [&](const Status& status) {
    EXPECT_TRUE(Has(status.message(), "rank 0")) << status.message();
    EXPECT_EQ(1, write(pipe_ends[1], "x", 1));
  };
  const Status status = RunLocalRanks(2, options, [&](Comm& comm) -> Status {
    if (comm.rank() == 1) return Gather(comm);
    char byte;
    if (read(pipe_ends[0], &byte, 1) != 1) return UsageError("no report");
    return Gather(comm);
  });
  EXPECT_EQ(StatusCode::kFailed, status.code());
  EXPECT_TRUE(Has(status.message(), "time limit")) << status.message();
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  ExpectNoChildLeft();
}

TEST(LocalRanks, ChildrenLeaveStoppingToRankZero) {
  const Status status = RunLocalRanks(2, Quick(), [](Comm& comm) -> Status {
    if (comm.rank() == 1) {
      for (int signal_number : {SIGINT, SIGTERM, SIGHUP}) raise(signal_number);
    }
    return Gather(comm);
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(LocalRanks, RanksDieWithTheCaller) {
  // The ranks hold the write end; it reads as closed once none of them lives.
  int pipe_ends[2];
  ASSERT_EQ(0, pipe(pipe_ends));
  const pid_t caller = fork();
  ASSERT_GE(caller, 0);
  if (caller == 0) {
    close(pipe_ends[0]);
    const Status status = RunLocalRanks(3, Quick(), [&](Comm& comm) -> Status {
      RT_RETURN_IF_ERROR(Gather(comm));
      if (write(pipe_ends[1], "r", 1) != 1) return FailedError("pipe");
      SleepSeconds(10000);
      return {};
    });
    _exit(static_cast<int>(status.code()));
  }
  close(pipe_ends[1]);
  char byte;
  for (int rank = 0; rank < 3; ++rank) ASSERT_EQ(1, read(pipe_ends[0], &byte, 1));
  kill(caller, SIGKILL);
  EXPECT_EQ(0, read(pipe_ends[0], &byte, 1));
  close(pipe_ends[0]);
  EXPECT_EQ(caller, waitpid(caller, nullptr, 0));
}

TEST(LocalRanks, JobsFollowEachOtherInOneProcess) {
  for (int ranks : {2, 5, 1, 8}) {
    const Status status = RunLocalRanks(ranks, Quick(), Gather);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  ExpectNoChildLeft();
}

TEST(LocalRanks, OversubscriptionIsSaidAndOnlyThen) {
  const int processors = AvailableCpus();
  EXPECT_EQ("", OversubscriptionNote(1, processors));
  EXPECT_EQ("", OversubscriptionNote(processors, 1));
  const std::string note = OversubscriptionNote(processors + 1, 2);
  EXPECT_TRUE(Has(note, fmt::format("{} threads on {}", 2 * (processors + 1), processors))) << note;
}

}  // namespace
}  // namespace retrace
