#include "replay/device_plugin.h"

#include <charconv>

#include <fmt/format.h>

#include "replay/plugin_file.h"

namespace retrace {
namespace {

constexpr PluginFile kPlugin = {
    .file = kCudaPluginFile,
    .entry = kCudaPluginEntry,
    .what_needs_it = "--device cuda needs",
    .how_to_get_it = "scripts/setup.sh fetches the CUDA compiler, scripts/build.sh then builds the "
                     "plug-in"};

}  // namespace

Result<int> DeviceOrdinal(const std::string& name, int rank) {
  if (name == "cpu") return -1;
  int first = 0;
  if (name != "cuda") {
    const char* end = name.data() + name.size();
    const bool numbered = name.starts_with("cuda:") && name.size() > 5;
    const auto parsed = numbered ? std::from_chars(name.data() + 5, end, first)
                                 : std::from_chars_result{end, std::errc::invalid_argument};
    if (parsed.ec != std::errc() || parsed.ptr != end || first < 0 || first > 1023) {
      return UsageError("--device: expected cpu, cuda or cuda:N, got '" + name + "'");
    }
  }
  return first + rank;
}

Result<std::unique_ptr<Device>> OpenDevice(const std::string& name, int rank) {
  RT_ASSIGN_OR_RETURN(const int ordinal, DeviceOrdinal(name, rank));
  if (ordinal < 0) return std::unique_ptr<Device>();
  RT_ASSIGN_OR_RETURN(void* const entry, OpenPlugin(kPlugin));
  const DevicePlugin* plugin = reinterpret_cast<DevicePluginEntry>(entry)();
  RT_RETURN_IF_ERROR(CheckPluginVersion(kPlugin, plugin->abi, plugin->version, kDevicePluginAbi));
  std::string error;
  std::unique_ptr<Device> device(plugin->open(ordinal, &error));
  if (device == nullptr) {
    return UnsupportedError(
        fmt::format("--device {}: rank {} can not use cuda:{}: {}", name, rank, ordinal, error));
  }
  return device;
}

}  // namespace retrace
