// Emulator: runs CUDA kernels on the CPU, compiled from the same .cu files by g++, for the tests.
// Blocks run one after another; the threads of a block are fibers, resumed in a chosen order.
//
// Reported as faults, with kernel, block, thread and what was wrong:
//   - an index outside of a shared array; an element of one that is read before it is written;
//   - two threads that touch one element of a shared array, one of them writing, with no
//     __syncthreads between (whatever order they happened to run in);
//   - a __syncthreads that some threads of the block do not reach, or reach at another line;
//   - a shuffle that some lanes of its mask do not reach;
//   - a read or write outside of a GuardedMemory by any pointer, and of memory that is not mapped.
// What it can not see: races in global memory (the tests run every kernel in several orders and
// compare the bits), and the compiler nvcc (tests/device_code_test.cc inspects what that makes).
//
// Used by language.h (which see for what a kernel may use) and the tests. One launch at a time; a
// second thread waits. Linux, x86-64 or any other processor with makecontext.
#ifndef RETRACE_KERNELS_CUDA_EMULATOR_H_
#define RETRACE_KERNELS_CUDA_EMULATOR_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define RT_UNROLL
#define RT_NO_UNROLL

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Of the thread that runs. Outside of a launch: of the last one.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace retrace::cuda {

// The order in which the threads of a block, and the blocks of a grid, run.
enum class RunOrder { kAscending, kDescending, kShuffled };

namespace emulator {

void SetOrder(RunOrder order, uint32_t seed = 1);

// The faults since the last call, in order; at most a few of each launch are kept.
std::vector<std::string> TakeFaults();

struct Body {
  void (*call)(const void* context);
  const void* context;
};
void Run(const char* kernel, dim3 grid, unsigned threads, const Body& body);

void Barrier(const std::source_location& where);
// The value that lane `lane ^ lane_mask` of the caller's group of `width` lanes brought.
uint64_t Exchange(unsigned mask, uint64_t value, int lane_mask, int width,
                  const std::source_location& where);
void Fault(const std::string& what);  // of the thread that runs

// What is known of one element of a shared array.
struct Touches {
  uint64_t block = 0;                  // in which it was last written; another: not initialised
  uint64_t written = 0, read = 0;      // barrier interval
  int writer = -1, reader = -1;        // reader -2: several
};
// Which thread runs, and in which barrier interval of which block. Numbers never repeat.
void NoteRead(Touches* element, int64_t index);
void NoteWrite(Touches* element, int64_t index);
[[noreturn]] void EndOutside(int64_t index, int64_t size);  // the launch

}  // namespace emulator

// An array in shared memory. One exists for each `__shared__` variable, whose contents a new block
// finds uninitialised.
template <class T, int kSize>
class Shared {
 public:
  class Element {
   public:
    Element(T* value, emulator::Touches* touches, int64_t index)
        : value_(value), touches_(touches), index_(index) {}
    operator T() const {
      emulator::NoteRead(touches_, index_);
      return *value_;
    }
    const Element& operator=(T value) const {
      emulator::NoteWrite(touches_, index_);
      *value_ = value;
      return *this;
    }
    const Element& operator=(const Element& other) const { return *this = static_cast<T>(other); }
    Element(const Element&) = default;

   private:
    T* value_;
    emulator::Touches* touches_;
    int64_t index_;
  };

  Element operator[](int64_t i) {
    if (i < 0 || i >= kSize) emulator::EndOutside(i, kSize);
    return {&data_[i], &touches_[i], i};
  }

 private:
  T data_[kSize];
  emulator::Touches touches_[kSize];
};

template <class... Parameters, class... Arguments>
void Launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned threads,
            const Arguments&... arguments) {
  const auto call = [&] { kernel(arguments...); };
  using Call = decltype(call);
  emulator::Run(name, grid, threads,
                {[](const void* context) { (*static_cast<Call*>(context))(); }, &call});
}

// Memory between two pages that nobody may touch. The last byte lies right before the second one,
// or, with kAtStart, the first right behind the first one: run a kernel with both.
class GuardedMemory {
 public:
  enum class Place { kAtEnd, kAtStart };
  GuardedMemory(size_t size_bytes, Place place);
  ~GuardedMemory();  // a byte written between the data and its page is a fault
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  void* data() const { return data_; }

 private:
  void CheckSlack() const;

  unsigned char* mapping_;
  unsigned char* data_;
  size_t mapped_bytes_, size_bytes_;
};

}  // namespace retrace::cuda

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  retrace::cuda::emulator::Barrier(where);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  std::source_location where = std::source_location::current()) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = retrace::cuda::emulator::Exchange(mask, bits, lane_mask, width, where);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#endif  // RETRACE_KERNELS_CUDA_EMULATOR_H_
