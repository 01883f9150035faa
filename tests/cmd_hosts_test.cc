// Ranks on two hosts: two network namespaces with a cable between them, whose host name leads
// nowhere from the other side, as on Debian. Needs root, iproute2 and the plug-in.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "replay/torch_plugin.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

class Hosts : public testing::Test {
 protected:
  void SetUp() override {
    const auto plugin = FindTorchPlugin();
    if (!plugin.ok()) GTEST_SKIP() << plugin.status().message();
    std::string commands = "exec 2>/dev/null; set -e; ";
    for (const char* side : {"a", "b"}) commands += "ip netns add " + Name(side) + "; ";
    commands += "ip link add " + Name("a") + " type veth peer name " + Name("b") + "; ";
    for (const auto& [side, last] : {std::pair("a", "1"), std::pair("b", "2")}) {
      commands += "ip link set " + Name(side) + " netns " + Name(side) + "; ";
      const std::string inside = "ip -n " + Name(side) + " ";
      commands += inside + "addr add 10.99.7." + last + "/24 dev " + Name(side) + "; ";
      commands += inside + "link set " + Name(side) + " up; " + inside + "link set lo up; ";
    }
    if (std::system(commands.c_str()) != 0) {
      GTEST_SKIP() << "network namespaces can not be made here (root and iproute2 are needed)";
    }
  }
  void TearDown() override {
    for (const char* side : {"a", "b"}) {
      const std::string command = "ip netns del " + Name(side) + " 2>/dev/null";
      if (std::system(command.c_str()) != 0) continue;  // was never made
    }
  }

  // Of a namespace and its end of the cable; at most 15 characters.
  static std::string Name(const std::string& side) {
    return "rt" + side + std::to_string(getpid());
  }

  std::vector<std::string> Rank(int rank, const std::string& run) const {
    return {"/usr/bin/env",
            "ip",
            "netns",
            "exec",
            Name(rank == 0 ? "a" : "b"),
            "/usr/bin/env",
            "-u",
            "GLOO_SOCKET_IFNAME",
            "RANK=" + std::to_string(rank),
            "WORLD_SIZE=2",
            "MASTER_ADDR=10.99.7.1",
            "MASTER_PORT=29511",
            ProgramPath(),
            "train",
            SourceDir() + "/examples/tiny.toml",
            "-o",
            run,
            "--set",
            "data.path=" + TestData("dataset/tiny"),
            "--until",
            "4",
            "--timeout",
            "60"};
  }

  TempFolder folder_;
};

TEST_F(Hosts, TrainTheRunOfOneHost) {
  Process first(Rank(0, folder_ / "two"), folder_ / "log0");
  Process second(Rank(1, folder_ / "two"), folder_ / "log1");
  const Finished ended = first.Wait(), other = second.Wait();
  ASSERT_EQ(0, ended.code) << ended.err;
  EXPECT_EQ(0, other.code) << other.err;
  const Finished alone = RunProgram(
      {"train", SourceDir() + "/examples/tiny.toml", "-o", folder_ / "one",
       "--set", "data.path=" + TestData("dataset/tiny"), "--until", "4"});
  ASSERT_EQ(0, alone.code) << alone.err;
  const Finished compared = RunProgram({"diff", folder_ / "one", folder_ / "two"});
  EXPECT_EQ(0, compared.code) << compared.out;
}

}  // namespace
}  // namespace retrace
