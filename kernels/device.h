// Device: an accelerator that computes the op table with the bits of the CPU. Used by Engine
// (engine.h), which gives it what it would have given its threads; implemented by
// kernels/cuda/cuda_device.h, in libretrace_cuda.so or, for the tests, in the emulator.
//
// All pointers in arguments are memory of Allocate, which the processor can read and write too once
// Wait has returned. Calls are carried out in order and may return before they are done; the
// arguments themselves are copied. Not thread-safe. Clauses, orders and guarantees are those of
// the CPU's functions of the same name.
#ifndef RETRACE_KERNELS_DEVICE_H_
#define RETRACE_KERNELS_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/status.h"
#include "kernels/attention_args.h"
#include "kernels/device_optimizer_args.h"
#include "kernels/gemm_args.h"
#include "kernels/ops.h"

namespace retrace {

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cuda:0, NVIDIA H200"

  // Zeros are not written. Aborts where there is no memory left: the job's plan was wrong.
  virtual void* Allocate(size_t size_bytes) = 0;
  virtual void Free(void* data) = 0;
  // Until all calls are done. Errors: kFailed, with the first thing that went wrong on the device.
  virtual Status Wait() = 0;

  virtual const OpTable<float>& ops(float) = 0;
  virtual const OpTable<double>& ops(double) = 0;
  virtual void Multiply(std::span<const GemmArgs<float>> products) = 0;
  virtual void Multiply(std::span<const GemmArgs<double>> products) = 0;
  // `workspace` of the arguments is the device's own.
  virtual void AttentionForward(BlockwiseAttention<float> a) = 0;
  virtual void AttentionForward(BlockwiseAttention<double> a) = 0;
  virtual void AttentionBackward(BlockwiseAttention<float> a) = 0;
  virtual void AttentionBackward(BlockwiseAttention<double> a) = 0;
  virtual void AddGroups(const HeadGroups<float>& a) = 0;
  virtual void AddGroups(const HeadGroups<double>& a) = 0;

  virtual void AdamW(const DeviceAdamWArgs& a) = 0;
  virtual void SumSquares(const float* x, int64_t n, double* sums) = 0;
  virtual void SumUpdateSquares(const DeviceUpdateSquaresArgs& a) = 0;
};

// ---- The border to libretrace_cuda.so: one function, found by dlsym ------------------------------

inline constexpr int kDevicePluginAbi = 1;  // raised with every change here
inline constexpr char kCudaPluginFile[] = "libretrace_cuda.so";
inline constexpr char kCudaPluginEntry[] = "retrace_cuda_plugin";

struct DevicePlugin {
  int abi = 0;
  const char* version = "";  // retrace's
  // Device number `ordinal` of this machine; null with *error set where it can not be used.
  Device* (*open)(int ordinal, std::string* error) = nullptr;
};

using DevicePluginEntry = const DevicePlugin* (*)();

}  // namespace retrace

#endif  // RETRACE_KERNELS_DEVICE_H_
