// The one function of libretrace_cuda.so that others see (kernels/device.h).
#include "core/version.h"
#include "kernels/cuda/cuda_device.h"

namespace retrace {
namespace {

Device* Open(int ordinal, std::string* error) {
  return cuda::OpenCudaDevice(ordinal, error).release();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const DevicePlugin* retrace_cuda_plugin() {
  static const DevicePlugin plugin = {kDevicePluginAbi, kVersion, Open};
  return &plugin;
}

}  // namespace retrace
