// Calls of every op of the table on generated arguments, each with its definition written out from
// the words of kernels/ops.h. Used by ops_test.cc (instruction sets) and cuda_ops_test.cc (kernels).
#ifndef RETRACE_TESTS_OP_CASES_H_
#define RETRACE_TESTS_OP_CASES_H_

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "tests/longhand.h"

namespace retrace::op_cases {

using longhand::Dot;
using longhand::Round;
using longhand::Sees;
using longhand::Values;

struct Shape {
  int64_t rows, n, window;
  double scale;
  Rounding round1, round2, round3;
  bool special;
  uint32_t seed;
};

template <class T>
using Arrays = std::vector<std::vector<T>>;

// One op on one set of arguments. `out` is what the op writes (or changes in place).
template <class T>
struct OpCase {
  std::string op;
  int64_t first, last;  // the range
  Arrays<T> out;
  std::function<void(const OpTable<T>&, Arrays<T>&, int64_t, int64_t)> run;
  std::function<void(Arrays<T>&)> define;
};

// Elements of fence around each array: an op that writes there, or lets them into a result, fails.
constexpr int64_t kFence = 19;

template <class T>
Arrays<T> Outputs(const OpCase<T>& c, const OpTable<T>& ops, const std::vector<int64_t>& cuts) {
  Arrays<T> out = c.out;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) c.run(ops, out, cuts[i], cuts[i + 1]);
  return out;
}

template <class T>
Arrays<T> Define(const OpCase<T>& c) {
  Arrays<T> out = c.out;
  c.define(out);
  return out;
}

template <class T>
void ExpectSame(const OpCase<T>& c, const Arrays<T>& expected, const Arrays<T>& got) {
  for (size_t array = 0; array < expected.size(); ++array) {
    const int64_t at = longhand::FirstDifference(expected[array], got[array]);
    ASSERT_EQ(-1, at) << c.op << ", output " << array << ": expected "
                      << static_cast<double>(expected[array][at]) << ", got "
                      << static_cast<double>(got[array][at]);
  }
}

// Arrays of one case, fenced by NaN. `In` are read only and live as long as the case.
template <class T>
class CaseMaker {
 public:
  CaseMaker(const Shape& shape) : s(shape), random_(shape.seed) {}

  std::shared_ptr<std::vector<T>> In(int64_t n) {
    return std::make_shared<std::vector<T>>(Fenced(Values<T>(n, random_, s.special)));
  }
  std::vector<T> Out(int64_t n) { return Fenced(Values<T>(n, random_, s.special)); }
  std::vector<int32_t> Ids(int64_t n, int32_t end) {
    std::vector<int32_t> ids(n);
    for (int32_t& id : ids) id = static_cast<int32_t>(random_() % end);
    return ids;
  }
  int64_t Pick(int64_t end) { return static_cast<int64_t>(random_() % end); }

  const Shape s;

 private:
  std::vector<T> Fenced(std::vector<T> values) {
    const std::vector<T> fence(kFence, std::numeric_limits<T>::quiet_NaN());
    values.insert(values.begin(), fence.begin(), fence.end());
    values.insert(values.end(), fence.begin(), fence.end());
    return values;
  }
  std::mt19937 random_;
};

template <class T>
T* At(std::vector<T>& fenced) {
  return fenced.data() + kFence;
}
template <class T>
const T* At(const std::shared_ptr<std::vector<T>>& fenced) {
  return fenced->data() + kFence;
}
template <class T>
std::vector<T> Slice(const T* p, int64_t n) {
  return std::vector<T>(p, p + n);
}

// ---- Embedding ---------------------------------------------------------------------------------

template <class T>
OpCase<T> EmbedCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t row_first = 3, rows = 5, T_ = s.rows, N = s.n;
  const auto table = make.In(rows * N);
  const auto ids = make.Ids(T_, 10);
  const T scale = static_cast<T>(s.scale);
  return {"embed",
          0,
          T_,
          {make.Out(T_ * N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.embed({At(table), ids.data(), At(out[0]), row_first, rows, N, scale, s.round1},
                      first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < T_ * N; ++i) {
              const int64_t row = ids[i / N] - row_first;
              const bool here = row >= 0 && row < rows;
              At(out[0])[i] = here ? Round(At(table)[row * N + i % N] * scale, s.round1) : T(0);
            }
          }};
}

template <class T>
OpCase<T> EmbedBackwardCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t row_first = 3, rows = 5, T_ = 12, N = s.n;
  const auto dx = make.In(T_ * N);
  const auto ids = make.Ids(T_, 10);
  const int32_t dropped = make.Pick(2) ? 5 : -1;
  const T scale = static_cast<T>(s.scale);
  return {"embed_backward",
          0,
          N,
          {make.Out(rows * N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.embed_backward(
                {At(dx), ids.data(), At(out[0]), T_, row_first, rows, N, dropped, scale, s.round1},
                first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t t = 0; t < T_; ++t) {
              if (ids[t] < row_first || ids[t] >= row_first + rows || ids[t] == dropped) continue;
              for (int64_t j = 0; j < N; ++j) {
                T& g = At(out[0])[(ids[t] - row_first) * N + j];
                g = g + Round(At(dx)[t * N + j] * scale, s.round1);
              }
            }
          }};
}

// ---- RMSNorm -----------------------------------------------------------------------------------

template <class T>
OpCase<T> RmsNormCase(CaseMaker<T> make, bool weighted) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n;
  const auto x = make.In(R * N), w = make.In(N);
  const T eps = static_cast<T>(1e-6);
  return {weighted ? "rms_norm" : "rms_norm without w",
          0,
          R,
          {make.Out(R * N), make.Out(R)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.rms_norm(
                {At(x), weighted ? At(w) : nullptr, At(out[0]), At(out[1]), N, eps, s.round1},
                first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R; ++i) {
              const std::vector<T> row = Slice(At(x) + i * N, N);
              const T r = T(1) / std::sqrt(Dot(row, row) / static_cast<T>(N) + eps);
              At(out[1])[i] = r;
              for (int64_t j = 0; j < N; ++j) {
                T y = row[j] * r;
                if (weighted) y = y * At(w)[j];
                At(out[0])[i * N + j] = Round(y, s.round1);
              }
            }
          }};
}

template <class T>
OpCase<T> RmsNormBackwardCase(CaseMaker<T> make, bool weighted) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n;
  const auto x = make.In(R * N), w = make.In(N), r = make.In(R), dy = make.In(R * N);
  return {weighted ? "rms_norm_backward" : "rms_norm_backward without w",
          0,
          R,
          {make.Out(R * N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.rms_norm_backward(
                {At(x), weighted ? At(w) : nullptr, At(r), At(dy), At(out[0]), N, s.round1}, first,
                last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R; ++i) {
              const T ri = At(r)[i];
              std::vector<T> g = Slice(At(dy) + i * N, N), xr = Slice(At(x) + i * N, N);
              for (int64_t j = 0; j < N; ++j) {
                if (weighted) g[j] = g[j] * At(w)[j];
                xr[j] = xr[j] * ri;
              }
              const T c = Dot(g, xr) / static_cast<T>(N);
              for (int64_t j = 0; j < N; ++j) {
                At(out[0])[i * N + j] = Round(ri * (g[j] - xr[j] * c), s.round1);
              }
            }
          }};
}

template <class T>
OpCase<T> RmsNormWeightCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t N = s.n, R = N < 40 ? 515 : s.rows;
  const auto x = make.In(R * N), r = make.In(R), dy = make.In(R * N);
  return {"rms_norm_weight",
          0,
          N,
          {make.Out(N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.rms_norm_weight({At(x), At(r), At(dy), At(out[0]), R, N}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t j = 0; j < N; ++j) {
              std::vector<T> d(R), xr(R);
              for (int64_t i = 0; i < R; ++i) {
                d[i] = At(dy)[i * N + j];
                xr[i] = At(x)[i * N + j] * At(r)[i];
              }
              At(out[0])[j] = longhand::Chain(d, xr);
            }
          }};
}

// ---- RoPE --------------------------------------------------------------------------------------

template <class T>
OpCase<T> RopeCase(CaseMaker<T> make, bool backward, bool in_place) {
  const Shape s = make.s;
  const int64_t half = s.n, heads = 2, length = 3, T_ = s.rows, C = heads * 2 * half;
  const auto x = make.In(T_ * C), cos = make.In(length * half), sin = make.In(length * half);
  return {backward ? "rope backward" : "rope",
          0,
          T_,
          {in_place ? *x : make.Out(T_ * C)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.rope({in_place ? At(out[0]) : At(x), At(out[0]), At(cos), At(sin), length, heads,
                      2 * half, backward, s.round1},
                     first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t pair = 0; pair < T_ * heads * half; ++pair) {
              const int64_t t = pair / (heads * half), i = pair % half;
              const int64_t at = pair / half * 2 * half + i;
              const T c = At(cos)[t % length * half + i];
              const T sine = At(sin)[t % length * half + i] * (backward ? T(-1) : T(1));
              const T x1 = At(x)[at], x2 = At(x)[at + half];
              const auto round = [&](T value) { return Round(value, s.round1); };
              At(out[0])[at] = round(round(x1 * c) - round(x2 * sine));
              At(out[0])[at + half] = round(round(x2 * c) + round(x1 * sine));
            }
          }};
}

// ---- Softmax -----------------------------------------------------------------------------------

template <class T>
T ScaledScore(T s, T scale, Rounding rounding) {
  return scale == T(1) ? s : Round(s * scale, rounding);
}

// Keys in [key_first, key_first + keys) that the query sees, relative to key_first.
std::vector<int64_t> SeenKeys(int64_t query, int64_t window, int64_t key_first, int64_t keys) {
  std::vector<int64_t> seen;
  for (int64_t k = 0; k < keys; ++k) {
    if (Sees(query, key_first + k, window)) seen.push_back(k);
  }
  return seen;
}

template <class T>
OpCase<T> SoftmaxCase(CaseMaker<T> make, bool rounded) {
  const Shape s = make.s;
  const int64_t S = s.n, R = S + 2, from = std::max<int64_t>(0, S - 5);
  const T scale = static_cast<T>(s.scale);
  return {"softmax",
          from,
          R,
          {make.Out(R * S), make.Out(R * S)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.softmax({At(out[0]), rounded ? At(out[1]) : nullptr, S, s.window, scale, s.round1,
                         s.round2},
                        first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = from; i < R; ++i) {
              T* row = At(out[0]) + i * S;
              const std::vector<int64_t> seen = SeenKeys(i % S, s.window, 0, S);
              std::vector<T> scores, exps;
              for (int64_t k : seen) scores.push_back(ScaledScore(row[k], scale, s.round1));
              const T m = longhand::Max(scores);
              for (T score : scores) exps.push_back(math::ExpCut(score - m));
              const T inverse = T(1) / longhand::Sum(exps, seen[0]);
              std::fill(row, row + S, T(0));
              for (size_t j = 0; j < seen.size(); ++j) row[seen[j]] = exps[j] * inverse;
              for (int64_t k = 0; rounded && k < S; ++k) {
                At(out[1])[i * S + k] = Round(row[k], s.round2);
              }
            }
          }};
}

template <class T>
OpCase<T> SoftmaxBackwardCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t S = s.n, R = S + 2, from = std::max<int64_t>(0, S - 5);
  const auto p = make.In(R * S);
  const T scale = static_cast<T>(s.scale);
  return {"softmax_backward",
          from,
          R,
          {make.Out(R * S)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.softmax_backward({At(p), At(out[0]), S, s.window, scale, s.round1}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = from; i < R; ++i) {
              T* row = At(out[0]) + i * S;
              const std::vector<int64_t> seen = SeenKeys(i % S, s.window, 0, S);
              std::vector<T> probabilities, gradients;
              for (int64_t k : seen) probabilities.push_back(At(p)[i * S + k]);
              for (int64_t k : seen) gradients.push_back(row[k]);
              const T c = Dot(probabilities, gradients, seen[0]);
              std::fill(row, row + S, T(0));
              for (size_t j = 0; j < seen.size(); ++j) {
                const T ds = Round(probabilities[j] * (gradients[j] - c), s.round1);
                row[seen[j]] = ScaledScore(ds, scale, s.round1);
              }
            }
          }};
}

// Query and key blocks in every relation: before, across and behind the diagonal and the window.
struct Blocks {
  int64_t query_first, key_first;
};
template <class T>
Blocks PickBlocks(CaseMaker<T>& make) {
  const Blocks relations[] = {{0, 0}, {64, 64}, {66, 64}, {0, 64}, {130, 64}, {61, 64}, {200, 0}};
  return relations[make.Pick(7)];
}

template <class T>
OpCase<T> OnlineSoftmaxCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, keys = s.n, stride = keys + 3;
  const Blocks at = PickBlocks(make);
  const T scale = static_cast<T>(s.scale);
  Arrays<T> out = {make.Out(R * stride), make.Out(R), make.Out(R), make.Out(R), make.Out(R)};
  return {"online_softmax",
          0,
          R,
          out,
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            std::vector<uint8_t> touched(R, 9);
            ops.online_softmax(
                {At(out[0]), At(out[1]), At(out[2]), At(out[3]), touched.data(), stride,
                 at.query_first, at.key_first, keys, s.window, scale, s.round1, s.round2},
                first, last);
            for (int64_t i = first; i < last; ++i) At(out[4])[i] = touched[i];
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R; ++i) {
              T* row = At(out[0]) + i * stride;
              T &m = At(out[1])[i], &l = At(out[2])[i], &a = At(out[3])[i], &mark = At(out[4])[i];
              const int64_t query = at.query_first + i;
              std::vector<T> scores, exps(keys, T(0));
              const std::vector<int64_t> seen = SeenKeys(query, s.window, at.key_first, keys);
              for (int64_t k : seen) scores.push_back(ScaledScore(row[k], scale, s.round1));
              std::fill(row, row + keys, T(0));
              if (seen.empty()) {
                a = 1, mark = 0;
                continue;
              }
              const bool opens = !Sees(query, at.key_first - 1, s.window);
              if (!opens) scores.push_back(m);
              const T new_m = longhand::Max(scores);
              for (size_t j = 0; j < seen.size(); ++j)
                exps[seen[j]] = math::ExpCut(scores[j] - new_m);
              for (int64_t k : seen) row[k] = Round(exps[k], s.round2);
              a = opens ? T(1) : math::ExpCut(m - new_m);
              l = opens ? longhand::Sum(exps) : l * a + longhand::Sum(exps);
              m = new_m;
              mark = opens ? 1 : 2;
            }
          }};
}

template <class T>
OpCase<T> BlockBackwardCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, keys = s.n, stride = keys + 3;
  const Blocks at = PickBlocks(make);
  const auto m = make.In(R), l = make.In(R), c = make.In(R);
  const T scale = static_cast<T>(s.scale);
  return {"block_backward",
          0,
          R,
          {make.Out(R * stride), make.Out(R * stride)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.block_backward({At(out[0]), At(out[1]), At(m), At(l), At(c), stride, at.query_first,
                                at.key_first, keys, s.window, scale, s.round1, s.round2, s.round3},
                               first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t at_key = 0; at_key < R * keys; ++at_key) {
              const int64_t i = at_key / keys, k = at_key % keys;
              T &score = At(out[0])[i * stride + k], &dp = At(out[1])[i * stride + k];
              if (!Sees(at.query_first + i, at.key_first + k, s.window)) {
                score = dp = 0;
                continue;
              }
              const T p =
                  math::ExpCut(ScaledScore(score, scale, s.round1) - At(m)[i]) * (T(1) / At(l)[i]);
              dp = ScaledScore(Round(p * (dp - At(c)[i]), s.round3), scale, s.round3);
              score = Round(p, s.round2);
            }
          }};
}

// ---- Rows of attention's output ----------------------------------------------------------------

template <class T>
OpCase<T> RowDotCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n;
  const auto x = make.In(R * (N + 2)), y = make.In(R * (N + 5));
  return {"row_dot",
          0,
          R,
          {make.Out(R)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.row_dot({At(x), At(y), At(out[0]), N, N + 2, N + 5}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R; ++i) {
              At(out[0])[i] = Dot(Slice(At(x) + i * (N + 2), N), Slice(At(y) + i * (N + 5), N));
            }
          }};
}

template <class T>
OpCase<T> RescaleAddCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n, stride = N + 4;
  const auto t = make.In(R * N), a = make.In(R);
  std::vector<uint8_t> touched(R);
  for (uint8_t& mark : touched) mark = static_cast<uint8_t>(make.Pick(3));
  return {"rescale_add",
          0,
          R,
          {make.Out(R * stride)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.rescale_add({At(out[0]), At(t), At(a), touched.data(), N, stride}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R * N; ++i) {
              T& o = At(out[0])[i / N * stride + i % N];
              if (touched[i / N] == 1) o = At(t)[i];
              if (touched[i / N] == 2) o = o * At(a)[i / N] + At(t)[i];
            }
          }};
}

template <class T>
OpCase<T> RowDivideCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n, stride = N + 4;
  const auto l = make.In(R);
  return {"row_divide",
          0,
          R,
          {make.Out(R * stride)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.row_divide({At(out[0]), At(l), N, stride, s.round1}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R * N; ++i) {
              T& o = At(out[0])[i / N * stride + i % N];
              o = Round(o / At(l)[i / N], s.round1);
            }
          }};
}

// ---- Flat arrays -------------------------------------------------------------------------------

template <class T>
struct GeluParts {
  T gelu, slope;
};
template <class T>
GeluParts<T> Gelu(T t, Rounding rounding) {
  const T k = static_cast<T>(std::sqrt(2.0L / 3.14159265358979323846264338327950288L));
  const T c = static_cast<T>(0.044715L), c3 = static_cast<T>(3 * 0.044715L);
  const T th = math::Tanh(k * std::fma(c * t, t * t, t));
  const T left = T(0.5) * (T(1) + th);
  const T right = (T(0.5) * t) * (std::fma(-th, th, T(1)) * (k * std::fma(c3 * t, t, T(1))));
  return {Round((T(0.5) * t) * (T(1) + th), rounding), left + right};
}

template <class T>
OpCase<T> GegluCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const auto gate = make.In(N), up = make.In(N);
  return {"geglu",
          0,
          N,
          {make.Out(N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.geglu({At(gate), At(up), At(out[0]), s.round1, s.round2}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < N; ++i) {
              const T gelu = Gelu(At(gate)[i], s.round1).gelu;
              At(out[0])[i] = Round(gelu * At(up)[i], s.round2);
            }
          }};
}

template <class T>
OpCase<T> GegluBackwardCase(CaseMaker<T> make, bool in_place) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const auto gate = make.In(N), up = make.In(N), da = make.In(N);
  Arrays<T> out = {make.Out(N), make.Out(N)};
  if (in_place) out = {*gate, *up};
  return {"geglu_backward",
          0,
          N,
          out,
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.geglu_backward({in_place ? At(out[0]) : At(gate), in_place ? At(out[1]) : At(up),
                                At(da), At(out[0]), At(out[1]), s.round1, s.round2, s.round3},
                               first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < N; ++i) {
              const GeluParts<T> gelu = Gelu(At(gate)[i], s.round1);
              const T dgelu = Round(At(da)[i] * At(up)[i], s.round2);
              At(out[0])[i] = Round(dgelu * gelu.slope, s.round3);
              At(out[1])[i] = Round(At(da)[i] * gelu.gelu, s.round3);
            }
          }};
}

template <class T>
OpCase<T> AddScaleCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const auto b = make.In(N);
  const T c = static_cast<T>(s.scale);
  return {"add_scale",
          0,
          N,
          {make.Out(N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.add_scale({At(out[0]), At(b), At(out[0]), c, s.round1, s.round2}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < N; ++i) {
              T& y = At(out[0])[i];
              y = Round(y + At(b)[i], s.round1);
              if (c != T(1)) y = Round(y * c, s.round2);
            }
          }};
}

template <class T>
OpCase<T> ScaleCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const auto x = make.In(N);
  const T c = static_cast<T>(s.scale);
  return {"scale",
          0,
          N,
          {make.Out(N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.scale({At(x), At(out[0]), c, s.round1}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < N; ++i) At(out[0])[i] = Round(At(x)[i] * c, s.round1);
          }};
}

template <class T>
OpCase<T> SoftcapCase(CaseMaker<T> make, bool keeps_tanh) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const T cap = static_cast<T>(30 * s.scale);
  return {
      "softcap",
      0,
      N,
      {make.Out(N), make.Out(N)},
      [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
        ops.softcap({At(out[0]), keeps_tanh ? At(out[1]) : nullptr, cap, s.round1}, first, last);
      },
      [=](Arrays<T>& out) {
        for (int64_t i = 0; i < N; ++i) {
          T& z = At(out[0])[i];
          const T th = Round(math::Tanh(Round(z / cap, s.round1)), s.round1);
          z = Round(cap * th, s.round1);
          if (keeps_tanh) At(out[1])[i] = th;
        }
      }};
}

template <class T>
OpCase<T> SoftcapBackwardCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const auto tanh = make.In(N);
  const T cap = static_cast<T>(30 * s.scale);
  return {"softcap_backward",
          0,
          N,
          {make.Out(N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.softcap_backward({At(out[0]), At(tanh), cap, s.round1}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < N; ++i) {
              T& dz = At(out[0])[i];
              const T th = At(tanh)[i];
              const T dth = Round(dz * cap, s.round1);
              dz = Round(Round(dth * std::fma(-th, th, T(1)), s.round1) / cap, s.round1);
            }
          }};
}

template <class T>
OpCase<T> AddCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t N = s.rows * s.n;
  const auto src = make.In(N);
  return {"add",
          0,
          N,
          {make.Out(N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.add({At(out[0]), At(src), s.round1}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < N; ++i) {
              At(out[0])[i] = Round(At(out[0])[i] + At(src)[i], s.round1);
            }
          }};
}

// ---- Cross-entropy -----------------------------------------------------------------------------

template <class T>
OpCase<T> RowMaxCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n;
  const auto z = make.In(R * N);
  return {"row_max",
          0,
          R,
          {make.Out(R)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.row_max({At(z), At(out[0]), N}, first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t t = 0; t < R; ++t) At(out[0])[t] = longhand::Max(Slice(At(z) + t * N, N));
          }};
}

template <class T>
OpCase<T> SumExpCase(CaseMaker<T> make) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n, row_first = 2;
  const auto z = make.In(R * N), m = make.In(R);
  const auto labels = make.Ids(R, static_cast<int32_t>(N + 4));
  return {"sum_exp",
          0,
          R,
          {make.Out(R), make.Out(R)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.sum_exp({At(z), At(m), labels.data(), At(out[0]), At(out[1]), row_first, N}, first,
                        last);
          },
          [=](Arrays<T>& out) {
            for (int64_t t = 0; t < R; ++t) {
              std::vector<T> row = Slice(At(z) + t * N, N);
              const int64_t label = labels[t] - row_first;
              At(out[1])[t] = label >= 0 && label < N ? row[label] : T(0);
              for (T& value : row) value = math::ExpCut(value - At(m)[t]);
              At(out[0])[t] = longhand::Sum(row);
            }
          }};
}

template <class T>
OpCase<T> CrossEntropyBackwardCase(CaseMaker<T> make, bool with_factor) {
  const Shape s = make.s;
  const int64_t R = s.rows, N = s.n, row_first = 2;
  const auto m = make.In(R), sum = make.In(R), factor = make.In(R);
  const auto labels = make.Ids(R, static_cast<int32_t>(N + 4));
  const T inv_n = static_cast<T>(s.scale / 7);
  return {with_factor ? "cross_entropy_backward with factor" : "cross_entropy_backward",
          0,
          R,
          {make.Out(R * N)},
          [=](const OpTable<T>& ops, Arrays<T>& out, int64_t first, int64_t last) {
            ops.cross_entropy_backward(
                {At(out[0]), At(m), At(sum), labels.data(), row_first, N, inv_n, s.round1,
                 with_factor ? At(factor) : nullptr},
                first, last);
          },
          [=](Arrays<T>& out) {
            for (int64_t i = 0; i < R * N; ++i) {
              const int64_t t = i / N;
              T d = math::ExpCut(At(out[0])[i] - At(m)[t]) * (T(1) / At(sum)[t]);
              if (with_factor) d = d * At(factor)[t];
              if (i % N == labels[t] - row_first) d = d - T(1);
              At(out[0])[i] = Round(d * inv_n, s.round1);
            }
          }};
}

template <class T>
std::vector<OpCase<T>> AllCases(const Shape& shape) {
  const CaseMaker<T> make(shape);
  return {EmbedCase(make),
          EmbedBackwardCase(make),
          RmsNormCase(make, true),
          RmsNormCase(make, false),
          RmsNormBackwardCase(make, true),
          RmsNormBackwardCase(make, false),
          RmsNormWeightCase(make),
          RopeCase(make, false, false),
          RopeCase(make, true, true),
          SoftmaxCase(make, true),
          SoftmaxCase(make, false),
          SoftmaxBackwardCase(make),
          OnlineSoftmaxCase(make),
          BlockBackwardCase(make),
          RowDotCase(make),
          RescaleAddCase(make),
          RowDivideCase(make),
          GegluCase(make),
          GegluBackwardCase(make, false),
          GegluBackwardCase(make, true),
          AddScaleCase(make),
          ScaleCase(make),
          SoftcapCase(make, true),
          SoftcapCase(make, false),
          SoftcapBackwardCase(make),
          AddCase(make),
          RowMaxCase(make),
          SumExpCase(make),
          CrossEntropyBackwardCase(make, false),
          CrossEntropyBackwardCase(make, true)};
}

// Odd lengths x windows x scales x all roundings x plain and special values.
inline std::vector<Shape> AllShapes() {
  std::vector<Shape> shapes;
  uint32_t seed = 1;
  for (int64_t n : {1, 5, 15, 16, 17, 33, 100, 257}) {
    for (int rounding = 0; rounding < 8; ++rounding) {
      for (int64_t window : {0, 1, 7, 70}) {
        const auto round = [&](int bit) {
          return (rounding >> bit) & 1 ? Rounding::kBf16 : Rounding::kNone;
        };
        ++seed;
        shapes.push_back({.rows = 4,
                          .n = n,
                          .window = window,
                          .scale = seed % 2 ? 1.0 : 0.3,
                          .round1 = round(0),
                          .round2 = round(1),
                          .round3 = round(2),
                          .special = seed / 2 % 2 == 0,
                          .seed = seed});
      }
    }
  }
  return shapes;
}

inline std::string Describe(const Shape& s) {
  return "n " + std::to_string(s.n) + ", window " + std::to_string(s.window) + ", scale " +
         std::to_string(s.scale) + ", roundings " + std::to_string(static_cast<int>(s.round1)) +
         std::to_string(static_cast<int>(s.round2)) + std::to_string(static_cast<int>(s.round3)) +
         (s.special ? ", special values" : "") + ", seed " + std::to_string(s.seed);
}

}  // namespace retrace::op_cases

#endif  // RETRACE_TESTS_OP_CASES_H_
