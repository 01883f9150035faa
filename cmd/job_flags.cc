#include "cmd/job_flags.h"

#include <fmt/format.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <cstdlib>

#include "kernels/thread_pool.h"
#include "replay/device_plugin.h"
#include "replay/local_ranks.h"
#include "replay/torch_plugin.h"

namespace retrace {
namespace {

volatile sig_atomic_t g_stop_signals = 0;
volatile sig_atomic_t g_fire_signal = 0;

extern "C" void OnStopSignal(int signal_number) {
  g_stop_signals = g_stop_signals + 1;
  if (g_stop_signals > 1) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
  }
}

}  // namespace

void CatchStopSignals() {
  struct sigaction action = {};
  action.sa_handler = OnStopSignal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

void CatchFireSignal() {
  struct sigaction action = {};
  action.sa_handler = [](int) { g_fire_signal = 1; };
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
}

bool FireRequested() {
  if (g_fire_signal == 0) return false;
  g_fire_signal = 0;
  return true;
}

bool StopRequested() { return g_stop_signals > 0; }

void AddIsaFlag(CLI::App* command, std::string* isa) {
  command->add_option("--isa", *isa, "Vector instructions")
      ->check(CLI::IsMember({"best", "scalar", "avx2", "avx512"}))
      ->capture_default_str();
}

void AddJobFlags(CLI::App* command, JobFlags* flags) {
  CLI::Option* tp = command->add_option(
      "--tp", flags->tp,
      "Tensor-parallel ranks; divides virtual_shards. 0: 1, or those of torchrun or Slurm");
  WholeIn(tp, 0, 65536)->capture_default_str();
  CLI::Option* dp = command->add_option("--dp", flags->dp, "Data-parallel ranks; divides lanes");
  WholeIn(dp, 1, 65536)->capture_default_str();
  CLI::Option* threads = command->add_option(
      "--threads", flags->threads,
      "Threads of each rank; 0: the processors divided by the ranks (1 under a launcher)");
  WholeIn(threads, 0, 1024)->capture_default_str();
  AddIsaFlag(command, &flags->isa);
  command
      ->add_option("--device", flags->device,
                   "Where forward and backward passes are computed: cpu, cuda or cuda:N (rank r has "
                   "device N + r)")
      ->capture_default_str();
  CLI::Option* timeout =
      command->add_option("--timeout", flags->timeout_seconds,
                          "Seconds after which a rank that does not answer ends the job");
  NumberIn(timeout, 0.1, 1e6)->capture_default_str();
}

Result<ResolvedJob> ResolveJob(const JobFlags& flags) {
  ResolvedJob job;
  job.timeout_seconds = flags.timeout_seconds;
  RT_ASSIGN_OR_RETURN(job.launched, JobFromEnvironment([](const char* name) {
                        return static_cast<const char*>(std::getenv(name));
                      }));
  JobOptions& options = job.options;
  options.dp = flags.dp;
  options.tp = flags.tp;
  if (options.tp == 0) options.tp = job.launched ? std::max(1, job.launched->size / flags.dp) : 1;
  const int ranks = options.tp * options.dp;
  if (job.launched && ranks != job.launched->size) {
    return UsageError(fmt::format("--tp {} x --dp {}: expected the {} ranks that {} started",
                                  options.tp, options.dp, job.launched->size,
                                  job.launched->launcher));
  }
  if (!job.launched && ranks > kShmRanksMax) {
    return UsageError(fmt::format("--tp {} x --dp {}: expected at most {} ranks on one host",
                                  options.tp, options.dp, kShmRanksMax));
  }
  options.threads = flags.threads;
  if (options.threads == 0) {
    options.threads = job.launched ? 1 : std::max(1, AvailableCpus() / ranks);
  }
  RT_RETURN_IF_ERROR(DeviceOrdinal(flags.device, 0).status());
  options.device = flags.device;
  if (flags.isa == "best") return job;
  const std::optional<Isa> isa = ParseIsa(flags.isa);
  if (!isa) {
    return UsageError("--isa: expected best, scalar, avx2 or avx512, got '" + flags.isa + "'");
  }
  if (!IsaSupported(*isa)) {
    return UnsupportedError("--isa " + flags.isa + ": this processor has no such instructions; the "
                            "best here is " + IsaName(BestIsa()));
  }
  options.isa = *isa;
  return job;
}

Result<SideBySide> ResolveSideBySide(const std::string& command, int jobs, int threads,
                                     const std::string& isa) {
  RT_ASSIGN_OR_RETURN(const ResolvedJob job,
                      ResolveJob({.tp = 1, .dp = 1, .threads = 1, .isa = isa}));
  if (job.launched) {
    return UnsupportedError(command + ": runs its replicas on one host, without a launcher");
  }
  const int processors = AvailableCpus();
  SideBySide replicas{.job = job.options, .jobs = jobs > 0 ? jobs : processors};
  replicas.job.threads = threads > 0 ? threads : std::max(1, processors / replicas.jobs);
  return replicas;
}

Status RunJob(const ResolvedJob& job, const std::function<void(const std::string&)>& note,
              const std::function<Status(Comm&)>& fn) {
  if (job.launched) {
    return RunJobRank(*job.launched,
                      {.join_s = job.timeout_seconds, .call_s = job.timeout_seconds}, fn);
  }
  const int ranks = job.options.tp * job.options.dp;
  const std::string oversubscribed = OversubscriptionNote(ranks, job.options.threads);
  if (!oversubscribed.empty()) note(oversubscribed);
  LocalRanksOptions local;
  local.shm.time_limit_s = job.timeout_seconds;
  return RunLocalRanks(ranks, local, fn);
}

}  // namespace retrace
