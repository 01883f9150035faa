// The CUDA product kernel, run by the emulator: the bits of the scalar kernel on odd shapes, any
// strides, with both tiles, other grids and orders, reading and writing nothing outside of its
// matrices (guarded memory says so).
#include <gtest/gtest.h>

#include <memory>

#include "kernels/cuda/device_gemm.h"
#include "kernels/cuda/language.h"
#include "kernels/gemm.h"
#include "tests/longhand.h"

namespace retrace {
namespace {

using cuda::GuardedMemory;
using cuda::RunOrder;

enum class Form { kNN, kNT, kTN, kStrided };  // which operands are transposed; both with gaps

struct Case {
  int64_t m, n, k;
  Form form = Form::kNN;
  bool add = false;
  Rounding round = Rounding::kNone;
  bool special = false;
};

// Arrays of a case in guarded memory.
template <class T>
class Matrices {
 public:
  Matrices(const Case& c, GuardedMemory::Place place, uint32_t seed) : place_(place), random_(seed) {
    args.m = c.m, args.n = c.n, args.k = c.k;
    args.add = c.add, args.round = c.round;
    const int64_t gap = c.form == Form::kStrided ? 3 : 0;
    const bool a_turned = c.form == Form::kTN || c.form == Form::kStrided;
    const bool b_turned = c.form == Form::kNT;
    args.a_row_stride = a_turned ? 1 : c.k + gap;
    args.a_col_stride = a_turned ? c.m + gap : 1;
    args.b_row_stride = b_turned ? 1 : c.n + gap;
    args.b_col_stride = b_turned ? c.k + gap : 1;
    args.c_row_stride = c.n + gap;
    args.a = New(Extent(c.m, args.a_row_stride, c.k, args.a_col_stride), c.special);
    args.b = New(Extent(c.k, args.b_row_stride, c.n, args.b_col_stride), c.special);
    c_size = Extent(c.m, args.c_row_stride, c.n, 1);
    args.c = New(c_size, c.special);
  }

  std::vector<T> Result() const { return std::vector<T>(args.c, args.c + c_size); }
  void SetResult(const std::vector<T>& c) { std::copy(c.begin(), c.end(), args.c); }

  GemmArgs<T> args;
  int64_t c_size = 0;

 private:
  static int64_t Extent(int64_t rows, int64_t row_stride, int64_t cols, int64_t col_stride) {
    return rows * cols == 0 ? 0 : (rows - 1) * row_stride + (cols - 1) * col_stride + 1;
  }
  T* New(int64_t size, bool special) {
    memory_.push_back(std::make_unique<GuardedMemory>(size * sizeof(T), place_));
    T* data = static_cast<T*>(memory_.back()->data());
    const std::vector<T> values = longhand::Values<T>(size, random_, special);
    std::copy(values.begin(), values.end(), data);
    return data;
  }

  GuardedMemory::Place place_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<GuardedMemory>> memory_;
};

class CudaGemm : public testing::Test {
 protected:
  void TearDown() override {
    cuda::launch_shape() = {};
    cuda::emulator::SetOrder(RunOrder::kAscending);
    ExpectNoFaults();
  }
  void ExpectNoFaults() {
    for (const std::string& fault : cuda::emulator::TakeFaults()) ADD_FAILURE() << fault;
  }

  template <class T>
  void ExpectBitsOfTheScalarKernel(const Case& c, GuardedMemory::Place place) {
    SCOPED_TRACE(testing::Message() << c.m << " x " << c.n << " x " << c.k << ", form "
                                    << static_cast<int>(c.form));
    Matrices<T> matrices(c, place, static_cast<uint32_t>(c.m * 31 + c.n * 7 + c.k));
    const std::vector<T> before = matrices.Result();
    GemmScratch scratch;
    GemmSerial(Isa::kScalar, matrices.args, scratch);
    const std::vector<T> expected = matrices.Result();
    matrices.SetResult(before);
    cuda::DeviceGemm(&matrices.args, 1);
    EXPECT_EQ(-1, longhand::FirstDifference(expected, matrices.Result()));
    ExpectNoFaults();
  }

  template <class T>
  void ExpectBitsOnOddShapes() {
    for (const Case& c : kCases) {
      for (int tile : {0, 1}) {
        cuda::launch_shape().tile = tile;
        Case plain = c;
        if (sizeof(T) == 8) plain.round = Rounding::kNone;
        ExpectBitsOfTheScalarKernel<T>(plain, tile == 0 ? GuardedMemory::Place::kAtEnd
                                                        : GuardedMemory::Place::kAtStart);
        if (HasFailure()) return;
      }
    }
  }

  static inline const std::vector<Case> kCases = {
      {1, 1, 1},
      {1, 1, 0},
      {3, 5, 0, Form::kNN, true},
      {5, 3, 7, Form::kNT},
      {64, 64, 8, Form::kNN},
      {65, 63, 9, Form::kTN, true},
      {17, 130, 255, Form::kNT, false, Rounding::kBf16},
      {129, 33, 256, Form::kNN, true, Rounding::kBf16, true},
      {40, 70, 257, Form::kTN, false, Rounding::kNone, true},
      {31, 65, 520, Form::kStrided, true},
      {128, 128, 16, Form::kStrided, false, Rounding::kBf16},
  };
};

TEST_F(CudaGemm, GivesTheBitsOfTheScalarKernelInFp32) { ExpectBitsOnOddShapes<float>(); }

TEST_F(CudaGemm, GivesTheBitsOfTheScalarKernelInFp64) { ExpectBitsOnOddShapes<double>(); }

TEST_F(CudaGemm, GivesTheSameBitsUnderOtherGridsAndOrders) {
  for (const RunOrder order : {RunOrder::kDescending, RunOrder::kShuffled}) {
    cuda::emulator::SetOrder(order);
    cuda::launch_shape().blocks_most = order == RunOrder::kShuffled ? 5 : 2;
    ExpectBitsOfTheScalarKernel<float>({150, 140, 270, Form::kNT}, GuardedMemory::Place::kAtEnd);
    ExpectBitsOfTheScalarKernel<double>({70, 70, 20, Form::kTN}, GuardedMemory::Place::kAtEnd);
  }
}

TEST_F(CudaGemm, ProductsOfABatchAreThoseOfSingleCalls) {
  // More than one launch takes, of different shapes.
  std::vector<std::unique_ptr<Matrices<float>>> all;
  std::vector<GemmArgs<float>> products;
  std::vector<std::vector<float>> expected;
  for (int64_t i = 0; i < 19; ++i) {
    const Case c = {1 + 9 * i, 80 - 4 * i, 3 + i, i % 2 ? Form::kNT : Form::kTN, i % 3 == 0};
    all.push_back(std::make_unique<Matrices<float>>(c, GuardedMemory::Place::kAtEnd, 7 + i));
    const std::vector<float> before = all.back()->Result();
    GemmScratch scratch;
    GemmSerial(Isa::kScalar, all.back()->args, scratch);
    expected.push_back(all.back()->Result());
    all.back()->SetResult(before);
    products.push_back(all.back()->args);
  }
  cuda::DeviceGemm(products.data(), std::ssize(products));
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(-1, longhand::FirstDifference(expected[i], all[i]->Result())) << "product " << i;
  }
}

// -0 comes out of an underflow; a step of the last stage beyond k would make it +0.
TEST_F(CudaGemm, AnUnderflowToMinusZeroSurvives) {
  for (int64_t k : {1, 7, 8, 9, 257}) {
    const std::vector<float> a(k, 1e-30f), b(k, -1e-30f);
    float c = 1;
    const GemmArgs<float> args = {.m = 1, .n = 1, .k = k, .a = a.data(), .a_row_stride = k,
                                  .b = b.data(), .b_row_stride = 1, .c = &c, .c_row_stride = 1};
    cuda::DeviceGemm(&args, 1);
    EXPECT_EQ(std::bit_cast<uint32_t>(-0.0f), std::bit_cast<uint32_t>(c)) << k;
  }
}

// The guard and the comparison see what they are for.
TEST_F(CudaGemm, AnOperandOneElementShortIsSeen) {
  Matrices<float> matrices({9, 9, 9}, GuardedMemory::Place::kAtEnd, 1);
  GemmArgs<float> args = matrices.args;
  args.k += 1;
  cuda::DeviceGemm(&args, 1);
  EXPECT_FALSE(cuda::emulator::TakeFaults().empty());
}

TEST_F(CudaGemm, AnotherOrderOfAdditionIsSeen) {
  Matrices<float> matrices({8, 8, 300}, GuardedMemory::Place::kAtEnd, 3);
  GemmScratch scratch;
  GemmSerial(Isa::kScalar, matrices.args, scratch);
  const std::vector<float> expected = matrices.Result();
  // Two products of 150 are other chains than 256 and 44.
  GemmArgs<float> half = matrices.args;
  half.k = 150;
  cuda::DeviceGemm(&half, 1);
  half.a += 150 * half.a_col_stride;
  half.b += 150 * half.b_row_stride;
  half.add = true;
  cuda::DeviceGemm(&half, 1);
  EXPECT_NE(-1, longhand::FirstDifference(expected, matrices.Result()));
}

}  // namespace
}  // namespace retrace
