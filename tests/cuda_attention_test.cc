// Blockwise attention's CUDA kernels, run by the emulator: the bits of kernels/attention.cc, forward
// and backward, with windows, grouped heads and every rounding, on other grids and in other orders
// of threads, in guarded memory.
#include <gtest/gtest.h>

#include <memory>

#include "kernels/attention.h"
#include "kernels/cuda/device_attention.h"
#include "kernels/cuda/device_ops.h"
#include "kernels/cuda/language.h"
#include "tests/longhand.h"

namespace retrace {
namespace {

using cuda::GuardedMemory;
using cuda::RunOrder;

template <class T>
AttentionConfig<T> Config(int64_t sequences, int64_t length, int64_t query_heads, int64_t kv_heads,
                          int64_t dim, int64_t window, double scale, bool rounded) {
  const Rounding round = rounded && sizeof(T) == 4 ? Rounding::kBf16 : Rounding::kNone;
  return {.kind = AttentionKind::kBlockwise, .sequences = sequences, .length = length,
          .query_heads = query_heads, .kv_heads = kv_heads, .dim = dim, .window = window,
          .scale = static_cast<T>(scale), .scores = round, .softmax = round, .output = round,
          .grad_scores = round, .grad_softmax = round, .grad_query = round};
}

template <class T>
class AttentionOnBoth {
 public:
  AttentionOnBoth(const AttentionConfig<T>& config, GuardedMemory::Place place)
      : c_(config), place_(place), random_(static_cast<uint32_t>(config.length + config.dim)) {
    const int64_t tokens = c_.sequences * c_.length;
    q_size_ = tokens * c_.query_heads * c_.dim;
    kv_size_ = tokens * c_.kv_heads * c_.dim;
    const int64_t rows = c_.sequences * c_.query_heads * c_.length;
    a_ = {.sequences = c_.sequences, .length = c_.length, .query_heads = c_.query_heads,
          .kv_heads = c_.kv_heads, .dim = c_.dim, .window = c_.window, .scale = c_.scale,
          .scores = c_.scores, .softmax = c_.softmax, .output = c_.output,
          .grad_scores = c_.grad_scores, .grad_softmax = c_.grad_softmax,
          .grad_query = c_.grad_query, .q = New(q_size_), .k = New(kv_size_), .v = New(kv_size_),
          .out = New(q_size_), .m = New(rows), .l = New(rows), .dout = New(q_size_),
          .dot = New(rows), .dq = New(q_size_), .dk = New(kv_size_), .dv = New(kv_size_),
          .dk_head = New(q_size_), .dv_head = New(q_size_), .workspace = nullptr};
    a_.workspace = New(cuda::DeviceAttentionWorkspace(a_) / static_cast<int64_t>(sizeof(T)));
  }

  // The first difference, by name; empty: none.
  std::string Difference() {
    Engine engine(Isa::kScalar, 1);
    AttentionSaved<T> saved;
    AttentionScratch<T> scratch;
    std::vector<T> out(q_size_), dq(q_size_), dk(kv_size_), dv(kv_size_);
    AttentionForward(engine, c_, a_.q, a_.k, a_.v, out.data(), &saved, &scratch);
    AttentionBackward(engine, c_, a_.q, a_.k, a_.v, out.data(), a_.dout, saved, dq.data(),
                      dk.data(), dv.data(), &scratch);
    Run();
    std::vector<T> m(saved.m.begin(), saved.m.end()), l(saved.l.begin(), saved.l.end());
    for (const auto& [name, expected, got] :
         {std::tuple("output", &out, static_cast<const T*>(a_.out)),
          std::tuple("m", &m, static_cast<const T*>(a_.m)),
          std::tuple("l", &l, static_cast<const T*>(a_.l)),
          std::tuple("dq", &dq, static_cast<const T*>(a_.dq)),
          std::tuple("dk", &dk, static_cast<const T*>(a_.dk)),
          std::tuple("dv", &dv, static_cast<const T*>(a_.dv))}) {
      const std::vector<T> copy(got, got + expected->size());
      const int64_t at = longhand::FirstDifference(*expected, copy);
      if (at >= 0) return std::string(name) + "[" + std::to_string(at) + "]";
    }
    return "";
  }

 private:
  void Run() {
    cuda::DeviceAttentionForward(a_);
    const int64_t stride = c_.query_heads * c_.dim;
    for (int64_t b = 0; b < c_.sequences; ++b) {
      for (int64_t j = 0; j < c_.query_heads; ++j) {
        const int64_t at = b * c_.length * stride + j * c_.dim;
        cuda::DeviceOps<T>().row_dot(
            {.x = a_.dout + at, .y = a_.out + at,
             .c = const_cast<T*>(a_.dot) + (b * c_.query_heads + j) * c_.length, .n = c_.dim,
             .x_stride = stride, .y_stride = stride},
            0, c_.length);
      }
    }
    cuda::DeviceAttentionBackward(a_);
    if (c_.query_heads == c_.kv_heads) return;
    for (const auto& [heads, dkv] : {std::pair(a_.dk_head, a_.dk), std::pair(a_.dv_head, a_.dv)}) {
      cuda::DeviceAddGroups<T>({.sequences = c_.sequences, .length = c_.length,
                                .query_heads = c_.query_heads, .kv_heads = c_.kv_heads,
                                .dim = c_.dim, .heads = heads, .dkv = dkv});
    }
  }

  T* New(int64_t size) {
    memory_.push_back(std::make_unique<GuardedMemory>(size * sizeof(T), place_));
    T* data = static_cast<T*>(memory_.back()->data());
    const std::vector<T> values = longhand::Values<T>(size, random_, false);
    std::copy(values.begin(), values.end(), data);
    return data;
  }

  AttentionConfig<T> c_;
  GuardedMemory::Place place_;
  std::mt19937 random_;
  int64_t q_size_ = 0, kv_size_ = 0;
  BlockwiseAttention<T> a_;
  std::vector<std::unique_ptr<GuardedMemory>> memory_;
};

class CudaAttention : public testing::Test {
 protected:
  void TearDown() override {
    cuda::launch_shape() = {};
    cuda::emulator::SetOrder(RunOrder::kAscending);
  }
  template <class T>
  void ExpectTheSame(const AttentionConfig<T>& c, GuardedMemory::Place place) {
    EXPECT_EQ("", AttentionOnBoth<T>(c, place).Difference())
        << "length " << c.length << ", dim " << c.dim << ", window " << c.window;
    for (const std::string& fault : cuda::emulator::TakeFaults()) ADD_FAILURE() << fault;
  }
  template <class T>
  void ExpectTheSameOnOddShapes() {
    const auto kEnd = GuardedMemory::Place::kAtEnd, kStart = GuardedMemory::Place::kAtStart;
    ExpectTheSame(Config<T>(1, 1, 1, 1, 2, 0, 1, false), kEnd);
    ExpectTheSame(Config<T>(2, 63, 2, 2, 16, 0, 1, true), kEnd);
    ExpectTheSame(Config<T>(1, 65, 4, 2, 8, 7, 0.3, false), kStart);
    ExpectTheSame(Config<T>(2, 130, 3, 1, 72, 0, 0.125, true), kEnd);
    ExpectTheSame(Config<T>(1, 200, 2, 1, 10, 66, 1, false), kEnd);
    ExpectTheSame(Config<T>(1, 150, 2, 2, 6, 20, 0.5, true), kStart);
  }
};

TEST_F(CudaAttention, GivesTheBitsOfTheCpuInFp32) { ExpectTheSameOnOddShapes<float>(); }

TEST_F(CudaAttention, GivesTheBitsOfTheCpuInFp64) { ExpectTheSameOnOddShapes<double>(); }

TEST_F(CudaAttention, GivesTheSameBitsOnOtherGridsAndInOtherOrders) {
  for (const RunOrder order : {RunOrder::kDescending, RunOrder::kShuffled}) {
    cuda::emulator::SetOrder(order);
    cuda::launch_shape() = {.threads = 64, .blocks_most = 2};
    ExpectTheSame(Config<float>(1, 130, 4, 2, 8, 70, 0.3, true), GuardedMemory::Place::kAtEnd);
    ExpectTheSame(Config<double>(1, 70, 2, 1, 66, 0, 1, false), GuardedMemory::Place::kAtEnd);
  }
}

}  // namespace
}  // namespace retrace
