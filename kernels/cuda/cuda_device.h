// CudaDevice: the Device (kernels/device.h) made of this folder's kernels. Used by cuda_plugin.cc,
// and by tests with the emulator behind it.
#ifndef RETRACE_KERNELS_CUDA_CUDA_DEVICE_H_
#define RETRACE_KERNELS_CUDA_CUDA_DEVICE_H_

#include <memory>
#include <string>

#include "kernels/device.h"

namespace retrace::cuda {

// Null with *error set: see UseDevice in device_memory.h.
std::unique_ptr<Device> OpenCudaDevice(int ordinal, std::string* error);

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_CUDA_DEVICE_H_
