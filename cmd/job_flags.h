// JobFlags: how train, replay and other commands that live updates carry the work: --tp, --dp,
// --threads, --isa. Never changes a bit.
#ifndef RETRACE_CMD_JOB_FLAGS_H_
#define RETRACE_CMD_JOB_FLAGS_H_

#include <functional>
#include <string>

#include "cmd/console.h"
#include "replay/job.h"

namespace retrace {

struct JobFlags {
  int tp = 1, dp = 1;
  int threads = 0;           // of each rank; 0: the processors divided by the ranks
  std::string isa = "best";  // best, scalar, avx2, avx512
  double timeout_seconds = 300;
};

void AddJobFlags(CLI::App* command, JobFlags* flags);

// Errors: kUsage for a bad instruction set, kUnsupported for one that this processor lacks.
Result<JobOptions> ResolveJob(const JobFlags& flags);

// Runs fn in every rank: those of this host, started here, or this process alone under torchrun or
// Slurm. `note` gets a sentence for the user where threads outnumber processors.
Status RunJob(const JobFlags& flags, const JobOptions& options,
              const std::function<void(const std::string&)>& note,
              const std::function<Status(Comm&)>& fn);

// True after the first Ctrl-C (SIGINT) or SIGTERM; the second ends the process at once.
bool StopRequested();
void CatchStopSignals();

}  // namespace retrace

#endif  // RETRACE_CMD_JOB_FLAGS_H_
