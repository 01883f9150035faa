#include "replay/plugin_file.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/version.h"

namespace retrace {
namespace {

std::string ProgramFolder() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  if (length <= 0) return ".";
  const std::string program(path, static_cast<size_t>(length));
  return program.substr(0, program.rfind('/'));
}

}  // namespace

Result<std::string> FindPlugin(const PluginFile& plugin) {
  std::vector<std::string> folders;
  if (const char* folder = std::getenv("RETRACE_PLUGIN_DIR")) {
    folders = {folder};
  } else {
    folders = {ProgramFolder(), ProgramFolder() + "/../lib/retrace"};
  }
  for (const std::string& folder : folders) {
    const std::string path = folder + "/" + plugin.file;
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return UnsupportedError(fmt::format("{} {}, which is not in {}. {}", plugin.what_needs_it,
                                      plugin.file, fmt::join(folders, " or "),
                                      plugin.how_to_get_it));
}

Result<void*> OpenPlugin(const PluginFile& plugin) {
  RT_ASSIGN_OR_RETURN(const std::string path, FindPlugin(plugin));
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return UnsupportedError(
        fmt::format("can not open {}: {}. {}", path, dlerror(), plugin.how_to_get_it));
  }
  void* symbol = dlsym(library, plugin.entry);
  if (symbol == nullptr) {
    return UnsupportedError(
        fmt::format("{}: no function {}: not a plug-in of retrace's", path, plugin.entry));
  }
  return symbol;
}

Status CheckPluginVersion(const PluginFile& plugin, int abi, const char* version,
                          int expected_abi) {
  if (abi == expected_abi && std::strcmp(version, kVersion) == 0) return {};
  return UnsupportedError(fmt::format("{}: built for retrace {} (ABI {}), but this is {} (ABI {}); "
                                      "build both again",
                                      plugin.file, version, abi, kVersion, expected_abi));
}

}  // namespace retrace
