// JobEnvironment: what a launcher (torchrun, Slurm's srun) says about this process's place in a job
// of several ranks. Used by the commands to decide whether they are one rank of such a job, and by
// torch_plugin.h to join it. A value; reading it has no side effects.
//
// torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (and TORCHELASTIC_*, when it
// keeps the store itself). Slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, and the first
// host of SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; MASTER_ADDR and MASTER_PORT override.
#ifndef RETRACE_REPLAY_JOB_ENVIRONMENT_H_
#define RETRACE_REPLAY_JOB_ENVIRONMENT_H_

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "core/status.h"

namespace retrace {

struct JobEnvironment {
  std::string launcher;  // "torchrun" or "slurm"
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // on this host
  std::string master_host;
  int master_port = 0;
  bool launcher_serves = false;  // a store listens there already (torchrun's agent)
  std::string attempt;           // tells restarts of one job apart
};

// Like std::getenv: null where there is no such variable.
using EnvironmentReader = std::function<const char*(const char*)>;

// nullopt: no launcher started this process. kUsage: one did, but what it says makes no sense.
Result<std::optional<JobEnvironment>> JobFromEnvironment(const EnvironmentReader& read);

// The first host of a Slurm node list: "gpu[03-07,9],login" -> "gpu03".
Result<std::string> FirstHostOfNodeList(std::string_view list);

}  // namespace retrace

#endif  // RETRACE_REPLAY_JOB_ENVIRONMENT_H_
