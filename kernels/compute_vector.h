// ComputeVector: a std::vector whose elements the ops can work on: the processor's memory, or, within
// a ComputeScope of a device, memory that both share. Used by attention and replay for everything
// that an Engine is given. What a vector was constructed with stays with it; moves and swaps take it
// along.
//
// Before the processor touches what a device may still be working on: Engine::Sync.
#ifndef RETRACE_KERNELS_COMPUTE_VECTOR_H_
#define RETRACE_KERNELS_COMPUTE_VECTOR_H_

#include <cstddef>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels/device.h"

namespace retrace {

// While it lives, vectors that this thread constructs belong to `device` (null: the processor).
class ComputeScope {
 public:
  explicit ComputeScope(Device* device) : before_(current_) { current_ = device; }
  ~ComputeScope() { current_ = before_; }
  ComputeScope(const ComputeScope&) = delete;
  ComputeScope& operator=(const ComputeScope&) = delete;

  static Device* Current() { return current_; }

 private:
  static inline thread_local Device* current_ = nullptr;
  Device* before_;
};

template <class T>
class ComputeAllocator {
 public:
  using value_type = T;
  using propagate_on_container_copy_assignment = std::true_type;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;

  ComputeAllocator() : device_(ComputeScope::Current()) {}
  template <class U>
  ComputeAllocator(const ComputeAllocator<U>& other) : device_(other.device()) {}  // NOLINT

  T* allocate(size_t n) {
    if (device_ == nullptr) return std::allocator<T>().allocate(n);
    return static_cast<T*>(device_->Allocate(n * sizeof(T)));
  }
  void deallocate(T* data, size_t n) {
    if (device_ == nullptr) return std::allocator<T>().deallocate(data, n);
    device_->Free(data);
  }

  Device* device() const { return device_; }
  bool operator==(const ComputeAllocator& other) const { return device_ == other.device_; }

 private:
  Device* device_;
};

template <class T>
using ComputeVector = std::vector<T, ComputeAllocator<T>>;

}  // namespace retrace

#endif  // RETRACE_KERNELS_COMPUTE_VECTOR_H_
