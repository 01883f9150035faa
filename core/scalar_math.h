// retrace's own exp, log, tanh, sin, cos and powers, and the primitives they are written in.
// Used by every kernel (scalar, vector16.h, CUDA) and wherever the recipe's numbers become bits.
//
// Each FP32 function is a template over a *real* F: float here, sixteen lanes in
// kernels/vector16.h. It uses nothing but the primitives below (found by argument-dependent lookup)
// and + - * /, so every lane of every implementation performs the same IEEE operations in the same
// order: same bits. No library mathematics: fma and square root are the correctly rounded IEEE
// operations, whether the compiler emits an instruction or (fma on a plain x86-64) a call.
//
// Guarantee: results depend on the argument's bits alone. A NaN result is the canonical one.
// Largest
//   errors and special values stand at each function, as measured by tests/scalar_math_test.cc.
// Requires: round-to-nearest-even, subnormals kept, no contraction (clause 1).
// Clauses 1, 2 of core/NUMERICS.md. Thread-safety: pure functions, no tables in memory.
#ifndef RETRACE_CORE_SCALAR_MATH_H_
#define RETRACE_CORE_SCALAR_MATH_H_

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define RT_HD __host__ __device__
#define RT_INLINE static __forceinline__
#else
#define RT_HD
// Never a weak symbol: a file compiled for AVX could hand the linker a copy that a lesser processor
// can not run.
#define RT_INLINE static inline __attribute__((always_inline))
#endif

namespace retrace::math {

// ---- Primitives of float and double ----------------------------------------------------------
// kernels/vector16.h defines the same names, operators included, on its lanes.

RT_HD RT_INLINE int32_t Bits(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
RT_HD RT_INLINE int64_t Bits(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
RT_HD RT_INLINE float FromBits(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
RT_HD RT_INLINE double FromBits(int64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// a * b + c, rounded once.
RT_HD RT_INLINE float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
RT_HD RT_INLINE double Fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
RT_HD RT_INLINE float Sqrt(float x) { return __builtin_sqrtf(x); }
RT_HD RT_INLINE double Sqrt(double x) { return __builtin_sqrt(x); }

RT_HD RT_INLINE float Select(bool mask, float yes, float no) { return mask ? yes : no; }
RT_HD RT_INLINE double Select(bool mask, double yes, double no) { return mask ? yes : no; }
RT_HD RT_INLINE int32_t Select(bool mask, int32_t yes, int32_t no) { return mask ? yes : no; }
RT_HD RT_INLINE bool And(bool a, bool b) { return a & b; }
RT_HD RT_INLINE bool Or(bool a, bool b) { return a | b; }
RT_HD RT_INLINE bool Not(bool a) { return !a; }

// The constant in every lane of a value like `prototype`.
RT_HD RT_INLINE float Splat(float /*prototype*/, float constant) { return constant; }
RT_HD RT_INLINE double Splat(double /*prototype*/, double constant) { return constant; }
RT_HD RT_INLINE int32_t Splat(int32_t /*prototype*/, int32_t constant) { return constant; }

// Integer lanes wrap around.
RT_HD RT_INLINE int32_t AddBits(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
RT_HD RT_INLINE int32_t SubBits(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}
RT_HD RT_INLINE int32_t AndBits(int32_t a, int32_t b) { return a & b; }
RT_HD RT_INLINE int32_t OrBits(int32_t a, int32_t b) { return a | b; }
RT_HD RT_INLINE int32_t XorBits(int32_t a, int32_t b) { return a ^ b; }
template <int kCount>
RT_HD RT_INLINE int32_t ShiftLeft(int32_t a) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) << kCount);
}
template <int kCount>
RT_HD RT_INLINE int32_t ShiftRightSigned(int32_t a) {
  return a >> kCount;
}
template <int kCount>
RT_HD RT_INLINE int32_t ShiftRightZero(int32_t a) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) >> kCount);
}

RT_HD RT_INLINE float ToReal(int32_t a) { return static_cast<float>(a); }  // nearest, ties to even

constexpr int32_t kCanonicalNanBits32 = 0x7fc00000;
constexpr int64_t kCanonicalNanBits64 = 0x7ff8000000000000;
constexpr int32_t kInfinityBits32 = 0x7f800000;
constexpr int64_t kInfinityBits64 = 0x7ff0000000000000;

// Clause 1's maximum and minimum: any NaN gives the canonical NaN, +0 > -0.
template <class F>
RT_HD RT_INLINE F ScalarMax(F a, F b, F nan) {
  if (a != a || b != b) return nan;
  if (a == b) return FromBits(Bits(a) & Bits(b));  // differs from a for zeros of both signs only
  return a > b ? a : b;
}
template <class F>
RT_HD RT_INLINE F ScalarMin(F a, F b, F nan) {
  if (a != a || b != b) return nan;
  if (a == b) return FromBits(Bits(a) | Bits(b));
  return a < b ? a : b;
}
RT_HD RT_INLINE float Max(float a, float b) {
  return ScalarMax(a, b, FromBits(kCanonicalNanBits32));
}
RT_HD RT_INLINE double Max(double a, double b) {
  return ScalarMax(a, b, FromBits(kCanonicalNanBits64));
}
RT_HD RT_INLINE float Min(float a, float b) {
  return ScalarMin(a, b, FromBits(kCanonicalNanBits32));
}
RT_HD RT_INLINE double Min(double a, double b) {
  return ScalarMin(a, b, FromBits(kCanonicalNanBits64));
}

// ---- Written once for every real ---------------------------------------------------------------

// Nearest integer, ties to even, for |x| <= 2^22. Adding 1.5 * 2^23 leaves it in the low bits, so
// no conversion with its own rounding or range rules takes part. Outside the range: unspecified
// bits, the same everywhere.
template <class F>
RT_HD RT_INLINE auto RoundToInt(F x) {
  const F shifted = x + Splat(x, 12582912.0f);
  return SubBits(Bits(shifted), Splat(Bits(x), 0x4b400000));
}

template <class F>
RT_HD RT_INLINE auto IsNan(F x) {
  return x != x;
}

// Every NaN becomes 0x7fc00000 (FP64: 0x7ff8000000000000), all else is kept.
template <class F>
RT_HD RT_INLINE F CanonicalNan(F x) {
  return Select(IsNan(x), FromBits(Splat(Bits(x), kCanonicalNanBits32)), x);
}
RT_HD RT_INLINE double CanonicalNan(double x) { return x != x ? FromBits(kCanonicalNanBits64) : x; }

template <class F>
RT_HD RT_INLINE F Abs(F x) {
  return FromBits(AndBits(Bits(x), Splat(Bits(x), 0x7fffffff)));
}
RT_HD RT_INLINE double Abs(double x) { return FromBits(Bits(x) & 0x7fffffffffffffff); }

// Computes: the nearest BF16 number, ties to even, as a float (low 16 bits zero). Overflow goes to
//   Inf; Inf and subnormals are kept, every NaN gives 0x7fc00000. Clause 3.
template <class F>
RT_HD RT_INLINE F RoundToBf16(F x) {
  const auto bits = Bits(x);
  const auto odd = AndBits(ShiftRightZero<16>(bits), Splat(bits, 1));
  const auto moved = AddBits(AddBits(bits, Splat(bits, 0x7fff)), odd);
  const auto rounded = AndBits(moved, Splat(bits, static_cast<int32_t>(0xffff0000u)));
  return FromBits(Select(IsNan(x), Splat(bits, kCanonicalNanBits32), rounded));
}

// Computes: the sum of 16 lanes in clause 6's order: lane[l] += lane[l + h] for h = 8, 4, 2, 1.
template <class F>
RT_HD RT_INLINE F LaneTree(const F* lanes) {
  F sums[8];
  for (int l = 0; l < 8; ++l) sums[l] = lanes[l] + lanes[l + 8];
  for (int h = 4; h > 0; h /= 2) {
    for (int l = 0; l < h; ++l) sums[l] = sums[l] + sums[l + h];
  }
  return sums[0];
}

// c0 + x (c1 + x (c2 + ...)), one fma per step.
template <class F, class C>
RT_HD RT_INLINE F Horner(F x, C c0) {
  return Splat(x, c0);
}
template <class F, class C, class... Rest>
RT_HD RT_INLINE F Horner(F x, C c0, Rest... rest) {
  return Fma(x, Horner(x, rest...), Splat(x, c0));
}

// The polynomials are macros because device code can not index an array of the host.
// clang-format off
// BEGIN of the table written by scripts/fit_math.py
constexpr float kLog2E32 = 0x1.715476p+0f;
constexpr float kLn2Hi32 = 0x1.62e4p-1f;  // 16 bits: times an exponent it is exact
constexpr float kLn2Lo32 = 0x1.7f7d1cp-20f;
constexpr double kLog2E64 = 0x1.71547652b82fep+0;
constexpr double kLn2Hi64 = 0x1.62e42fefa38p-1;  // 42 bits: times an exponent it is exact
constexpr double kLn2Lo64 = 0x1.ef35793c7673p-45;
constexpr double kTwoOverPi64 = 0x1.45f306dc9c883p-1;
constexpr double kTwoPi64 = 0x1.921fb54442d18p+2;
constexpr double kHalfPi1 = 0x1.921fb54442d18p+0;  // pi/2 is the sum of the three
constexpr double kHalfPi2 = 0x1.1a62633145c07p-54;
constexpr double kHalfPi3 = -0x1.f1976b7ed8fbcp-110;
constexpr int32_t kSqrtHalfBits32 = 0x3f3504f3;
constexpr int64_t kSqrtHalfBits64 = 0x3fe6a09e667f3bcd;

// q of exp(x) = 1 + x + x^2 q(x)
// x in [-0.34666, 0.34666], largest error 2^-28.28, coefficients rounded 2^-28.0.
#define RT_EXP32 \
  0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.1239f8p-7f, 0x1.6a2412p-10f

// p of log(1 + x) = x - x^2/2 + x^3 p(x)
// x in [-0.29289, 0.41421], largest error 2^-30.31, coefficients rounded 2^-28.11.
#define RT_LOG32 \
  0x1.555548p-2f, -0x1.000006p-2f, 0x1.99a4b6p-3f, -0x1.555c4cp-3f, 0x1.23376ap-3f, \
  -0x1.fc2216p-4f, 0x1.e6f06ap-4f, -0x1.de3bcp-4f, 0x1.145744p-4f

// p of tanh(t) = t + t^3 p(x), x = t^2
// x in [1.0e-8, 0.47266], largest error 2^-30.78, coefficients rounded 2^-27.97.
#define RT_TANH32 \
  -0x1.55555p-2f, 0x1.110f8p-3f, -0x1.b9c3fep-5f, 0x1.61d654p-6f, -0x1.040d8ap-7f, \
  0x1.fb9194p-10f

// q of exp(x) = 1 + x + x^2 q(x)
// x in [-0.34666, 0.34666], largest error 2^-64.03, coefficients rounded 2^-60.28.
#define RT_EXP64 \
  0x1p-1, 0x1.555555555555bp-3, 0x1.5555555555503p-5, 0x1.111111110ec53p-7, \
  0x1.6c16c16c30501p-10, 0x1.a01a01b3826ep-13, 0x1.a01a013678f4ap-16, 0x1.71ddf016056c1p-19, \
  0x1.27e5b45ff9b3dp-22, 0x1.af6bfb1814fd9p-26, 0x1.1e3d22874f516p-29

// p of log((1+s)/(1-s)) = 2 s + s x p(x), x = s^2
// x in [1.0e-8, 0.029437], largest error 2^-66.73, coefficients rounded 2^-61.58.
#define RT_LOG64 \
  0x1.5555555555555p-1, 0x1.9999999999dfep-2, 0x1.249249242b515p-2, 0x1.c71c7258ea9f7p-3, \
  0x1.745cde3b9c704p-3, 0x1.3b20aa883ed19p-3, 0x1.0f5ce054afe33p-3, 0x1.0f623cda557d6p-3

// p of tanh(t) = t + t^3 p(x), x = t^2
// x in [1.0e-8, 0.0625], largest error 2^-65.1, coefficients rounded 2^-59.25.
#define RT_TANH64 \
  -0x1.5555555555555p-2, 0x1.1111111110e04p-3, -0x1.ba1ba1b994261p-5, 0x1.664f4827c718cp-6, \
  -0x1.226e13871cc77p-7, 0x1.d6c51cb1699d1p-9, -0x1.7bc6ea98a24d2p-10, 0x1.148e9d1087e83p-11

// p of sin(t) = t + t^3 p(x), x = t^2
// x in [1.0e-8, 0.61715], largest error 2^-68.73, coefficients rounded 2^-57.14.
#define RT_SIN64 \
  -0x1.5555555555555p-3, 0x1.111111111110bp-7, -0x1.a01a01a018a5fp-13, 0x1.71de3a532f6d2p-19, \
  -0x1.ae64528c0348p-26, 0x1.61208b52868f2p-33, -0x1.aaa1cba6a83cep-41

// p of cos(t) = 1 - x/2 + x^2 p(x), x = t^2
// x in [1.0e-8, 0.61715], largest error 2^-63.96, coefficients rounded 2^-59.51.
#define RT_COS64 \
  0x1.555555555554bp-5, -0x1.6c16c16c14f7fp-10, 0x1.a01a019c82807p-16, -0x1.27e4f7e96d825p-22, \
  0x1.1ee9d6c5cc39ep-29, -0x1.8fa41b5513f65p-37

// 64 zero bits, then 1216 bits of 2/pi.
#define RT_TWO_OVER_PI_WORDS \
  0x0000000000000000u, 0xa2f9836e4e441529u, 0xfc2757d1f534ddc0u, 0xdb6295993c439041u, \
  0xfe5163abdebbc561u, 0xb7246e3a424dd2e0u, 0x06492eea09d1921cu, 0xfe1deb1cb129a73eu, \
  0xe88235f52ebb4484u, 0xe99c7026b45f7e41u, 0x3991d639835339f4u, 0x9c845f8bbdf9283bu, \
  0x1ff897ffde05980fu, 0xef2f118b5a0a6d1fu, 0x6d367ecf27cb09b7u, 0x4f463f669e5fea2du, \
  0x7527bac7ebe5f17bu, 0x3d0739f78a5292eau, 0x6bfb5fb11f8d5d08u, 0x56033046fc7b6babu
// END of the table written by scripts/fit_math.py
// clang-format on

// ---- FP32 --------------------------------------------------------------------------------------

// p and k with exp(x) = p * 2^k, p in [0.7, 1.42], for |x| < 2^15.
template <class F, class I>
RT_HD RT_INLINE F ExpParts(F x, I* k) {
  const F shifted = Fma(x, Splat(x, kLog2E32), Splat(x, 12582912.0f));
  const F n = shifted - Splat(x, 12582912.0f);
  *k = SubBits(Bits(shifted), Splat(Bits(x), 0x4b400000));
  const F high = Fma(n, Splat(x, -kLn2Hi32), x);  // exact
  const F r = Fma(n, Splat(x, -kLn2Lo32), high);
  const F tail = Fma(r * r, Horner(r, RT_EXP32), r);
  return tail + Splat(x, 1.0f);
}

// 2^k for k in [-126, 127].
template <class I>
RT_HD RT_INLINE auto PowerOfTwo(I k) {
  return FromBits(ShiftLeft<23>(AddBits(k, Splat(k, 127))));
}

// Computes: e^x. Largest error over all floats: 1.0086 ulp.
//   exp(+-0) = 1, exp(-Inf) = +0, exp(+Inf) = +Inf, NaN -> NaN; +Inf above 0x1.62e42ep6 (88.72), +0
//   below -0x1.9fe368p6 (-103.97), gradual underflow from -87.34 down to there.
template <class F>
RT_HD RT_INLINE F Exp(F x) {
  const F high = Splat(x, 89.0f), low = Splat(x, -105.0f);
  F clamped = Select(x > high, high, x);
  clamped = Select(x < low, low, clamped);
  auto k = Bits(x);
  const F p = ExpParts(clamped, &k);
  // Two factors, each a normal power of two: only the last product can round or overflow.
  const auto half = ShiftRightSigned<1>(k);
  const F scaled = p * PowerOfTwo(half) * PowerOfTwo(SubBits(k, half));
  return CanonicalNan(scaled);
}

// Computes: Exp(x) for x >= -64, +0 below; NaN -> NaN. Softmax's exponential: operands that far
//   below the largest term carry nothing, and subnormal ones make an fma tens of times slower.
template <class F>
RT_HD RT_INLINE F ExpCut(F x) {
  const F high = Splat(x, 89.0f), low = Splat(x, -64.0f);
  F clamped = Select(x > high, high, x);
  clamped = Select(x < low, low, clamped);
  auto k = Bits(x);
  const F p = ExpParts(clamped, &k);
  // No subnormal result, so one factor does: doubling p keeps it below 2^128 where k = 128.
  const F scaled = (p + p) * PowerOfTwo(SubBits(k, Splat(k, 1)));
  return CanonicalNan(Select(x < low, Splat(x, 0.0f), scaled));
}

// Computes: ln x. Largest error over all floats, subnormals too: 0.8317 ulp.
//   log(+-0) = -Inf, log(x < 0) = NaN, log(+Inf) = +Inf, log(1) = +0, NaN -> NaN.
template <class F>
RT_HD RT_INLINE F Log(F x) {
  const auto tiny = x < Splat(x, 0x1p-126f);
  const F normal = Select(tiny, x * Splat(x, 0x1p23f), x);
  const auto bits = Bits(normal);
  // x = m * 2^k, m in [sqrt(1/2), sqrt(2)).
  const auto k = ShiftRightSigned<23>(SubBits(bits, Splat(bits, kSqrtHalfBits32)));
  const F m = FromBits(SubBits(bits, ShiftLeft<23>(k)));
  const F exponent = ToReal(k) - Select(tiny, Splat(x, 23.0f), Splat(x, 0.0f));
  const F f = m - Splat(x, 1.0f);
  const F f2 = f * f;
  F low = Fma(f2 * f, Horner(f, RT_LOG32), exponent * Splat(x, kLn2Lo32));
  low = Fma(f2, Splat(x, -0.5f), low);
  F result = Fma(exponent, Splat(x, kLn2Hi32), f + low);
  result = Select(x == Splat(x, 0.0f), Splat(x, -__builtin_inff()), result);
  result = Select(x == Splat(x, __builtin_inff()), x, result);
  return Select(x >= Splat(x, 0.0f), result, FromBits(Splat(bits, kCanonicalNanBits32)));
}

// Computes: tanh x. Largest error over all floats: 1.2254 ulp. Odd, bit for bit.
//   tanh(+-0) = +-0, tanh(+-Inf) = +-1, NaN -> NaN; subnormals are returned as they are.
template <class F>
RT_HD RT_INLINE F Tanh(F x) {
  const auto sign = AndBits(Bits(x), Splat(Bits(x), static_cast<int32_t>(0x80000000u)));
  const F a = Abs(x);
  const F a2 = a * a;
  const F small = Fma(a2 * a, Horner(a2, RT_TANH32), a);
  const F one = Splat(x, 1.0f);
  const F limit = Splat(x, 10.0f);
  const F clamped = Select(a > limit, limit, a);
  auto k = Bits(x);
  const F p = ExpParts(clamped + clamped, &k);
  const F large = one - Splat(x, 2.0f) / Fma(p, PowerOfTwo(k), one);
  const F magnitude = Select(a < Splat(x, 0.6875f), small, large);
  return CanonicalNan(FromBits(OrBits(Bits(magnitude), sign)));
}

// ---- FP64 --------------------------------------------------------------------------------------

// An unevaluated sum: |low| is at most half an ulp of high.
struct DoubleDouble {
  double high;
  double low;
};

// a + b exactly, for |a| >= |b| or a == 0.
RT_HD RT_INLINE DoubleDouble FastTwoSum(double a, double b) {
  const double sum = a + b;
  return {sum, b - (sum - a)};
}

// p and k with exp(x) = (p.high + p.low) * 2^k to about 2^-60, for |x| < 2^15.
RT_HD RT_INLINE DoubleDouble ExpParts(double x, int64_t* k) {
  const double shift = 6755399441055744.0;  // 1.5 * 2^52
  const double shifted = Fma(x, kLog2E64, shift);
  const double n = shifted - shift;
  *k = Bits(shifted) - Bits(shift);
  const double high = Fma(n, -kLn2Hi64, x);  // exact
  const double correction = n * -kLn2Lo64;
  const DoubleDouble r = FastTwoSum(high, correction);
  const double tail = Fma(r.high * r.high, Horner(r.high, RT_EXP64), r.low);
  const DoubleDouble p = FastTwoSum(1.0, r.high);
  return FastTwoSum(p.high, p.low + tail);
}

RT_HD RT_INLINE double PowerOfTwo(int64_t k) { return FromBits((k + 1023) * (int64_t{1} << 52)); }

// Computes: e^x. Largest error seen: 0.65 ulp, 0.77 where the result is subnormal.
//   exp(+-0) = 1, exp(-Inf) = +0, exp(+Inf) = +Inf, NaN -> NaN; +Inf above 0x1.62e42fefa39efp9
//   (709.78), +0 below -0x1.74910d52d3051p9 (-745.13), gradual underflow from -708.40 down to
//   there.
RT_HD RT_INLINE double Exp(double x) {
  if (x != x) return FromBits(kCanonicalNanBits64);
  const double clamped = x > 710.0 ? 710.0 : (x < -746.0 ? -746.0 : x);
  int64_t k;
  const DoubleDouble p = ExpParts(clamped, &k);
  const int64_t half = k >> 1;
  return p.high * PowerOfTwo(half) * PowerOfTwo(k - half);
}

// Computes: Exp(x) for x >= -512, +0 below; NaN -> NaN.
RT_HD RT_INLINE double ExpCut(double x) { return x < -512.0 ? 0.0 : Exp(x); }

// Computes: ln x. Largest error seen: 0.65 ulp.
//   log(+-0) = -Inf, log(x < 0) = NaN, log(+Inf) = +Inf, log(1) = +0, NaN -> NaN.
RT_HD RT_INLINE double Log(double x) {
  if (!(x >= 0.0)) return FromBits(kCanonicalNanBits64);
  if (x == 0.0) return -__builtin_inf();
  if (x == __builtin_inf()) return x;
  const bool tiny = x < 0x1p-1022;
  const int64_t bits = Bits(tiny ? x * 0x1p54 : x);
  const int64_t k = (bits - kSqrtHalfBits64) >> 52;
  const double m = FromBits(bits - k * (int64_t{1} << 52));
  const double exponent = static_cast<double>(tiny ? k - 54 : k);
  const double f = m - 1.0;
  const double s = f / (2.0 + f);
  const double s2 = s * s;
  // log(1+f) = f - f^2/2 + s (f^2/2 + s^2 p(s^2)); the square is kept to twice the precision.
  const double square = 0.5 * f * f;
  const double square_low = Fma(0.5 * f, f, -square);
  const double tail = Fma(s, Fma(s2, Horner(s2, RT_LOG64), square), -square_low);
  const DoubleDouble first = FastTwoSum(exponent * kLn2Hi64, f);
  const DoubleDouble second = FastTwoSum(first.high, -square);
  return second.high + (second.low + (first.low + Fma(exponent, kLn2Lo64, tail)));
}

// Computes: tanh x. Largest error seen: 0.62 ulp. Odd, bit for bit.
//   tanh(+-0) = +-0, tanh(+-Inf) = +-1, NaN -> NaN; subnormals are returned as they are.
RT_HD RT_INLINE double Tanh(double x) {
  if (x != x) return FromBits(kCanonicalNanBits64);
  const double a = Abs(x);
  double magnitude;
  if (a < 0.25) {
    const double a2 = a * a;
    magnitude = Fma(a2 * a, Horner(a2, RT_TANH64), a);
  } else {
    // 1 - 2 / (e^(2a) + 1), with denominator and quotient kept to twice the precision.
    int64_t k;
    const double clamped = a > 22.0 ? 22.0 : a;
    const DoubleDouble p = ExpParts(clamped + clamped, &k);
    const double scale = PowerOfTwo(k);
    const DoubleDouble sum = FastTwoSum(p.high * scale, 1.0);
    const double low = Fma(p.low, scale, sum.low);
    const double quotient = 2.0 / sum.high;
    const double rest = Fma(-quotient, low, Fma(-quotient, sum.high, 2.0)) / sum.high;
    const DoubleDouble difference = FastTwoSum(1.0, -quotient);
    magnitude = difference.high + (difference.low - rest);
  }
  return FromBits(Bits(magnitude) | (Bits(x) & ~int64_t{0x7fffffffffffffff}));
}

// x - n * pi/2 to about 2^-100 with |result| <= pi/4 (1 + 2^-20), and n mod 4.
struct QuarterTurns {
  DoubleDouble angle;
  int quadrant;
};

// For |x| <= 2^30. The first difference is exact: n * pi/2 (53 bits) is a multiple of 2^-52, and so
// is x or, where x < 1, the two are within a factor of two (Sterbenz).
RT_HD RT_INLINE QuarterTurns ReduceNear(double x) {
  const double shift = 6755399441055744.0;
  const double shifted = Fma(x, kTwoOverPi64, shift);
  const double n = shifted - shift;
  const double first = Fma(n, -kHalfPi1, x);
  const double product = n * kHalfPi2;
  const double product_low = Fma(n, kHalfPi2, -product);
  const double second = first - product;
  const double back = second - first;
  const double second_low = (first - (second - back)) + (-product - back);  // Knuth's two-sum
  const double low = second_low - Fma(n, kHalfPi3, product_low);
  return {FastTwoSum(second, low), static_cast<int>(Bits(shifted) & 3)};
}

// For 2^30 < |x| < Inf: x = mantissa * 2^exponent times 192 bits of 2/pi in integers, those above
// the window being multiples of 4 (Payne and Hanek, 1983). The result carries about 128 bits.
RT_HD static inline QuarterTurns ReduceFar(double x) {
  const uint64_t two_over_pi[20] = {RT_TWO_OVER_PI_WORDS};
  const uint64_t bits = static_cast<uint64_t>(Bits(Abs(x)));
  const uint64_t mantissa = (bits & 0xfffffffffffffu) | 0x10000000000000u;
  const int exponent = static_cast<int>(bits >> 52) - 1075;
  const int position = exponent + 62;  // of the bit of weight 2 / mantissa, 64 zeros counted
  const int word = position >> 6, shift = position & 63;
  uint64_t window[3];
  for (int i = 0; i < 3; ++i) {
    const uint64_t next = shift == 0 ? 0 : two_over_pi[word + i + 1] >> (64 - shift);
    window[i] = (two_over_pi[word + i] << shift) | next;
  }
  unsigned __int128 sum = static_cast<unsigned __int128>(mantissa) * window[2];
  uint64_t w2 = static_cast<uint64_t>(sum);
  sum = static_cast<unsigned __int128>(mantissa) * window[1] + static_cast<uint64_t>(sum >> 64);
  uint64_t w1 = static_cast<uint64_t>(sum);
  uint64_t w0 = mantissa * window[0] + static_cast<uint64_t>(sum >> 64);
  // (w0, w1, w2) / 2^190 is the number of quarter turns mod 4; take the nearest integer away.
  int quadrant = static_cast<int>(w0 >> 62);
  w0 = (w0 << 2) | (w1 >> 62), w1 = (w1 << 2) | (w2 >> 62), w2 <<= 2;
  bool negative = (w0 >> 63) != 0;
  if (negative) quadrant += 1, w0 = ~w0, w1 = ~w1, w2 = ~w2;
  int zeros = 0;
  for (; (w0 >> 63) == 0 && zeros < 128; ++zeros) {
    w0 = (w0 << 1) | (w1 >> 63), w1 = (w1 << 1) | (w2 >> 63), w2 <<= 1;
  }
  double high =
      static_cast<double>(static_cast<int64_t>(w0 >> 11)) * PowerOfTwo(int64_t{-53} - zeros);
  const uint64_t after = ((w0 & 0x7ff) << 52) | (w1 >> 12);
  double low = static_cast<double>(static_cast<int64_t>(after)) * PowerOfTwo(int64_t{-116} - zeros);
  if (negative) high = -high, low = -low;
  const double r = high * kHalfPi1;
  const double r_low = Fma(high, kHalfPi1, -r) + Fma(high, kHalfPi2, low * kHalfPi1);
  QuarterTurns result = {FastTwoSum(r, r_low), quadrant & 3};
  if (x < 0.0) {
    result.angle = {-result.angle.high, -result.angle.low};
    result.quadrant = (4 - result.quadrant) & 3;
  }
  return result;
}

// sin and cos of a reduced angle.
RT_HD RT_INLINE double SinOfAngle(DoubleDouble t) {
  const double t2 = t.high * t.high;
  const double tail = t2 * t.high * Horner(t2, RT_SIN64);
  return t.high + Fma(t.low, Fma(t2, -0.5, 1.0), tail);
}
RT_HD RT_INLINE double CosOfAngle(DoubleDouble t) {
  const double half = 0.5 * t.high * t.high;
  const double half_low = Fma(0.5 * t.high, t.high, -half);
  const double t2 = half + half;
  const DoubleDouble first = FastTwoSum(1.0, -half);
  const double tail = Fma(t2 * t2, Horner(t2, RT_COS64), -Fma(t.high, t.low, half_low));
  return first.high + (first.low + tail);
}

// sin of x (kQuarter = 0) or of x + pi/2 (kQuarter = 1).
template <int kQuarter>
RT_HD RT_INLINE double SinPlusQuarters(double x) {
  const double a = Abs(x);
  if (!(a < __builtin_inf())) return FromBits(kCanonicalNanBits64);
  const QuarterTurns turns = a <= 0x1p30 ? ReduceNear(x) : ReduceFar(x);
  const int quadrant = turns.quadrant + kQuarter;
  const double value = (quadrant & 1) ? CosOfAngle(turns.angle) : SinOfAngle(turns.angle);
  return (quadrant & 2) ? -value : value;
}

// Computes: sin x of every finite x. Largest error seen: 0.79 ulp.
//   sin(+-0) = +-0, sin(+-Inf) = NaN, NaN -> NaN.
RT_HD RT_INLINE double Sin(double x) {
  if (Abs(x) < 0x1p-27) return x;  // also keeps the sign of zero
  return SinPlusQuarters<0>(x);
}

// Computes: cos x of every finite x. Largest error seen: 0.79 ulp.
//   cos(+-0) = 1, cos(+-Inf) = NaN, NaN -> NaN.
RT_HD RT_INLINE double Cos(double x) { return SinPlusQuarters<1>(x); }

// Computes: Exp(exponent * Log(base)), for base > 0. Its error grows with the logarithm of the
//   result: at most 0.7 + 2.3 |exponent * ln base| ulp. The formula also holds at the ends: base 0
//   gives +0 or +Inf by the exponent's sign; 0^0, 1^Inf and base < 0 give NaN.
RT_HD RT_INLINE double Pow(double base, double exponent) { return Exp(exponent * Log(base)); }

// Computes: base^exponent by squaring. From the exponent's lowest bit up: if it is set, result *=
//   square; then square *= square. Starts at 1; a negative exponent takes 1 / the power of its
//   magnitude. base^0 = 1 for every base, NaN too. Relative error at most (exponent - 1) * 2^-53
//   where nothing under- or overflows.
RT_HD RT_INLINE double PowInt(double base, int64_t exponent) {
  uint64_t left = static_cast<uint64_t>(exponent);
  if (exponent < 0) left = 0 - left;
  double result = 1.0, square = base;
  while (left != 0) {
    if (left & 1) result = result * square;
    square = square * square;
    left >>= 1;
  }
  return CanonicalNan(exponent < 0 ? 1.0 / result : result);
}

}  // namespace retrace::math

#endif  // RETRACE_CORE_SCALAR_MATH_H_
