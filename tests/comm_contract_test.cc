// One contract for every Comm: what each call moves, for all group shapes and awkward sizes, and
// how it ends when ranks disagree, give up, die or hang.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "replay/comm.h"
#include "replay/local_ranks.h"
#include "replay/shm_comm.h"
#include "replay/solo_comm.h"
#include "replay/torch_plugin.h"

namespace retrace {
namespace {

using Fn = std::function<Status(Comm&)>;

struct WorldOptions {
  double time_limit_s = 60;
  size_t slot_bytes = 4096;
};

// A way to run ranks; it returns the first cause.
struct World {
  const char* name;
  bool needs_torch;
  std::vector<int> victims;  // ranks that a test may kill: not the test itself
  Status (*run)(int ranks, const WorldOptions& options, const Fn& fn);
};

Status RunThreads(int ranks, const WorldOptions& options, const Fn& fn) {
  auto job = ShmJob::Create(
      ranks, {.slot_bytes = options.slot_bytes, .time_limit_s = options.time_limit_s});
  if (!job.ok()) return job.status();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ShmComm comm(*job, rank);
      const Status status = fn(comm);
      if (!status.ok()) comm.Abort(status);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto reason = (*job)->aborted();
  return reason ? reason->status : Status();
}

Status RunProcesses(int ranks, const WorldOptions& options, const Fn& fn) {
  LocalRanksOptions local;
  local.shm = {.slot_bytes = options.slot_bytes, .time_limit_s = options.time_limit_s};
  local.grace_s = 0.5;
  return RunLocalRanks(ranks, local, fn);
}

// A port that was free a moment ago.
int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(fd);
  return bound ? ntohs(address.sin_port) : 0;
}

struct RankReport {
  int code;
  bool written;
  char text[4000];
};

void WriteReport(RankReport* report, const Status& status) {
  report->code = static_cast<int>(status.code());
  std::strncpy(report->text, status.message().c_str(), sizeof report->text - 1);
  report->written = true;
}

// As if a launcher had started the processes; each reports for itself.
Status RunGloo(int ranks, const WorldOptions& options, const Fn& fn) {
  // Opened once, for the ranks to inherit: half a second saved for each.
  RT_RETURN_IF_ERROR(OpenTorchPlugin());
  const size_t bytes = ranks * sizeof(RankReport);
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return FailedError("mmap");
  auto* reports = static_cast<RankReport*>(map);
  JobEnvironment job;
  job.launcher = "this test";
  job.size = ranks;
  job.master_host = "127.0.0.1";
  job.master_port = FreePort();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      job.rank = rank;
      WriteReport(&reports[rank],
                  RunJobRank(job, {.join_s = 60, .call_s = options.time_limit_s}, fn));
      _exit(0);
    }
    children.push_back(pid);
  }
  for (pid_t pid : children) waitpid(pid, nullptr, 0);
  Status first;
  for (int rank = 0; rank < ranks; ++rank) {
    const RankReport& report = reports[rank];
    if (!report.written || report.code == 0) continue;
    const Status status(static_cast<StatusCode>(report.code), report.text);
    if (first.ok() || (first.code() == StatusCode::kFailed && status.code() != first.code())) {
      first = status;
    }
  }
  munmap(map, bytes);
  return first;
}

class CommContract : public testing::TestWithParam<World> {
 protected:
  void SetUp() override {
    if (!GetParam().needs_torch) return;
    const auto plugin = FindTorchPlugin();
    if (!plugin.ok()) GTEST_SKIP() << plugin.status().message();
  }

  Status Run(int ranks, const Fn& fn, const WorldOptions& options = {}) {
    return GetParam().run(ranks, options, fn);
  }
};

// Byte i of the block that `from` sends to `to` in call `serial`: known to both.
unsigned char Pattern(int serial, int from, int to, size_t i) {
  return static_cast<unsigned char>(serial * 29 + from * 101 + to * 57 + i * 7 + (i >> 8));
}

Status Differs(const Comm& comm, const RankGroup& group, const char* what, int from, size_t bytes,
               size_t i) {
  return DamagedError(fmt::format("{}: rank {}, group {}+{}*{}: byte {} of {} from rank {}", what,
                                  comm.rank(), group.first, group.stride, group.size, i, bytes,
                                  from));
}

Status TryAllToAll(Comm& comm, const RankGroup& group, size_t bytes, int serial) {
  std::vector<unsigned char> send(group.size * bytes), recv(group.size * bytes, 0xee);
  for (int j = 0; j < group.size; ++j) {
    for (size_t i = 0; i < bytes; ++i) {
      send[j * bytes + i] = Pattern(serial, comm.rank(), group.RankAt(j), i);
    }
  }
  RT_RETURN_IF_ERROR(comm.AllToAll(group, send.data(), recv.data(), bytes));
  for (int j = 0; j < group.size; ++j) {
    for (size_t i = 0; i < bytes; ++i) {
      if (recv[j * bytes + i] != Pattern(serial, group.RankAt(j), comm.rank(), i)) {
        return Differs(comm, group, "AllToAll", group.RankAt(j), bytes, i);
      }
    }
  }
  return {};
}

Status TryAllGather(Comm& comm, const RankGroup& group, size_t bytes, int serial, bool in_place) {
  std::vector<unsigned char> mine(bytes), all(group.size * bytes, 0xee);
  for (size_t i = 0; i < bytes; ++i) mine[i] = Pattern(serial, comm.rank(), 0, i);
  unsigned char* own = all.data() + group.IndexOf(comm.rank()) * bytes;
  if (in_place) std::copy(mine.begin(), mine.end(), own);
  RT_RETURN_IF_ERROR(comm.AllGather(group, in_place ? own : mine.data(), all.data(), bytes));
  for (int j = 0; j < group.size; ++j) {
    for (size_t i = 0; i < bytes; ++i) {
      if (all[j * bytes + i] != Pattern(serial, group.RankAt(j), 0, i)) {
        return Differs(comm, group, "AllGather", group.RankAt(j), bytes, i);
      }
    }
  }
  return {};
}

Status TryBroadcast(Comm& comm, const RankGroup& group, size_t bytes, int serial) {
  std::vector<unsigned char> data(bytes, 0xee);
  if (comm.rank() == group.first) {
    for (size_t i = 0; i < bytes; ++i) data[i] = Pattern(serial, comm.rank(), 0, i);
  }
  RT_RETURN_IF_ERROR(comm.Broadcast(group, data.data(), bytes));
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != Pattern(serial, group.first, 0, i)) {
      return Differs(comm, group, "Broadcast", group.first, bytes, i);
    }
  }
  return {};
}

Status TryAllCalls(Comm& comm, const RankGroup& group, const std::vector<size_t>& sizes) {
  int serial = 0;
  for (size_t bytes : sizes) {
    comm.set_phase(fmt::format("{} bytes", bytes));
    RT_RETURN_IF_ERROR(TryAllToAll(comm, group, bytes, ++serial));
    RT_RETURN_IF_ERROR(TryAllGather(comm, group, bytes, ++serial, false));
    RT_RETURN_IF_ERROR(TryAllGather(comm, group, bytes, ++serial, true));
    RT_RETURN_IF_ERROR(TryBroadcast(comm, group, bytes, ++serial));
    RT_RETURN_IF_ERROR(comm.Barrier(group));
  }
  return {};
}

const std::vector<size_t> kSizes = {0, 1, 3, 64, 1365, 4096, 4097, 50001};

// The groups of `rank` in a job of tp x dp ranks: tensor-parallel ones contiguous, data-parallel
// ones strided.
RankGroup TensorGroup(int rank, int tp) { return {rank / tp * tp, 1, tp}; }
RankGroup DataGroup(int rank, int tp, int dp) { return {rank % tp, tp, dp}; }

TEST_P(CommContract, EveryCallMovesEveryByteAmongAllRanks) {
  for (int ranks : {1, 2, 3}) {
    const Status status =
        Run(ranks, [](Comm& comm) { return TryAllCalls(comm, comm.World(), kSizes); });
    EXPECT_TRUE(status.ok()) << ranks << " ranks: " << status.message();
  }
}

TEST_P(CommContract, ContiguousAndStridedGroupsTakeTurnsInOneJob) {
  const Status status = Run(4, [](Comm& comm) -> Status {
    const RankGroup tensor = TensorGroup(comm.rank(), 2);
    const RankGroup data = DataGroup(comm.rank(), 2, 2);
    for (int round = 0; round < 2; ++round) {
      RT_RETURN_IF_ERROR(TryAllCalls(comm, tensor, {1, 5000}));
      RT_RETURN_IF_ERROR(TryAllCalls(comm, data, {7, 5000}));
      RT_RETURN_IF_ERROR(TryAllCalls(comm, comm.World(), {130}));
      RT_RETURN_IF_ERROR(TryAllCalls(comm, {comm.rank(), 1, 1}, {0, 9}));
    }
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_P(CommContract, SubgroupsWorkWhileTheOtherRanksDoNothing) {
  const Status status = Run(4, [](Comm& comm) -> Status {
    for (const RankGroup& group : {RankGroup{1, 1, 2}, RankGroup{0, 3, 2}, RankGroup{1, 1, 3}}) {
      const int index = group.IndexOf(comm.rank());
      const bool member =
          comm.rank() >= group.first && index < group.size && group.RankAt(index) == comm.rank();
      if (member) RT_RETURN_IF_ERROR(TryAllCalls(comm, group, {5, 9000}));
    }
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_P(CommContract, ManySmallCallsKeepTheirOrder) {
  const Status status = Run(2, [](Comm& comm) -> Status {
    for (int serial = 0; serial < 300; ++serial) {
      RT_RETURN_IF_ERROR(TryAllToAll(comm, comm.World(), 5, serial));
      RT_RETURN_IF_ERROR(TryBroadcast(comm, comm.World(), 3, serial));
    }
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_P(CommContract, BarrierHoldsEveryoneUntilTheLastArrives) {
  const Status status = Run(3, [](Comm& comm) -> Status {
    using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: one clock for all processes
    if (comm.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    const int64_t arrived = Clock::now().time_since_epoch().count();
    RT_RETURN_IF_ERROR(comm.Barrier(comm.World()));
    const int64_t left = Clock::now().time_since_epoch().count();
    std::vector<int64_t> all(3);
    RT_RETURN_IF_ERROR(comm.AllGather(comm.World(), &arrived, all.data(), sizeof arrived));
    for (int64_t other : all) {
      if (other > left) return FailedError("a rank left before another arrived");
    }
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.message();
}

void ExpectMentions(const Status& status, const std::vector<std::string>& words) {
  EXPECT_EQ(StatusCode::kFailed, status.code()) << status.message();
  for (const std::string& word : words) {
    EXPECT_NE(std::string::npos, status.message().find(word))
        << "no '" << word << "' in: " << status.message();
  }
}

TEST_P(CommContract, DifferentCallsAreNamedNotMixedUp) {
  const Status status = Run(2, [](Comm& comm) -> Status {
    comm.set_phase("update 17");
    char data[64] = {};
    return comm.rank() == 0 ? comm.AllGather(comm.World(), data, data, 4)
                            : comm.Barrier(comm.World());
  });
  ExpectMentions(status, {"AllGather of 4 bytes", "Barrier", "disagree", "rank 0", "rank 1"});
}

TEST_P(CommContract, DifferentSizesAreNamedNotMixedUp) {
  const Status status = Run(2, [](Comm& comm) -> Status {
    std::vector<char> data(20000), all(40000);
    return comm.AllGather(comm.World(), data.data(), all.data(), comm.rank() == 0 ? 20000 : 19999);
  });
  ExpectMentions(status, {"AllGather of 20000 bytes", "AllGather of 19999 bytes", "disagree"});
}

TEST_P(CommContract, DifferentGroupsAreNamedNotMixedUp) {
  const Status status = Run(3, [](Comm& comm) -> Status {
    char data[64] = {};
    if (comm.rank() == 2) return {};
    const RankGroup group = comm.rank() == 0 ? RankGroup{0, 1, 2} : RankGroup{0, 1, 3};
    return comm.Broadcast(group, data, 8);
  });
  ExpectMentions(status, {"ranks 0..1", "ranks 0..2", "disagree"});
}

TEST_P(CommContract, RankThatIsDoneWhileOthersStillCallIsFound) {
  const Status status =
      Run(2,
          [](Comm& comm) -> Status {
            comm.set_phase("update 5");
            char data[2] = {};
            return comm.rank() == 0 ? Status() : comm.AllGather(comm.World(), data, data, 1);
          },
          {.time_limit_s = 1});
  ExpectMentions(status, {"AllGather of 1 bytes", "update 5"});
}

TEST_P(CommContract, ErrorOfOneRankEndsTheCallsOfAll) {
  const Status status = Run(3, [](Comm& comm) -> Status {
    if (comm.rank() == 2) return DamagedError("shard 7 of step 3 is damaged");
    char data[3] = {};
    const Status first = comm.AllGather(comm.World(), data, data, 1);
    if (first.ok()) return UsageError("a call succeeded without a member");
    if (first.message().find("shard 7") == std::string::npos) {
      return UsageError("the reason did not arrive: " + first.message());
    }
    const Status second = comm.Barrier({0, 1, 2});
    if (second.ok()) return UsageError("a Comm was usable after an error");
    return first;
  });
  EXPECT_EQ(StatusCode::kDamaged, status.code()) << status.message();
  EXPECT_NE(std::string::npos, status.message().find("shard 7 of step 3 is damaged"))
      << status.message();
}

TEST_P(CommContract, HungRankPassesTheTimeLimitAndIsNamed) {
  const auto start = std::chrono::steady_clock::now();
  const Status status = Run(2,
                            [](Comm& comm) -> Status {
                              comm.set_phase("update 23");
                              if (comm.rank() == 1) {
                                comm.set_phase("update 23, slow");
                                RT_RETURN_IF_ERROR(comm.Barrier({1, 1, 1}));
                                std::this_thread::sleep_for(std::chrono::seconds(2));
                              }
                              return comm.Barrier(comm.World());
                            },
                            {.time_limit_s = 0.3});
  ExpectMentions(status, {"rank 1", "Barrier among ranks 0..1", "update 23", "time limit"});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

class CommOfProcesses : public CommContract {};

TEST_P(CommOfProcesses, KilledRankEndsTheJobAtOnce) {
  for (int victim : GetParam().victims) {
    const Status status = Run(3,
                              [victim](Comm& comm) -> Status {
                                char data[3] = {};
                                for (int i = 0; i < 1000000; ++i) {
                                  comm.set_phase(fmt::format("round {}", i));
                                  if (comm.rank() == victim && i == 20) kill(getpid(), SIGKILL);
                                  RT_RETURN_IF_ERROR(comm.AllGather(comm.World(), data, data, 1));
                                }
                                return {};
                              },
                              {.time_limit_s = 1000});
    ExpectMentions(status, {fmt::format("rank {}", victim)});
  }
}

// What ranks see of each other while one of them is stopped.
struct StoppedRank {
  std::atomic<int> ended_calls;  // of the other ranks
  std::atomic<bool> woken_in_vain;

  // Stops this process until `others` calls have ended, or for a minute.
  void Stop(int others) {
    const pid_t stopped = getpid();
    if (fork() == 0) {
      for (int i = 0; i < 6000 && ended_calls < others; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      woken_in_vain = ended_calls < others;
      kill(stopped, SIGCONT);
      _exit(0);
    }
    raise(SIGSTOP);
  }
};

// With Gloo rank 0 serves the store, which then accepts connections and never answers.
TEST_P(CommOfProcesses, StoppedRankEndsTheCallsOfTheOthers) {
  void* map =
      mmap(nullptr, sizeof(StoppedRank), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(MAP_FAILED, map);
  for (int victim : GetParam().victims) {
    auto* shared = new (map) StoppedRank{};
    const Status status = Run(3,
                              [victim, shared](Comm& comm) -> Status {
                                char data[3] = {};
                                for (int i = 0; i < 1000000; ++i) {
                                  if (comm.rank() == victim && i == 20) shared->Stop(2);
                                  const Status called = comm.AllGather(comm.World(), data, data, 1);
                                  if (called.ok()) continue;
                                  if (comm.rank() != victim) ++shared->ended_calls;
                                  return called;
                                }
                                return {};
                              },
                              {.time_limit_s = 0.5});
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(2, shared->ended_calls.load()) << "victim " << victim;
    EXPECT_FALSE(shared->woken_in_vain.load()) << "victim " << victim;
  }
  munmap(map, sizeof(StoppedRank));
}

std::string WorldName(const testing::TestParamInfo<World>& info) { return info.param.name; }

const World kShmThreads = {"ShmThreads", false, {}, RunThreads};
const World kShmProcesses = {"ShmProcesses", false, {1, 2}, RunProcesses};
const World kGloo = {"Gloo", true, {0, 2}, RunGloo};

INSTANTIATE_TEST_SUITE_P(Worlds, CommContract, testing::Values(kShmThreads, kShmProcesses, kGloo),
                         WorldName);
INSTANTIATE_TEST_SUITE_P(Worlds, CommOfProcesses, testing::Values(kShmProcesses, kGloo), WorldName);

TEST(SoloComm, CopiesItsOwnBlockAndNeedsNobody) {
  SoloComm comm;
  const Status status = TryAllCalls(comm, comm.World(), kSizes);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace retrace
