#include "kernels/cuda/device_memory.h"

#include <cstdlib>

#include "kernels/cuda/language.h"

namespace retrace::cuda {

#ifdef __CUDACC__

namespace {

std::string& first_error() {
  static std::string error;
  return error;
}

bool Worked(cudaError_t code, const char* what, std::string* error) {
  if (code == cudaSuccess) return true;
  if (error->empty()) *error = std::string(what) + ": " + cudaGetErrorString(code);
  return false;
}

}  // namespace

void NoteLaunch(const char* kernel) { Worked(cudaGetLastError(), kernel, &first_error()); }

std::string UseDevice(int ordinal, std::string* error) {
  int count = 0, managed = 0;
  if (!Worked(cudaGetDeviceCount(&count), "looking for CUDA devices", error)) return "";
  if (ordinal < 0 || ordinal >= count) {
    *error = "there are " + std::to_string(count) + " CUDA devices, numbered from 0";
    return "";
  }
  cudaDeviceProp properties;
  if (!Worked(cudaSetDevice(ordinal), "cudaSetDevice", error) ||
      !Worked(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties", error) ||
      !Worked(cudaDeviceGetAttribute(&managed, cudaDevAttrConcurrentManagedAccess, ordinal),
              "cudaDeviceGetAttribute", error)) {
    return "";
  }
  const std::string name = "cuda:" + std::to_string(ordinal) + ", " + properties.name;
  if (properties.major < 8) {
    *error = name + " has compute capability " + std::to_string(properties.major) + "." +
             std::to_string(properties.minor) + "; the kernels are built for 8.0 and later";
    return "";
  }
  if (!managed) {
    *error = name + " can not share managed memory with the processor while it runs";
    return "";
  }
  return name;
}

void* AllocateShared(size_t size_bytes) {
  void* data = nullptr;
  if (!Worked(cudaMallocManaged(&data, size_bytes), "cudaMallocManaged", &first_error())) {
    return nullptr;
  }
  return data;
}

void FreeShared(void* data) { Worked(cudaFree(data), "cudaFree", &first_error()); }

std::string WaitForDevice() {
  Worked(cudaDeviceSynchronize(), "waiting for the device", &first_error());
  return first_error();
}

#else

std::string UseDevice(int ordinal, std::string*) {
  return "emulated cuda:" + std::to_string(ordinal);
}
void* AllocateShared(size_t size_bytes) {
  return std::aligned_alloc(256, (size_bytes + 255) / 256 * 256);
}
void FreeShared(void* data) { std::free(data); }
std::string WaitForDevice() { return ""; }

#endif

}  // namespace retrace::cuda
