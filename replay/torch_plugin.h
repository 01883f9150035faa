// The door to libretrace_torch.so, which holds all that needs LibTorch: ranks over c10d, and level
// native. Opened
// when first needed, so that commands that do not need it start at once, and so that retrace runs
// where there is no LibTorch. Used by the commands that train or replay.
//
// The plug-in is looked for in $RETRACE_PLUGIN_DIR if that is set, else beside the program, else in
// ../lib/retrace from there. Thread-safe.
#ifndef RETRACE_REPLAY_TORCH_PLUGIN_H_
#define RETRACE_REPLAY_TORCH_PLUGIN_H_

#include <functional>
#include <memory>
#include <string>

#include "core/status.h"
#include "kernels/native_kernels.h"
#include "replay/comm.h"
#include "replay/job_environment.h"

namespace retrace {

struct JobLimits {
  double join_s = 300;  // for all ranks to be there
  double call_s = 300;  // of one call
};

// The plug-in's path, or kUnsupported: where it was looked for and how to get it. Opens nothing.
Result<std::string> FindTorchPlugin();

// Opens the plug-in now; the first JoinJob would. It stays open. Sets TORCH_CPP_LOG_LEVEL to FATAL,
// unless it is set, since c10d prints a backtrace for each lost connection.
Status OpenTorchPlugin();

// Opens the plug-in and joins the job, of which this process is one rank. Returns when all ranks
// have joined. kUnsupported without the plug-in, kFailed if ranks are missing at the time limit.
Result<std::unique_ptr<Comm>> JoinJob(const JobEnvironment& job, const JobLimits& limits);

// Level native's kernels, and what its bits depend on besides the processor.
struct NativeLevel {
  const NativeKernels* kernels = nullptr;  // of the plug-in
  std::string libraries;                   // names and versions
};
// Opens the plug-in with its libraries' threads, environment and algorithms pinned and asserted.
// Errors: kUnsupported without the plug-in, or where something is set that changes bits.
Result<NativeLevel> OpenNativeLevel(int threads);

// Joins, runs fn(comm), and meets the other ranks at the end; an error of fn ends the others'
// calls. The counterpart of RunLocalRanks for a process that a launcher started.
Status RunJobRank(const JobEnvironment& job, const JobLimits& limits,
                  const std::function<Status(Comm&)>& fn);

}  // namespace retrace

#endif  // RETRACE_REPLAY_TORCH_PLUGIN_H_
