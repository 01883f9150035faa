#include "replay/torch_plugin.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "core/version.h"
#include "replay/local_ranks.h"
#include "replay/torch/torch_comm.h"

namespace retrace {
namespace {

constexpr char kHowToGetIt[] =
    "scripts/setup.sh fetches LibTorch, scripts/build.sh then builds the plug-in. Jobs on one host "
    "do "
    "not need it";

std::string ProgramFolder() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return ".";
  const std::string program(path, static_cast<size_t>(length));
  return program.substr(0, program.rfind('/'));
}

Result<const TorchPlugin*> Open() {
  RT_ASSIGN_OR_RETURN(const std::string path, FindTorchPlugin());
  setenv("TORCH_CPP_LOG_LEVEL", "FATAL", 0);  // what c10d logs as errors comes back as a Status too
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return UnsupportedError(fmt::format("can not open {}: {}. {}", path, dlerror(), kHowToGetIt));
  }
  void* symbol = dlsym(library, kTorchPluginEntry);
  if (symbol == nullptr) {
    return UnsupportedError(
        fmt::format("{}: no function {}: not a plug-in of retrace's", path, kTorchPluginEntry));
  }
  const TorchPlugin* plugin = reinterpret_cast<TorchPluginEntry>(symbol)();
  if (plugin->abi != kTorchPluginAbi || std::strcmp(plugin->version, kVersion) != 0) {
    return UnsupportedError(
        fmt::format("{}: built for retrace {} (ABI {}), but this is {} (ABI {}); "
                    "build both again",
                    path, plugin->version, plugin->abi, kVersion, kTorchPluginAbi));
  }
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

Result<std::string> FindTorchPlugin() {
  std::vector<std::string> folders;
  if (const char* folder = std::getenv("RETRACE_PLUGIN_DIR")) {
    folders = {folder};
  } else {
    folders = {ProgramFolder(), ProgramFolder() + "/../lib/retrace"};
  }
  for (const std::string& folder : folders) {
    const std::string path = folder + "/" + kTorchPluginFile;
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return UnsupportedError(fmt::format("ranks on several hosts need {}, which is not in {}. {}",
                                      kTorchPluginFile, fmt::join(folders, " or "), kHowToGetIt));
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
