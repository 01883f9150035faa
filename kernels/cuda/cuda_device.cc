#include "kernels/cuda/cuda_device.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "kernels/cuda/device_attention.h"
#include "kernels/cuda/device_gemm.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/device_ops.h"
#include "kernels/cuda/device_optimizer.h"

namespace retrace::cuda {
namespace {

class CudaDevice : public Device {
 public:
  explicit CudaDevice(std::string name) : name_(std::move(name)) {}
  ~CudaDevice() override {
    if (workspace_ != nullptr) FreeShared(workspace_);
  }

  std::string name() const override { return name_; }

  void* Allocate(size_t size_bytes) override {
    void* data = AllocateShared(std::max<size_t>(size_bytes, 1));
    RT_CHECK(data != nullptr);
    return data;
  }
  void Free(void* data) override { FreeShared(data); }
  Status Wait() override {
    const std::string error = WaitForDevice();
    return error.empty() ? Status() : FailedError(name_ + ": " + error);
  }

  const OpTable<float>& ops(float) override { return DeviceOps<float>(); }
  const OpTable<double>& ops(double) override { return DeviceOps<double>(); }
  void Multiply(std::span<const GemmArgs<float>> products) override {
    DeviceGemm(products.data(), std::ssize(products));
  }
  void Multiply(std::span<const GemmArgs<double>> products) override {
    DeviceGemm(products.data(), std::ssize(products));
  }
  void AttentionForward(BlockwiseAttention<float> a) override { Forward(a); }
  void AttentionForward(BlockwiseAttention<double> a) override { Forward(a); }
  void AttentionBackward(BlockwiseAttention<float> a) override { Backward(a); }
  void AttentionBackward(BlockwiseAttention<double> a) override { Backward(a); }
  void AddGroups(const HeadGroups<float>& a) override { DeviceAddGroups(a); }
  void AddGroups(const HeadGroups<double>& a) override { DeviceAddGroups(a); }

  void AdamW(const DeviceAdamWArgs& a) override { DeviceAdamW(a); }
  void SumSquares(const float* x, int64_t n, double* sums) override {
    DeviceSumSquares(x, n, sums);
  }
  void SumUpdateSquares(const DeviceUpdateSquaresArgs& a) override { DeviceSumUpdateSquares(a); }

 private:
  template <class T>
  void Forward(BlockwiseAttention<T>& a) {
    a.workspace = static_cast<T*>(Workspace(DeviceAttentionWorkspace(a)));
    DeviceAttentionForward(a);
  }
  template <class T>
  void Backward(BlockwiseAttention<T>& a) {
    a.workspace = static_cast<T*>(Workspace(DeviceAttentionWorkspace(a)));
    DeviceAttentionBackward(a);
  }

  // What is in flight has the old one until it is done: freeing waits.
  void* Workspace(int64_t size_bytes) {
    if (size_bytes > workspace_bytes_) {
      if (workspace_ != nullptr) Free(workspace_);
      workspace_ = Allocate(static_cast<size_t>(size_bytes));
      workspace_bytes_ = size_bytes;
    }
    return workspace_;
  }

  std::string name_;
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Device> OpenCudaDevice(int ordinal, std::string* error) {
  std::string name = UseDevice(ordinal, error);
  if (name.empty()) return nullptr;
  return std::make_unique<CudaDevice>(std::move(name));
}

}  // namespace retrace::cuda
