// Every op's backward pass against finite differences of its forward pass, in FP64. The loss is a
// fixed random combination of the outputs, so dy are its weights. (Attention's block ops: see
// attention_test.cc.)
#include <gtest/gtest.h>

#include <numeric>

#include "kernels/ops.h"
#include "tests/finite_difference.h"
#include "tests/longhand.h"

namespace retrace {
namespace {

using Vector = std::vector<double>;

constexpr Rounding kExact = Rounding::kNone;

const OpTable<double>& ops() { return Ops<double>(Isa::kScalar); }

Vector Normal(int64_t n, std::mt19937& random) {
  std::normal_distribution<double> normal;
  Vector values(n);
  for (double& x : values) x = normal(random);
  return values;
}

double Combine(const Vector& weights, const Vector& y) {
  return std::inner_product(weights.begin(), weights.end(), y.begin(), 0.0);
}
double Magnitude(const Vector& weights, const Vector& y) {
  double sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) sum += std::fabs(weights[i] * y[i]);
  return sum;
}

// Compares `gradient` with differences of the loss weights * forward() over all of *x.
void ExpectGradient(Vector* x, const Vector& gradient, const Vector& weights,
                    const std::function<Vector()>& forward) {
  const double magnitude = Magnitude(weights, forward());
  ASSERT_EQ(x->size(), gradient.size());
  for (size_t i = 0; i < x->size(); ++i) {
    SCOPED_TRACE("element " + std::to_string(i));
    ExpectDerivative(&(*x)[i], gradient[i], magnitude, [&] { return Combine(weights, forward()); });
  }
}

void ExpectRmsNormGradients(bool weighted) {
  std::mt19937 random(1);
  const int64_t R = 3, N = 21;
  Vector x = Normal(R * N, random), w = Normal(N, random);
  const Vector dy = Normal(R * N, random);
  Vector r(R), dx(R * N), dw(N);
  const double* w_N = weighted ? w.data() : nullptr;
  const auto forward = [&] {
    Vector y(R * N);
    ops().rms_norm({x.data(), w_N, y.data(), r.data(), N, 1e-6, kExact}, 0, R);
    return y;
  };
  forward();
  ops().rms_norm_backward({x.data(), w_N, r.data(), dy.data(), dx.data(), N, kExact}, 0, R);
  ops().rms_norm_weight({x.data(), r.data(), dy.data(), dw.data(), R, N}, 0, N);
  ExpectGradient(&x, dx, dy, forward);
  if (weighted) ExpectGradient(&w, dw, dy, forward);
}

TEST(OpsGradient, OfRmsNorm) { ExpectRmsNormGradients(true); }

TEST(OpsGradient, OfRmsNormWithoutWeights) { ExpectRmsNormGradients(false); }

TEST(OpsGradient, OfRope) {
  std::mt19937 random(2);
  const int64_t S = 3, heads = 2, dim = 10, T = 2 * S;
  Vector x = Normal(T * heads * dim, random), cos(S * dim / 2), sin(S * dim / 2);
  for (size_t i = 0; i < cos.size(); ++i) {
    cos[i] = math::Cos(0.7 * static_cast<double>(i));
    sin[i] = math::Sin(0.7 * static_cast<double>(i));
  }
  const Vector dy = Normal(T * heads * dim, random);
  const auto rope = [&](const Vector& in, bool backward) {
    Vector out(in.size());
    ops().rope({in.data(), out.data(), cos.data(), sin.data(), S, heads, dim, backward, kExact}, 0,
               T);
    return out;
  };
  ExpectGradient(&x, rope(dy, true), dy, [&] { return rope(x, false); });
}

// With a scale other than 1, and for every window; the gradient of a masked score is 0.
TEST(OpsGradient, OfSoftmax) {
  std::mt19937 random(3);
  const int64_t S = 19;
  for (int64_t window : {0, 1, 4, 30}) {
    for (double scale : {1.0, 0.37}) {
      SCOPED_TRACE("window " + std::to_string(window) + ", scale " + std::to_string(scale));
      Vector s = Normal(S * S, random);
      const Vector dp = Normal(S * S, random);
      const auto forward = [&] {
        Vector p = s;
        ops().softmax({p.data(), nullptr, S, window, scale, kExact, kExact}, 0, S);
        return p;
      };
      const Vector p = forward();
      Vector ds = dp;
      ops().softmax_backward({p.data(), ds.data(), S, window, scale, kExact}, 0, S);
      ExpectGradient(&s, ds, dp, forward);
    }
  }
}

TEST(OpsGradient, OfGeglu) {
  std::mt19937 random(4);
  const int64_t n = 60;
  Vector gate = Normal(n, random), up = Normal(n, random);
  for (double& g : gate) g *= 2;
  const Vector da = Normal(n, random);
  const auto forward = [&] {
    Vector act(n);
    ops().geglu({gate.data(), up.data(), act.data(), kExact, kExact}, 0, n);
    return act;
  };
  Vector dgate(n), dup(n);
  ops().geglu_backward(
      {gate.data(), up.data(), da.data(), dgate.data(), dup.data(), kExact, kExact, kExact}, 0, n);
  ExpectGradient(&gate, dgate, da, forward);
  ExpectGradient(&up, dup, da, forward);
}

TEST(OpsGradient, OfSoftcap) {
  std::mt19937 random(5);
  const int64_t n = 60;
  const double cap = 3;
  Vector z = Normal(n, random), tanh(n);
  for (double& x : z) x *= 3;
  const Vector dy = Normal(n, random);
  const auto forward = [&] {
    Vector y = z;
    ops().softcap({y.data(), tanh.data(), cap, kExact}, 0, n);
    return y;
  };
  forward();
  Vector dz = dy;
  ops().softcap_backward({dz.data(), tanh.data(), cap, kExact}, 0, n);
  ExpectGradient(&z, dz, dy, forward);
}

// Two shards of the vocabulary, as the transformer uses the three ops.
TEST(OpsGradient, OfCrossEntropyOverTwoShards) {
  std::mt19937 random(6);
  const int64_t T = 4, V = 11;  // vocabulary rows of a shard
  const double inv_n = 1.0 / 3;
  Vector z[2] = {Normal(T * V, random), Normal(T * V, random)};
  const std::vector<int32_t> labels = {0, 10, 11, 21};
  Vector m(T), sum(T);
  const auto forward = [&] {
    Vector nll(T), shard_m[2] = {Vector(T), Vector(T)};
    for (int i : {0, 1}) ops().row_max({z[i].data(), shard_m[i].data(), V}, 0, T);
    for (int64_t t = 0; t < T; ++t) m[t] = std::max(shard_m[0][t], shard_m[1][t]);
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int i : {0, 1}) {
      Vector part(T), label(T);
      ops().sum_exp({z[i].data(), m.data(), labels.data(), part.data(), label.data(), i * V, V}, 0,
                    T);
      for (int64_t t = 0; t < T; ++t) sum[t] += part[t], nll[t] -= label[t];
    }
    for (int64_t t = 0; t < T; ++t) nll[t] += math::Log(sum[t]) + m[t];
    return nll;
  };
  const Vector nll = forward();
  const Vector m_saved = m, sum_saved = sum;
  for (int i : {0, 1}) {
    Vector dz = z[i];
    ops().cross_entropy_backward(
        {dz.data(), m_saved.data(), sum_saved.data(), labels.data(), i * V, V, inv_n, kExact}, 0,
        T);
    ExpectGradient(&z[i], dz, Vector(T, inv_n), forward);
  }
}

TEST(OpsGradient, OfEmbedding) {
  std::mt19937 random(7);
  const int64_t rows = 4, row_first = 2, N = 5;
  const std::vector<int32_t> ids = {2, 5, 2, 1, 6, 3, 2, 5};  // twice and thrice, never, not here
  const int64_t T = static_cast<int64_t>(ids.size());
  Vector table = Normal(rows * N, random);
  const Vector dx = Normal(T * N, random);
  const double scale = 1.7;
  Vector dtable(rows * N, 0.0);
  ops().embed_backward(
      {dx.data(), ids.data(), dtable.data(), T, row_first, rows, N, -1, scale, kExact}, 0, N);
  ExpectGradient(&table, dtable, dx, [&] {
    Vector x(T * N);
    ops().embed({table.data(), ids.data(), x.data(), row_first, rows, N, scale, kExact}, 0, T);
    return x;
  });
}

// The comparison can fail: a gradient that is off by one part in 10^4 is refused.
TEST(OpsGradient, AWrongGradientIsSeen) {
  double x = 0.8;
  const auto loss = [&] { return math::Tanh(x); };
  const double th = math::Tanh(x), right = 1 - th * th;
  ExpectDerivative(&x, right, 1, loss);
  const Derivative d = Differentiate([&](double delta) { return math::Tanh(0.8 + delta); }, 1);
  EXPECT_GT(std::fabs(d.value - right * 1.0001), d.error);
}

}  // namespace
}  // namespace retrace
