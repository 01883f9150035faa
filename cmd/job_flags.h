// JobFlags: how train, replay and other commands that live updates carry the work: --tp, --dp,
// --threads, --isa, --device. Never changes a bit.
#ifndef RETRACE_CMD_JOB_FLAGS_H_
#define RETRACE_CMD_JOB_FLAGS_H_

#include <functional>
#include <optional>
#include <string>

#include "cmd/console.h"
#include "replay/job.h"
#include "replay/job_environment.h"

namespace retrace {

struct JobFlags {
  int tp = 0, dp = 1;        // tp 0: all ranks of the launcher's job, or 1
  int threads = 0;           // of each rank; 0: the processors divided by the ranks
  std::string isa = "best";  // best, scalar, avx2, avx512
  std::string device = "cpu";  // cpu, cuda, cuda:N
  double timeout_seconds = 300;
};

// --isa alone, for what has no ranks.
void AddIsaFlag(CLI::App* command, std::string* isa);
void AddJobFlags(CLI::App* command, JobFlags* flags);

// How the ranks come about: started here on this host, or by a launcher, of which this process is
// one.
struct ResolvedJob {
  JobOptions options;
  std::optional<JobEnvironment> launched;
  double timeout_seconds = 300;

  // Does this process speak for the job? The others print nothing but errors.
  bool speaks() const { return !launched || launched->rank == 0; }
};

// Errors: kUsage for a bad instruction set, or ranks that are not those of the launcher;
// kUnsupported for instructions that this processor lacks.
Result<ResolvedJob> ResolveJob(const JobFlags& flags);

// Replicas that live side by side on this host, one rank each: `jobs` of them (0: one a processor), with
// `threads` each (0: the processors divided by jobs).
struct SideBySide {
  JobOptions job;
  int jobs = 1;
};
// Errors: those of ResolveJob; kUnsupported under a launcher, in words that begin with `command`.
Result<SideBySide> ResolveSideBySide(const std::string& command, int jobs, int threads,
                                     const std::string& isa);

// Runs fn in every rank. `note` gets a sentence for the user where threads outnumber processors.
Status RunJob(const ResolvedJob& job, const std::function<void(const std::string&)>& note,
              const std::function<Status(Comm&)>& fn);

// True after the first Ctrl-C (SIGINT) or SIGTERM; the second ends the process at once.
bool StopRequested();
void CatchStopSignals();

// Whether SIGUSR1 came since the last call.
bool FireRequested();
void CatchFireSignal();

}  // namespace retrace

#endif  // RETRACE_CMD_JOB_FLAGS_H_
