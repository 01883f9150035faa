#include "replay/job_environment.h"

#include <fmt/format.h>

#include <charconv>
#include <utility>

namespace retrace {
namespace {

constexpr int kRanksMax = 1 << 20;
constexpr int kSlurmPortFirst = 20000;  // below Linux's ephemeral ports
constexpr int kSlurmPorts = 12000;

std::optional<std::string> Read(const EnvironmentReader& read, const char* name) {
  const char* value = read(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

Result<int> ReadNumber(const EnvironmentReader& read, const char* name, int low, int high) {
  const std::optional<std::string> text = Read(read, name);
  if (!text) return UsageError(fmt::format("environment: {} is missing", name));
  int value = 0;
  const char* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) {
    return UsageError(fmt::format("environment: {}={}: expected a whole number from {} to {}", name,
                                  *text, low, high));
  }
  return value;
}

// The number of `name`, or `otherwise` where it is not set.
Result<int> ReadNumberOr(const EnvironmentReader& read, const char* name, int low, int high,
                         int otherwise) {
  if (!Read(read, name)) return otherwise;
  return ReadNumber(read, name, low, high);
}

Status ReadPlace(const EnvironmentReader& read, const char* rank_name, const char* size_name,
                 const char* local_name, JobEnvironment* job) {
  RT_ASSIGN_OR_RETURN(job->size, ReadNumber(read, size_name, 1, kRanksMax));
  RT_ASSIGN_OR_RETURN(job->rank, ReadNumber(read, rank_name, 0, kRanksMax));
  if (job->rank >= job->size) {
    return UsageError(fmt::format("environment: {}={} but {}={}: ranks count from 0", rank_name,
                                  job->rank, size_name, job->size));
  }
  RT_ASSIGN_OR_RETURN(job->local_rank, ReadNumberOr(read, local_name, 0, job->size - 1, 0));
  return {};
}

Result<std::optional<JobEnvironment>> FromTorchrun(const EnvironmentReader& read) {
  JobEnvironment job;
  job.launcher = "torchrun";
  RT_RETURN_IF_ERROR(ReadPlace(read, "RANK", "WORLD_SIZE", "LOCAL_RANK", &job));
  const std::optional<std::string> host = Read(read, "MASTER_ADDR");
  if (!host) {
    return UsageError(
        "environment: RANK and WORLD_SIZE are set, but MASTER_ADDR, the host of rank 0, is missing "
        "(torchrun sets it); unset RANK and WORLD_SIZE if this is no such job");
  }
  job.master_host = *host;
  RT_ASSIGN_OR_RETURN(job.master_port, ReadNumber(read, "MASTER_PORT", 1, 65535));
  const std::string serves = Read(read, "TORCHELASTIC_USE_AGENT_STORE").value_or("");
  job.launcher_serves = serves == "True" || serves == "true" || serves == "1";
  job.attempt = Read(read, "TORCHELASTIC_RUN_ID").value_or("job") + "/" +
                Read(read, "TORCHELASTIC_RESTART_COUNT").value_or("0");
  return std::optional<JobEnvironment>(std::move(job));
}

Result<std::optional<JobEnvironment>> FromSlurm(const EnvironmentReader& read) {
  // A batch script has SLURM_PROCID and SLURM_NTASKS too, but nobody started the other tasks yet:
  // a job that waited for them would wait for ever. srun numbers its tasks within a step.
  if (!Read(read, "SLURM_STEP_NUM_TASKS")) return std::optional<JobEnvironment>();
  JobEnvironment job;
  job.launcher = "slurm";
  RT_RETURN_IF_ERROR(
      ReadPlace(read, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", &job));
  if (std::optional<std::string> host = Read(read, "MASTER_ADDR")) {
    job.master_host = *host;
  } else {
    std::optional<std::string> list;
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      if (!list) list = Read(read, name);
    }
    if (!list) {
      return UsageError(
          "environment: SLURM_PROCID is set, but neither SLURM_STEP_NODELIST nor "
          "SLURM_JOB_NODELIST; set MASTER_ADDR to the host of rank 0");
    }
    RT_ASSIGN_OR_RETURN(job.master_host, FirstHostOfNodeList(*list));
  }
  // Steps of one allocation may run side by side on one host.
  RT_ASSIGN_OR_RETURN(const int id, ReadNumberOr(read, "SLURM_JOB_ID", 0, 2147483647, 0));
  RT_ASSIGN_OR_RETURN(const int step_id, ReadNumberOr(read, "SLURM_STEP_ID", 0, 2147483647, 0));
  const int port = kSlurmPortFirst + (id % kSlurmPorts + step_id % kSlurmPorts * 7) % kSlurmPorts;
  RT_ASSIGN_OR_RETURN(job.master_port, ReadNumberOr(read, "MASTER_PORT", 1, 65535, port));
  job.attempt =
      fmt::format("{}.{}/{}", id, step_id, Read(read, "SLURM_RESTART_COUNT").value_or("0"));
  return std::optional<JobEnvironment>(std::move(job));
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

Result<std::optional<JobEnvironment>> JobFromEnvironment(const EnvironmentReader& read) {
  const bool rank = Read(read, "RANK").has_value();
  const bool size = Read(read, "WORLD_SIZE").has_value();
  if (rank && size) return FromTorchrun(read);
  if (Read(read, "SLURM_PROCID")) return FromSlurm(read);
  if (rank || size) {
    return UsageError(
        fmt::format("environment: {} is set but {} is not; torchrun sets both. Set or unset both",
                    rank ? "RANK" : "WORLD_SIZE", rank ? "WORLD_SIZE" : "RANK"));
  }
  return std::optional<JobEnvironment>();
}

Result<std::string> FirstHostOfNodeList(std::string_view list) {
  const auto bad = [list](const char* why) {
    return UsageError(fmt::format("environment: Slurm node list '{}': {}", list, why));
  };
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      if (list[i] == ']') return bad("']' without '['");
      host += list[i];
      continue;
    }
    const size_t close = list.find(']', i);
    if (close == std::string_view::npos) return bad("'[' without ']'");
    const size_t start = ++i;
    while (IsDigit(list[i])) host += list[i++];
    if (i == start) return bad("expected a number after '['");
    if (i != close && list[i] != ',' && list[i] != '-') return bad("expected ',', '-' or ']'");
    i = close;
  }
  if (host.empty()) return bad("expected a host name first");
  return host;
}

}  // namespace retrace
