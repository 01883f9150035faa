// What the door to libretrace_torch.so says when there is nothing behind it, or not enough ranks.
// (The Comm behind it is tested by comm_contract_test.cc.)
#include "replay/torch_plugin.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace retrace {
namespace {

class PluginFolder {
 public:
  explicit PluginFolder(const std::string& folder) {
    setenv("RETRACE_PLUGIN_DIR", folder.c_str(), 1);
  }
  ~PluginFolder() { unsetenv("RETRACE_PLUGIN_DIR"); }
};

void ExpectUnsupported(const Status& status, const std::string& word) {
  EXPECT_EQ(StatusCode::kUnsupported, status.code());
  EXPECT_NE(std::string::npos, status.message().find(word)) << status.message();
  EXPECT_NE(std::string::npos, status.message().find("scripts/setup.sh")) << status.message();
}

TEST(TorchPlugin, AbsenceIsSaidWithTheWayToGetIt) {
  const PluginFolder folder("/nonexistent");
  ExpectUnsupported(FindTorchPlugin().status(), "/nonexistent");
  ExpectUnsupported(JoinJob({}, {}).status(), "/nonexistent");
  const Status run = RunJobRank({}, {}, [](Comm&) -> Status { return UsageError("not reached"); });
  ExpectUnsupported(run, "libretrace_torch.so");
}

TEST(TorchPlugin, FileThatIsNoLibraryIsRefused) {
  const std::string path = testing::TempDir() + "retrace_plugin." + std::to_string(getpid());
  ASSERT_EQ(0, mkdir(path.c_str(), 0700));
  std::ofstream(path + "/libretrace_torch.so") << "not a library";
  {
    const PluginFolder folder(path);
    ExpectUnsupported(OpenTorchPlugin(), path);
  }
  std::filesystem::remove_all(path);
}

TEST(TorchPlugin, MissingRanksAreReportedAtTheTimeLimit) {
  if (!FindTorchPlugin().ok()) GTEST_SKIP() << FindTorchPlugin().status().message();
  JobEnvironment job;
  job.launcher = "this test";
  job.size = 2;
  job.master_host = "127.0.0.1";
  job.master_port = 20000 + getpid() % 12000;
  for (int rank : {0, 1}) {  // alone: rank 1 finds no store, rank 0 serves one and finds nobody
    job.rank = rank;
    const auto comm = JoinJob(job, {.join_s = 0.5});
    ASSERT_FALSE(comm.ok());
    EXPECT_EQ(StatusCode::kFailed, comm.status().code());
    for (const char* word : {"of 2", "127.0.0.1", "0.5 s", "MASTER_ADDR"}) {
      EXPECT_NE(std::string::npos, comm.status().message().find(word)) << comm.status().message();
    }
  }
}

// torchrun's agent serves the store, and all ranks, 0 too, come as its clients.
TEST(TorchPlugin, StoreOfTheLauncherIsJoinedNotServed) {
  if (!FindTorchPlugin().ok()) GTEST_SKIP() << FindTorchPlugin().status().message();
  JobEnvironment job;
  job.launcher = "this test";
  job.master_host = "127.0.0.1";
  job.master_port = 20000 + (getpid() + 6000) % 12000;
  job.attempt = "agent";
  const auto agent = JoinJob(job, {.join_s = 60});
  ASSERT_TRUE(agent.ok()) << agent.status().message();
  job.launcher_serves = true;
  job.attempt = "job/0";
  const auto rank = JoinJob(job, {.join_s = 60});
  ASSERT_TRUE(rank.ok()) << rank.status().message();
  const Status status = (*rank.value()).Barrier({0, 1, 1});
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace
}  // namespace retrace
