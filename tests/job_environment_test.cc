#include "replay/job_environment.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace retrace {
namespace {

using Variables = std::map<std::string, std::string>;

Result<std::optional<JobEnvironment>> Job(const Variables& variables) {
  return JobFromEnvironment([&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29500"}};
const Variables kSlurm = {{"SLURM_PROCID", "2"},
                          {"SLURM_NTASKS", "16"},
                          {"SLURM_STEP_NUM_TASKS", "4"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_JOB_NODELIST", "gpu[03-07,9],login"},
                          {"SLURM_JOB_ID", "31"}};

Variables With(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables Without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST(JobEnvironment, NoLauncherIsNoJob) {
  for (const Variables& variables :
       {Variables{}, Variables{{"RANK", ""}, {"WORLD_SIZE", ""}}, Variables{{"LOCAL_RANK", "1"}},
        Variables{{"SLURM_JOB_ID", "5"}, {"SLURM_NTASKS", "4"}},
        // A batch script, before any srun.
        Variables{{"SLURM_JOB_ID", "5"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}}) {
    const auto job = Job(variables);
    ASSERT_TRUE(job.ok()) << job.status().message();
    EXPECT_FALSE(job.value().has_value());
  }
}

TEST(JobEnvironment, TorchrunsVariablesAreRead) {
  const auto job = Job(kTorchrun);
  ASSERT_TRUE(job.ok()) << job.status().message();
  const JobEnvironment& place = *job.value();
  EXPECT_EQ("torchrun", place.launcher);
  EXPECT_EQ(3, place.rank);
  EXPECT_EQ(8, place.size);
  EXPECT_EQ(1, place.local_rank);
  EXPECT_EQ("node7", place.master_host);
  EXPECT_EQ(29500, place.master_port);
  EXPECT_FALSE(place.launcher_serves);
}

TEST(JobEnvironment, TorchrunsAgentMayKeepTheStore) {
  const auto first = Job(With(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"));
  EXPECT_TRUE(first.value()->launcher_serves);
  const auto second = Job(With(With(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "True"),
                               "TORCHELASTIC_RESTART_COUNT", "1"));
  EXPECT_NE(first.value()->attempt, second.value()->attempt);
}

TEST(JobEnvironment, SlurmsVariablesAreRead) {
  const auto job = Job(kSlurm);
  ASSERT_TRUE(job.ok()) << job.status().message();
  const JobEnvironment& place = *job.value();
  EXPECT_EQ("slurm", place.launcher);
  EXPECT_EQ(2, place.rank);
  EXPECT_EQ(4, place.size);
  EXPECT_EQ("gpu03", place.master_host);
  EXPECT_EQ(20031, place.master_port);
}

TEST(JobEnvironment, SlurmsStepCountsBeforeItsAllocation) {
  const auto job =
      Job(With(With(kSlurm, "SLURM_STEP_NUM_TASKS", "3"), "SLURM_STEP_NODELIST", "b2"));
  ASSERT_TRUE(job.ok()) << job.status().message();
  EXPECT_EQ(3, job.value()->size);
  EXPECT_EQ("b2", job.value()->master_host);
}

TEST(JobEnvironment, MasterVariablesOverrideSlurms) {
  const auto job = Job(With(With(kSlurm, "MASTER_ADDR", "10.0.0.7"), "MASTER_PORT", "4000"));
  ASSERT_TRUE(job.ok()) << job.status().message();
  EXPECT_EQ("10.0.0.7", job.value()->master_host);
  EXPECT_EQ(4000, job.value()->master_port);
}

TEST(JobEnvironment, TorchrunInsideSlurmIsTorchruns) {
  Variables both = kSlurm;
  both.insert(kTorchrun.begin(), kTorchrun.end());
  EXPECT_EQ("torchrun", Job(both).value()->launcher);
}

TEST(JobEnvironment, WrongVariablesAreNamed) {
  const struct {
    Variables variables;
    const char* name;
  } cases[] = {
      {Without(kTorchrun, "WORLD_SIZE"), "WORLD_SIZE"},
      {Without(kTorchrun, "RANK"), "RANK"},
      {Without(kTorchrun, "MASTER_ADDR"), "MASTER_ADDR"},
      {Without(kTorchrun, "MASTER_PORT"), "MASTER_PORT"},
      {With(kTorchrun, "RANK", "8"), "RANK=8"},
      {With(kTorchrun, "RANK", "-1"), "RANK=-1"},
      {With(kTorchrun, "RANK", "three"), "RANK=three"},
      {With(kTorchrun, "WORLD_SIZE", "0"), "WORLD_SIZE=0"},
      {With(kTorchrun, "WORLD_SIZE", "8 "), "WORLD_SIZE=8 "},
      {With(kTorchrun, "LOCAL_RANK", "8"), "LOCAL_RANK=8"},
      {With(kTorchrun, "MASTER_PORT", "65536"), "MASTER_PORT=65536"},
      {With(kTorchrun, "MASTER_PORT", "99999999999999999999"), "MASTER_PORT"},
      {With(kSlurm, "SLURM_STEP_NUM_TASKS", "x"), "SLURM_STEP_NUM_TASKS"},
      {Without(kSlurm, "SLURM_JOB_NODELIST"), "MASTER_ADDR"},
      {With(kSlurm, "SLURM_PROCID", "4"), "SLURM_PROCID=4"},
      {With(kSlurm, "SLURM_JOB_NODELIST", "gpu[03"), "gpu[03"},
      {With(kSlurm, "SLURM_JOB_ID", "x"), "SLURM_JOB_ID=x"},
  };
  for (const auto& c : cases) {
    const auto job = Job(c.variables);
    ASSERT_FALSE(job.ok()) << c.name;
    EXPECT_EQ(StatusCode::kUsage, job.status().code());
    EXPECT_NE(std::string::npos, job.status().message().find(c.name)) << job.status().message();
  }
}

TEST(JobEnvironment, FirstHostOfEveryShapeOfNodeList) {
  const std::map<std::string, std::string> lists = {
      {"n1", "n1"},
      {"n1,n2", "n1"},
      {"n[1-4]", "n1"},
      {"n[007,009-012]", "n007"},
      {"n[5]", "n5"},
      {"rack[2-3]n[01-04].cluster,x", "rack2n01.cluster"},
      {"a-b[1-2]-ib", "a-b1-ib"}};
  for (const auto& [list, host] : lists) {
    const auto first = FirstHostOfNodeList(list);
    ASSERT_TRUE(first.ok()) << first.status().message();
    EXPECT_EQ(host, *first);
  }
  for (const char* bad : {"", ",a", "n[", "n[]", "n[a]", "n]", "n[1", "n[1x]", "[", "n[-3]"}) {
    EXPECT_FALSE(FirstHostOfNodeList(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace retrace
