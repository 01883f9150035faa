#include "replay/torch_plugin.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <utility>

#include "replay/local_ranks.h"
#include "replay/plugin_file.h"
#include "replay/torch/torch_comm.h"

namespace retrace {
namespace {

constexpr PluginFile kPlugin = {
    .file = kTorchPluginFile,
    .entry = kTorchPluginEntry,
    .what_needs_it = "ranks on several hosts and level native need",
    .how_to_get_it = "scripts/setup.sh fetches LibTorch, scripts/build.sh then builds the plug-in. "
                     "Jobs on one host do not need it"};

Result<const TorchPlugin*> Open() {
  setenv("TORCH_CPP_LOG_LEVEL", "FATAL", 0);  // what c10d logs as errors comes back as a Status too
  // Read by libraries when they begin, so before that; native_level.cc asserts them.
  for (const auto& [name, value] : {std::pair("MKL_CBWR", "AUTO"), {"MKL_DYNAMIC", "FALSE"},
                                    {"OMP_DYNAMIC", "FALSE"}, {"NVIDIA_TF32_OVERRIDE", "0"},
                                    {"CUBLAS_WORKSPACE_CONFIG", ":4096:8"},
                                    {"ONEDNN_DEFAULT_FPMATH_MODE", "STRICT"}}) {
    setenv(name, value, 0);
  }
  RT_ASSIGN_OR_RETURN(void* const entry, OpenPlugin(kPlugin));
  const TorchPlugin* plugin = reinterpret_cast<TorchPluginEntry>(entry)();
  RT_RETURN_IF_ERROR(CheckPluginVersion(kPlugin, plugin->abi, plugin->version, kTorchPluginAbi));
  return plugin;
}

Result<const TorchPlugin*> Opened() {
  static std::mutex mutex;
  static const TorchPlugin* plugin = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
  if (plugin == nullptr) {
    RT_ASSIGN_OR_RETURN(plugin, Open());
  }
  return plugin;
}

}  // namespace

Result<std::string> FindTorchPlugin() { return FindPlugin(kPlugin); }

Result<NativeLevel> OpenNativeLevel(int threads) {
  RT_ASSIGN_OR_RETURN(const TorchPlugin* plugin, Opened());
  NativeLevel level;
  std::string error;
  level.kernels = plugin->open_native(threads, &level.libraries, &error);
  if (level.kernels == nullptr) return UnsupportedError("numerics.level = native: " + error);
  return level;
}

Status OpenTorchPlugin() { return Opened().status(); }

Result<std::unique_ptr<Comm>> JoinJob(const JobEnvironment& job, const JobLimits& limits) {
  RT_ASSIGN_OR_RETURN(const TorchPlugin* plugin, Opened());
  const TorchCommRequest request = {
      .rank = job.rank,
      .size = job.size,
      .host = job.master_host,
      .port = job.master_port,
      .serve_store = job.rank == 0 && !job.launcher_serves,
      .attempt = job.attempt,
      .join_limit_s = limits.join_s,
      .time_limit_s = limits.call_s,
  };
  std::string error;
  std::unique_ptr<Comm> comm(plugin->make_comm(request, &error));
  if (comm == nullptr) {
    return FailedError(
        fmt::format("rank {} of {} (pid {}): the ranks did not all join at {}:{} within {:g} s: "
                    "{}. Expected {} "
                    "processes, started by {}, that reach that host and port (MASTER_ADDR and "
                    "MASTER_PORT choose "
                    "them, GLOO_SOCKET_IFNAME the network interface)",
                    job.rank, job.size, getpid(), job.master_host, job.master_port, limits.join_s,
                    error, job.size, job.launcher));
  }
  return comm;
}

Status RunJobRank(const JobEnvironment& job, const JobLimits& limits,
                  const std::function<Status(Comm&)>& fn) {
  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Comm> comm, JoinJob(job, limits));
  return CallAndMeet(fn, *comm);
}

}  // namespace retrace
