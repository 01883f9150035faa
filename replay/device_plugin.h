// The door to libretrace_cuda.so, which holds the CUDA kernels and the run-time library. Opened where
// a job asks for a device, so that everything else runs where there is none. Used by job.cc.
#ifndef RETRACE_REPLAY_DEVICE_PLUGIN_H_
#define RETRACE_REPLAY_DEVICE_PLUGIN_H_

#include <memory>
#include <string>

#include "core/status.h"
#include "kernels/device.h"

namespace retrace {

// Which device a name means to rank `rank`: "cpu" is -1, "cuda" and "cuda:N" are N + rank (N = 0).
// Errors: kUsage.
Result<int> DeviceOrdinal(const std::string& name, int rank);

// Null for "cpu". Errors: kUsage; kUnsupported where plug-in, driver or device are missing.
Result<std::unique_ptr<Device>> OpenDevice(const std::string& name, int rank);

}  // namespace retrace

#endif  // RETRACE_REPLAY_DEVICE_PLUGIN_H_
