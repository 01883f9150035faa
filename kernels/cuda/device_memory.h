// DeviceMemory: what the CUDA runtime is asked for besides launches. Under the emulator it is the
// processor's own memory and nothing can fail. Used by cuda_device.cc.
#ifndef RETRACE_KERNELS_CUDA_DEVICE_MEMORY_H_
#define RETRACE_KERNELS_CUDA_DEVICE_MEMORY_H_

#include <cstddef>
#include <string>

namespace retrace::cuda {

// Chooses device `ordinal` for this thread and describes it ("cuda:0, NVIDIA H200"). Empty with
// *error set: there is no driver, no such device, or it can not share memory with the processor.
std::string UseDevice(int ordinal, std::string* error);

// Memory that both sides can use, the processor after WaitForDevice. Null: none is left.
void* AllocateShared(size_t size_bytes);
void FreeShared(void* data);

// Until all launches are done; empty, or what went wrong first.
std::string WaitForDevice();

}  // namespace retrace::cuda

#endif  // RETRACE_KERNELS_CUDA_DEVICE_MEMORY_H_
