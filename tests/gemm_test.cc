#include "kernels/gemm.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/isa.h"
#include "kernels/thread_pool.h"

namespace retrace {
namespace {

// Memory between two pages that may not be touched, flush with one of them: a read or write outside
// of a matrix ends the test program.
class GuardedBytes {
 public:
  GuardedBytes(size_t size_bytes, bool at_end) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inner = (size_bytes + page) / page * page;
    mapped_bytes_ = inner + 2 * page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    RT_CHECK(base_ != MAP_FAILED);
    RT_CHECK_EQ(0, mprotect(base_ + page, inner, PROT_READ | PROT_WRITE));
    data_ = base_ + page + (at_end ? inner - size_bytes : 0);
  }
  ~GuardedBytes() { munmap(base_, mapped_bytes_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* base_;
  std::byte* data_;
  size_t mapped_bytes_;
};

enum class Layout {
  kRowMajor,
  kRowMajorPadded,
  kTransposed,
  kTransposedPadded,
  kSpread,
  kReversed
};
constexpr Layout kLayouts[] = {Layout::kRowMajor,       Layout::kTransposed,
                               Layout::kRowMajorPadded, Layout::kTransposedPadded,
                               Layout::kSpread,         Layout::kReversed};

// A matrix of its own strides in guarded memory. What lies between its elements is NaN, so a
// product that used it would show.
template <class T>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, Layout layout, bool at_end)
      : rows_(rows), cols_(cols), bytes_(Allocate(layout), at_end) {
    data_ = reinterpret_cast<T*>(bytes_.data());
    std::fill(data_, data_ + span_, std::numeric_limits<T>::quiet_NaN());
    origin_ = data_ + (layout == Layout::kReversed ? span_ - 1 : 0);
  }

  T& At(int64_t i, int64_t j) { return origin_[i * row_stride_ + j * col_stride_]; }
  T At(int64_t i, int64_t j) const { return origin_[i * row_stride_ + j * col_stride_]; }
  T* origin() const { return origin_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t row_stride() const { return row_stride_; }
  int64_t col_stride() const { return col_stride_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + span_; }

 private:
  size_t Allocate(Layout layout) {
    row_stride_ = cols_;
    col_stride_ = 1;
    if (layout == Layout::kRowMajorPadded) row_stride_ = cols_ + 3;
    if (layout == Layout::kTransposed) row_stride_ = 1, col_stride_ = rows_;
    if (layout == Layout::kTransposedPadded) row_stride_ = 1, col_stride_ = rows_ + 5;
    if (layout == Layout::kSpread) row_stride_ = 2 * cols_ + 1, col_stride_ = 2;
    span_ = rows_ * cols_ == 0 ? 0 : (rows_ - 1) * row_stride_ + (cols_ - 1) * col_stride_ + 1;
    if (layout == Layout::kReversed) row_stride_ = -row_stride_, col_stride_ = -col_stride_;
    return static_cast<size_t>(span_) * sizeof(T);
  }

  int64_t rows_, cols_, row_stride_ = 0, col_stride_ = 0, span_ = 0;
  GuardedBytes bytes_;
  T* data_;
  T* origin_;
};

// Values whose sums round, of very different sizes; with `special`, a few that IEEE 754 treats
// apart.
template <class T>
void Fill(Matrix<T>& matrix, std::mt19937& random, bool special) {
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> die(0, 999), exponent(-12, 12);
  using Limits = std::numeric_limits<T>;
  const T specials[] = {Limits::quiet_NaN(),  Limits::infinity(), -Limits::infinity(),
                        -Limits::quiet_NaN(), Limits::max(),      -Limits::max()};
  for (int64_t i = 0; i < matrix.rows(); ++i) {
    for (int64_t j = 0; j < matrix.cols(); ++j) {
      T value = static_cast<T>(std::ldexp(normal(random), exponent(random)));
      if (special) {
        const int roll = die(random);
        if (roll < 6 && (roll < 1 || die(random) < 100)) value = specials[roll];
        if (roll >= 10 && roll < 200) value = -T{0};
        if (roll >= 200 && roll < 300) value = Limits::denorm_min() * T(roll - 250);
        if (roll >= 300 && roll < 340) value = Limits::min() * T(0.5);
      }
      matrix.At(i, j) = value;
    }
  }
}

// Of a NaN only that it is one is promised.
template <class T>
bool SameBits(T x, T y) {
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  return std::memcmp(&x, &y, sizeof(T)) == 0;
}

// BF16 by definition: of the two neighbours the nearer, of equally near ones the even.
float NearestBf16(float value) {
  if (std::isnan(value)) return std::bit_cast<float>(0x7fc00000u);
  if (std::isinf(value)) return value;
  const uint32_t below_bits = std::bit_cast<uint32_t>(value) & 0xffff0000u;
  const float below = std::bit_cast<float>(below_bits);
  const double step =
      std::ldexp(1.0, std::max(-133, std::ilogb(below == 0 ? 0x1p-126f : below) - 7));
  const double sign = std::signbit(value) ? -1.0 : 1.0;
  const double rest = (static_cast<double>(value) - static_cast<double>(below)) * sign;
  const bool up = rest > step / 2 || (rest == step / 2 && (below_bits & 0x10000u) != 0);
  // The next BF16 has the next bits, from the largest finite one on to infinity.
  return up ? std::bit_cast<float>(below_bits + 0x10000u) : below;
}
double NearestBf16(double value) { return value; }

// The clause, written down once more: chains of 256 from +0, added from left to right; then round,
// then add.
template <class T>
T Definition(const Matrix<T>& a, const Matrix<T>& b, int64_t i, int64_t j) {
  std::vector<T> chains;
  for (int64_t k = 0; k < a.cols(); ++k) {
    if (k % 256 == 0) chains.push_back(T{0});
    chains.back() = std::fma(a.At(i, k), b.At(k, j), chains.back());
  }
  if (chains.empty()) return T{0};
  T sum = chains[0];
  for (size_t p = 1; p < chains.size(); ++p) sum = sum + chains[p];
  return sum;
}

template <class T>
GemmArgs<T> ArgsFor(const Matrix<T>& a, const Matrix<T>& b, Matrix<T>& c, Rounding round,
                    bool add) {
  return {.m = a.rows(),
          .n = b.cols(),
          .k = a.cols(),
          .a = a.origin(),
          .a_row_stride = a.row_stride(),
          .a_col_stride = a.col_stride(),
          .b = b.origin(),
          .b_row_stride = b.row_stride(),
          .b_col_stride = b.col_stride(),
          .c = c.origin(),
          .c_row_stride = c.row_stride(),
          .round = round,
          .add = add};
}

std::vector<Isa> SupportedIsas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (IsaSupported(isa)) isas.push_back(isa);
  }
  return isas;
}

struct Shape {
  int64_t m, n, k;
};

// Around the sizes of tiles (6×16, 6×8, 14×32, 14×16), of blocks of transposition, of chains, and
// of what is packed at a time.
constexpr Shape kShapes[] = {
    {1, 1, 1},      {1, 1, 0},     {3, 5, 0},       {1, 1, 256},    {1, 1, 257},    {1, 17, 64},
    {1, 130, 300},  {17, 1, 64},   {97, 1, 513},    {2, 2, 2},      {5, 7, 3},      {6, 16, 8},
    {6, 8, 255},    {7, 17, 9},    {12, 32, 256},   {13, 33, 257},  {14, 32, 7},    {15, 31, 16},
    {28, 64, 64},   {29, 65, 63},  {47, 48, 5},     {48, 47, 511},  {49, 15, 512},  {32, 32, 128},
    {64, 64, 513},  {97, 130, 70}, {100, 129, 255}, {61, 200, 257}, {8, 1100, 258}, {160, 20, 300},
    {530, 18, 257}, {1, 2, 1025},
};

template <class T>
struct Threads {
  explicit Threads(int count) : pool(count), scratch(static_cast<size_t>(count)) {}
  ThreadPool pool;
  std::vector<GemmScratch> scratch;
};

// One product by every instruction set and number of threads against the definition.
template <class T>
void ExpectDefinition(const Shape& shape, Layout a_layout, Layout b_layout, bool special,
                      std::vector<std::unique_ptr<Threads<T>>>& pools) {
  std::mt19937 random(static_cast<unsigned>(shape.m * 7919 + shape.n * 104729 + shape.k));
  const bool at_end = (shape.m + shape.n) % 2 == 0;
  Matrix<T> a(shape.m, shape.k, a_layout, at_end), b(shape.k, shape.n, b_layout, !at_end);
  Matrix<T> before(shape.m, shape.n, Layout::kRowMajorPadded, at_end),
      product = {shape.m, shape.n, Layout::kRowMajor, at_end};
  Fill(a, random, special);
  Fill(b, random, special);
  Fill(before, random, special);
  for (int64_t i = 0; i < shape.m; ++i) {
    for (int64_t j = 0; j < shape.n; ++j) product.At(i, j) = Definition(a, b, i, j);
  }
  Matrix<T> c(shape.m, shape.n, Layout::kRowMajorPadded, at_end);
  Matrix<T> expected(shape.m, shape.n, Layout::kRowMajorPadded, at_end);
  for (Rounding round : {Rounding::kNone, Rounding::kBf16}) {
    if (round == Rounding::kBf16 && !std::is_same_v<T, float>) continue;
    for (bool add : {false, true}) {
      std::copy(before.begin(), before.end(), expected.begin());
      for (int64_t i = 0; i < shape.m; ++i) {
        for (int64_t j = 0; j < shape.n; ++j) {
          T value = product.At(i, j);
          if (round == Rounding::kBf16) value = NearestBf16(value);
          expected.At(i, j) = add ? before.At(i, j) + value : value;
        }
      }
      for (Isa isa : SupportedIsas()) {
        for (std::unique_ptr<Threads<T>>& threads : pools) {
          std::copy(before.begin(), before.end(), c.begin());  // the gaps between rows too
          Gemm(isa, threads->pool, threads->scratch, ArgsFor(a, b, c, round, add));
          for (int64_t e = 0; e < c.end() - c.begin(); ++e) {
            ASSERT_TRUE(SameBits(expected.begin()[e], c.begin()[e]))
                << IsaName(isa) << ", " << threads->pool.threads() << " threads, " << shape.m << "x"
                << shape.n << "x" << shape.k << ", layouts " << static_cast<int>(a_layout) << " "
                << static_cast<int>(b_layout) << ", add " << add << ", round "
                << static_cast<int>(round) << ", special " << special << ", row "
                << e / c.row_stride() << ", column " << e % c.row_stride() << ": expected "
                << expected.begin()[e] << ", got " << c.begin()[e];
          }
        }
      }
    }
  }
}

template <class T>
class GemmOf : public testing::Test {
 protected:
  GemmOf() {
    for (int count : {1, 2, 3}) pools_.push_back(std::make_unique<Threads<T>>(count));
  }
  std::vector<std::unique_ptr<Threads<T>>> pools_;
};
using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(GemmOf, Types);

TYPED_TEST(GemmOf, EveryShapeHasTheBitsOfTheDefinition) {
  size_t turn = 0;
  for (const Shape& shape : kShapes) {
    for (size_t i = 0; i < 3; ++i, ++turn) {  // all pairs of layouts pass by in turn
      ExpectDefinition<TypeParam>(shape, kLayouts[turn % 6], kLayouts[turn / 6 % 6], turn % 2 == 1,
                                  this->pools_);
      if (this->HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(GemmOf, EveryPairOfLayoutsHasTheBitsOfTheDefinition) {
  // (The last has rows that fall into one set of the first-level cache.)
  for (const Shape& shape : {Shape{50, 35, 260}, Shape{9, 70, 20}, Shape{15, 5, 1024}}) {
    for (Layout a_layout : kLayouts) {
      for (Layout b_layout : kLayouts) {
        ExpectDefinition<TypeParam>(shape, a_layout, b_layout, false, this->pools_);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(GemmOf, ABatchHasTheBitsOfItsProducts) {
  using T = TypeParam;
  std::mt19937 random(5);
  // Few large products (each cut into parts), many small ones, unequal ones, none.
  const std::vector<std::vector<Shape>> batches = {
      {{70, 90, 300}, {70, 90, 300}},
      std::vector<Shape>(50, Shape{32, 32, 40}),
      {{1, 1, 1}, {0, 5, 3}, {150, 64, 256}, {5, 0, 3}, {7, 200, 0}},
      {}};
  for (const std::vector<Shape>& shapes : batches) {
    std::vector<std::unique_ptr<Matrix<T>>> a, b, c, expected;
    std::vector<GemmArgs<T>> products;
    for (const Shape& shape : shapes) {
      const auto make = [&](int64_t rows, int64_t cols, Layout layout) {
        auto matrix = std::make_unique<Matrix<T>>(rows, cols, layout, true);
        Fill(*matrix, random, false);
        return matrix;
      };
      a.push_back(make(shape.m, shape.k, Layout::kRowMajor));
      b.push_back(make(shape.k, shape.n, Layout::kTransposed));
      c.push_back(make(shape.m, shape.n, Layout::kRowMajor));
      expected.push_back(make(shape.m, shape.n, Layout::kRowMajor));
      GemmScratch scratch;
      GemmSerial(Isa::kScalar, ArgsFor(*a.back(), *b.back(), *expected.back(), {}, false), scratch);
      products.push_back(ArgsFor(*a.back(), *b.back(), *c.back(), Rounding::kNone, false));
    }
    for (Isa isa : SupportedIsas()) {
      for (std::unique_ptr<Threads<T>>& threads : this->pools_) {
        for (const auto& matrix : c) std::fill(matrix->begin(), matrix->end(), T{-1});
        GemmBatch<T>(isa, threads->pool, threads->scratch, products);
        for (size_t p = 0; p < products.size(); ++p) {
          for (int64_t e = 0; e < c[p]->end() - c[p]->begin(); ++e) {
            ASSERT_TRUE(SameBits(expected[p]->begin()[e], c[p]->begin()[e]))
                << IsaName(isa) << ", product " << p << ", element " << e;
          }
        }
      }
    }
  }
}

// The block of 256 is the clause, not a tuning knob: a case in which one chain over all of k, and
// chains of 128, give other bits.
TYPED_TEST(GemmOf, ChainsAreBlocksOf256AddedLeftToRight) {
  using T = TypeParam;
  const T half_ulp = std::numeric_limits<T>::epsilon() / 2;  // of 1
  Matrix<T> a(1, 600, Layout::kRowMajor, true), b(600, 1, Layout::kRowMajor, true);
  Matrix<T> c(1, 1, Layout::kRowMajor, true);
  std::fill(a.begin(), a.end(), T{1});
  std::fill(b.begin(), b.end(), half_ulp);
  b.At(0, 0) = T{1};  // the rest of its chain is lost one by one: 1 + half_ulp = 1, ties to even
  for (Isa isa : SupportedIsas()) {
    GemmScratch scratch;
    GemmSerial(isa, ArgsFor(a, b, c, Rounding::kNone, false), scratch);
    EXPECT_EQ(T{1} + 256 * half_ulp + 88 * half_ulp, c.At(0, 0)) << IsaName(isa);
  }
}

// Chains start from +0 and P0 is not added to a zero: a product that rounds to −0 stays −0.
TYPED_TEST(GemmOf, AnUnderflowToMinusZeroSurvives) {
  using T = TypeParam;
  Matrix<T> a(6, 257, Layout::kRowMajor, true), b(257, 40, Layout::kRowMajor, true);
  Matrix<T> c(6, 40, Layout::kRowMajor, true);
  std::fill(a.begin(), a.end(), -std::numeric_limits<T>::denorm_min());
  std::fill(b.begin(), b.end(), std::numeric_limits<T>::denorm_min());
  for (Isa isa : SupportedIsas()) {
    GemmScratch scratch;
    GemmSerial(isa, ArgsFor(a, b, c, Rounding::kNone, false), scratch);
    for (T value : std::vector<T>(c.begin(), c.end())) {
      ASSERT_TRUE(value == 0 && std::signbit(value)) << IsaName(isa);
    }
  }
}

TEST(Gemm, RoundingToBf16CoversTiesOverflowSubnormalsAndNan) {
  const uint32_t cases[][2] = {
      {0x3f808000u, 0x3f800000u}, {0x3f818000u, 0x3f820000u}, {0x3f808001u, 0x3f810000u},
      {0x7f7fffffu, 0x7f800000u}, {0x7f7f7fffu, 0x7f7f0000u}, {0xff7f8000u, 0xff800000u},
      {0x80000000u, 0x80000000u}, {0x00008000u, 0x00000000u}, {0x00018000u, 0x00020000u},
      {0x807fffffu, 0x80800000u}, {0x7f800000u, 0x7f800000u}, {0xff800000u, 0xff800000u},
      {0x7fc12345u, 0x7fc00000u}, {0xffc00000u, 0x7fc00000u}, {0x7fffffffu, 0x7fc00000u}};
  for (int64_t n : {1, 16, 37}) {  // scalar tails and whole vectors
    for (const auto& [bits, rounded] : cases) {
      // −0 comes out of 1 · x only if the chain did not begin with +0: it does, so x = −0 gives +0.
      const uint32_t expected = bits == 0x80000000u ? 0u : rounded;
      Matrix<float> a(1, 1, Layout::kRowMajor, true), b(1, n, Layout::kRowMajor, true);
      Matrix<float> c(1, n, Layout::kRowMajor, true);
      a.At(0, 0) = 1.0f;
      std::fill(b.begin(), b.end(), std::bit_cast<float>(bits));
      for (Isa isa : SupportedIsas()) {
        GemmScratch scratch;
        GemmSerial(isa, ArgsFor(a, b, c, Rounding::kBf16, false), scratch);
        for (const float* value = c.begin(); value < c.end(); ++value) {
          ASSERT_EQ(expected, std::bit_cast<uint32_t>(*value))
              << IsaName(isa) << " " << std::hex << bits;
        }
      }
    }
  }
}

TEST(Gemm, Avx512HasTheBitsOfTheDefinitionWhereTheProcessorHasIt) {
  if (!IsaSupported(Isa::kAvx512)) {
    GTEST_SKIP() << "this processor has no AVX-512 (F, VL, DQ, BW): its kernels were not run";
  }
  std::vector<std::unique_ptr<Threads<float>>> pools;
  pools.push_back(std::make_unique<Threads<float>>(2));
  ExpectDefinition<float>({43, 97, 300}, Layout::kRowMajor, Layout::kTransposed, true, pools);
}

TEST(GemmDeathTest, Fp64IsNotRoundedToBf16) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const double one = 1;
  double c = 0;
  GemmScratch scratch;
  const GemmArgs<double> args{
      .m = 1, .n = 1, .k = 1, .a = &one, .b = &one, .c = &c, .round = Rounding::kBf16};
  EXPECT_DEATH(GemmSerial(Isa::kScalar, args, scratch), "kNone");
}

}  // namespace
}  // namespace retrace
