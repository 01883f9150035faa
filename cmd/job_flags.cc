#include "cmd/job_flags.h"

#include <fmt/format.h>
#include <signal.h>

#include <CLI/CLI.hpp>

#include "replay/local_ranks.h"

namespace retrace {
namespace {

volatile sig_atomic_t g_stop_signals = 0;

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

bool StopRequested() { return g_stop_signals > 0; }

void AddJobFlags(CLI::App* command, JobFlags* flags) {
  command->add_option("--tp", flags->tp, "Tensor-parallel ranks; divides virtual_shards")
      ->check(CLI::Range(1, kShmRanksMax))
      ->capture_default_str();
  command->add_option("--dp", flags->dp, "Data-parallel ranks; divides lanes")
      ->check(CLI::Range(1, kShmRanksMax))
      ->capture_default_str();
  command
      ->add_option("--threads", flags->threads,
                   "Threads of each rank; 0: the processors divided by the ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--isa", flags->isa, "Vector instructions: best, scalar, avx2 or avx512")
      ->capture_default_str();
  command
      ->add_option("--timeout", flags->timeout_seconds,
                   "Seconds after which a rank that does not answer ends the job")
      ->check(CLI::Range(0.1, 1e6))
      ->capture_default_str();
}

Result<JobOptions> ResolveJob(const JobFlags& flags) {
  JobOptions options;
  options.tp = flags.tp;
  options.dp = flags.dp;
  if (flags.tp * flags.dp > kShmRanksMax) {
    return UsageError(fmt::format("--tp {} x --dp {}: expected at most {} ranks on one host",
                                  flags.tp, flags.dp, kShmRanksMax));
  }
  options.threads = flags.threads > 0
                        ? flags.threads
                        : std::max(1, AvailableProcessors() / (flags.tp * flags.dp));
  if (flags.isa == "best") return options;
  const std::optional<Isa> isa = ParseIsa(flags.isa);
  if (!isa) {
    return UsageError("--isa: expected best, scalar, avx2 or avx512, got '" + flags.isa + "'");
  }
  if (!IsaSupported(*isa)) {
    return UnsupportedError("--isa " + flags.isa + ": this processor has no such instructions; the "
                            "best here is " + IsaName(BestIsa()));
  }
  options.isa = *isa;
  return options;
}

Status RunJob(const JobFlags& flags, const JobOptions& options,
              const std::function<void(const std::string&)>& note,
              const std::function<Status(Comm&)>& fn) {
  const int ranks = options.tp * options.dp;
  const std::string oversubscribed = OversubscriptionNote(ranks, options.threads);
  if (!oversubscribed.empty()) note(oversubscribed);
  LocalRanksOptions local;
  local.shm.time_limit_s = flags.timeout_seconds;
  return RunLocalRanks(ranks, local, fn);
}

}  // namespace retrace
