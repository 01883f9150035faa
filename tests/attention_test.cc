// Attention against clause 9 written out, bit for bit, in FP32 and FP64, materialised and
// blockwise; the same bits for every instruction set and number of threads; gradients by finite
// differences.
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "tests/finite_difference.h"
#include "tests/longhand.h"

namespace retrace {
namespace {

using longhand::Round;
using longhand::Sees;

template <class T>
struct Problem {
  AttentionConfig<T> c;
  std::vector<T> q, k, v, doutput;
};

template <class T>
struct Outcome {
  std::vector<T> output, dq, dk, dv;
};

template <class T>
using Rows = std::vector<std::vector<T>>;  // [positions][columns]

// ---- Clause 9 written out ----------------------------------------------------------------------

template <class T>
Rows<T> Transposed(const Rows<T>& rows) {
  Rows<T> out(rows[0].size(), std::vector<T>(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) out[j][i] = rows[i][j];
  }
  return out;
}

// A (rows x inner) times B (inner x columns), every element by clause 5.
template <class T>
Rows<T> Product(const Rows<T>& a, const Rows<T>& b, Rounding rounding) {
  const Rows<T> columns = Transposed(b);
  Rows<T> out(a.size(), std::vector<T>(columns.size()));
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t j = 0; j < columns.size(); ++j) {
      out[i][j] = Round(longhand::Chain(a[i], columns[j]), rounding);
    }
  }
  return out;
}

template <class T>
Rows<T> Part(const Rows<T>& rows, int64_t first, int64_t count) {
  return Rows<T>(rows.begin() + first, rows.begin() + first + count);
}

// target[first + i] (+)= part[i]; `begun` tells for which rows something stands there already.
template <class T>
void Accumulate(Rows<T>* target, int64_t first, const Rows<T>& part, bool begun) {
  for (size_t i = 0; i < part.size(); ++i) {
    for (size_t j = 0; j < part[i].size(); ++j) {
      T& x = (*target)[first + i][j];
      x = begun ? x + part[i][j] : part[i][j];
    }
  }
}

// One query head of one sequence.
template <class T>
struct HeadProblem {
  const AttentionConfig<T>& c;
  Rows<T> q, k, v, doutput;
};
template <class T>
struct HeadOutcome {
  Rows<T> output, dq, dk, dv;
};

template <class T>
T Score(const AttentionConfig<T>& c, T s) {
  return c.scale == T(1) ? s : Round(s * c.scale, c.scores);
}
template <class T>
T ScoreGradient(const AttentionConfig<T>& c, T ds) {
  ds = Round(ds, c.grad_scores);
  return c.scale == T(1) ? ds : Round(ds * c.scale, c.grad_scores);
}

// The probabilities of a row of scores, masked ones +0.
template <class T>
std::vector<T> Probabilities(const AttentionConfig<T>& c, int64_t query, std::vector<T> s) {
  std::vector<T> seen;
  for (int64_t k = 0; k < c.length; ++k) {
    s[k] = Score(c, s[k]);
    if (Sees(query, k, c.window)) seen.push_back(s[k]);
  }
  const T m = longhand::Max(seen);
  for (int64_t k = 0; k < c.length; ++k) {
    s[k] = Sees(query, k, c.window) ? math::ExpCut(s[k] - m) : T(0);
  }
  const T inverse = T(1) / longhand::Sum(s);
  for (T& p : s) p = p * inverse;
  return s;
}

template <class T>
Rows<T> RoundRows(Rows<T> rows, Rounding rounding) {
  for (std::vector<T>& row : rows) {
    for (T& x : row) x = Round(x, rounding);
  }
  return rows;
}

template <class T>
HeadOutcome<T> Materialised(const HeadProblem<T>& h) {
  const AttentionConfig<T>& c = h.c;
  Rows<T> p = Product(h.q, Transposed(h.k), c.scores);
  for (int64_t i = 0; i < c.length; ++i) p[i] = Probabilities(c, i, p[i]);
  const Rows<T> rounded = RoundRows(p, c.softmax);
  Rows<T> ds = Product(h.doutput, Transposed(h.v), c.grad_softmax);
  for (int64_t i = 0; i < c.length; ++i) {
    for (int64_t k = 0; k < c.length; ++k) {
      if (!Sees(i, k, c.window)) ds[i][k] = T(0);
    }
    const T dot = longhand::Dot(p[i], ds[i]);
    for (int64_t k = 0; k < c.length; ++k) {
      const bool sees = Sees(i, k, c.window);
      ds[i][k] = sees ? ScoreGradient(c, p[i][k] * (ds[i][k] - dot)) : T(0);
    }
  }
  return {Product(rounded, h.v, c.output), Product(ds, h.k, c.grad_query),
          Product(Transposed(ds), h.q, Rounding::kNone),
          Product(Transposed(rounded), h.doutput, Rounding::kNone)};
}

// The online softmax of one query over key blocks: maximum, sum and output of what was seen.
template <class T>
struct Online {
  bool begun = false;
  T m = 0, l = 0;
  std::vector<T> o;
};

template <class T>
void TakeBlock(const HeadProblem<T>& h, int64_t query, int64_t key, int64_t keys, Online<T>* x) {
  const AttentionConfig<T>& c = h.c;
  std::vector<T> seen, p(keys, T(0)), s(keys);
  for (int64_t k = 0; k < keys; ++k) {
    s[k] = Score(c, Round(longhand::Chain(h.q[query], h.k[key + k]), c.scores));
    if (Sees(query, key + k, c.window)) seen.push_back(s[k]);
  }
  if (seen.empty()) return;
  if (x->begun) seen.push_back(x->m);
  const T m = longhand::Max(seen);
  for (int64_t k = 0; k < keys; ++k) {
    if (Sees(query, key + k, c.window)) p[k] = math::ExpCut(s[k] - m);
  }
  const Rows<T> t =
      Product(RoundRows(Rows<T>{p}, c.softmax), Part(h.v, key, keys), Rounding::kNone);
  const T a = x->begun ? math::ExpCut(x->m - m) : T(0);
  x->l = x->begun ? x->l * a + longhand::Sum(p) : longhand::Sum(p);
  for (size_t d = 0; d < t[0].size(); ++d) {
    x->o[d] = x->begun ? x->o[d] * a + t[0][d] : t[0][d];
  }
  x->m = m;
  x->begun = true;
}

// Does any query of a block see any key of a block?
bool BlocksMeet(int64_t query, int64_t queries, int64_t key, int64_t keys, int64_t window) {
  for (int64_t i = query; i < query + queries; ++i) {
    for (int64_t k = key; k < key + keys; ++k) {
      if (Sees(i, k, window)) return true;
    }
  }
  return false;
}

template <class T>
void BackwardBlocks(const HeadProblem<T>& h, const std::vector<Online<T>>& online, int64_t query,
                    int64_t key, std::vector<bool>* dq_begun, std::vector<bool>* dkv_begun,
                    HeadOutcome<T>* out) {
  const AttentionConfig<T>& c = h.c;
  const int64_t queries = std::min(kAttentionBlock, c.length - query);
  const int64_t keys = std::min(kAttentionBlock, c.length - key);
  if (!BlocksMeet(query, queries, key, keys, c.window)) return;
  const Rows<T> q = Part(h.q, query, queries), k = Part(h.k, key, keys);
  const Rows<T> doutput = Part(h.doutput, query, queries);
  Rows<T> p = Product(q, Transposed(k), c.scores);
  Rows<T> ds = Product(doutput, Transposed(Part(h.v, key, keys)), c.grad_softmax);
  for (int64_t i = 0; i < queries; ++i) {
    const Online<T>& row = online[query + i];
    const T dot = longhand::Dot(doutput[i], out->output[query + i]);
    for (int64_t j = 0; j < keys; ++j) {
      const bool sees = Sees(query + i, key + j, c.window);
      const T unrounded = sees ? math::ExpCut(Score(c, p[i][j]) - row.m) * (T(1) / row.l) : T(0);
      ds[i][j] = sees ? ScoreGradient(c, unrounded * (ds[i][j] - dot)) : T(0);
      p[i][j] = Round(unrounded, c.softmax);
    }
  }
  const auto exact = Rounding::kNone;
  Accumulate(&out->dq, query, Product(ds, k, exact), (*dq_begun)[query]);
  Accumulate(&out->dk, key, Product(Transposed(ds), q, exact), (*dkv_begun)[key]);
  Accumulate(&out->dv, key, Product(Transposed(p), doutput, exact), (*dkv_begun)[key]);
  (*dq_begun)[query] = (*dkv_begun)[key] = true;
}

template <class T>
HeadOutcome<T> Blockwise(const HeadProblem<T>& h) {
  const AttentionConfig<T>& c = h.c;
  std::vector<Online<T>> online(c.length);
  HeadOutcome<T> out;
  for (int64_t i = 0; i < c.length; ++i) {
    online[i].o.resize(c.dim);
    for (int64_t key = 0; key < c.length; key += kAttentionBlock) {
      TakeBlock(h, i, key, std::min(kAttentionBlock, c.length - key), &online[i]);
    }
    out.output.push_back(online[i].o);
    for (T& o : out.output[i]) o = Round(o / online[i].l, c.output);
  }
  const Rows<T> empty(c.length, std::vector<T>(c.dim));
  out.dq = out.dk = out.dv = empty;
  std::vector<bool> dq_begun(c.length), dkv_begun(c.length);
  for (int64_t key = 0; key < c.length; key += kAttentionBlock) {
    for (int64_t query = 0; query < c.length; query += kAttentionBlock) {
      BackwardBlocks(h, online, query, key, &dq_begun, &dkv_begun, &out);
    }
  }
  out.dq = RoundRows(out.dq, c.grad_query);
  return out;
}

// Row t of head j in an array [tokens, heads * dim].
template <class T>
T* RowAt(const AttentionConfig<T>& c, std::vector<T>& x, int64_t heads, int64_t sequence,
         int64_t head, int64_t t) {
  return x.data() + ((sequence * c.length + t) * heads + head) * c.dim;
}

template <class T>
Outcome<T> Define(Problem<T> problem) {
  const AttentionConfig<T>& c = problem.c;
  Outcome<T> out = {problem.q, problem.q, problem.k, problem.k};
  const int64_t group = c.query_heads / c.kv_heads;
  for (int64_t b = 0; b < c.sequences; ++b) {
    for (int64_t j = 0; j < c.query_heads; ++j) {
      const int64_t kv = j / group;
      HeadProblem<T> h{c, {}, {}, {}, {}};
      const auto rows = [&](std::vector<T>& x, int64_t heads, int64_t head) {
        Rows<T> result;
        for (int64_t t = 0; t < c.length; ++t) {
          const T* row = RowAt(c, x, heads, b, head, t);
          result.emplace_back(row, row + c.dim);
        }
        return result;
      };
      h.q = rows(problem.q, c.query_heads, j), h.doutput = rows(problem.doutput, c.query_heads, j);
      h.k = rows(problem.k, c.kv_heads, kv), h.v = rows(problem.v, c.kv_heads, kv);
      const HeadOutcome<T> head =
          c.kind == AttentionKind::kMaterialised ? Materialised(h) : Blockwise(h);
      for (int64_t t = 0; t < c.length; ++t) {
        for (int64_t d = 0; d < c.dim; ++d) {
          RowAt(c, out.output, c.query_heads, b, j, t)[d] = head.output[t][d];
          RowAt(c, out.dq, c.query_heads, b, j, t)[d] = head.dq[t][d];
          T& dk = RowAt(c, out.dk, c.kv_heads, b, kv, t)[d];
          T& dv = RowAt(c, out.dv, c.kv_heads, b, kv, t)[d];
          dk = j % group == 0 ? head.dk[t][d] : dk + head.dk[t][d];
          dv = j % group == 0 ? head.dv[t][d] : dv + head.dv[t][d];
        }
      }
    }
  }
  return out;
}

// ---- Problems ----------------------------------------------------------------------------------

template <class T>
Problem<T> RandomProblem(AttentionConfig<T> c, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const int64_t tokens = c.sequences * c.length;
  const auto values = [&](int64_t n) {
    std::vector<T> x(n);
    for (T& value : x) value = static_cast<T>(normal(random));
    return x;
  };
  Problem<T> problem{c, values(tokens * c.query_heads * c.dim), values(tokens * c.kv_heads * c.dim),
                     values(tokens * c.kv_heads * c.dim), values(tokens * c.query_heads * c.dim)};
  return problem;
}

// Lengths around the blocks x windows x groups; scale, rounding points and dim take turns.
template <class T>
std::vector<Problem<T>> AllProblems(AttentionKind kind) {
  std::vector<Problem<T>> problems;
  uint32_t seed = 0;
  for (int64_t length : {1, 5, 63, 64, 65, 130}) {
    for (int64_t window : {0, 1, 7, 64, 100}) {
      for (int64_t group : {1, 2, 4}) {
        if (length > 64 && (seed + length + window) % 2 == 0) {
          ++seed;
          continue;
        }
        const int64_t dim = ++seed % 3 == 0 ? 18 : 8;
        const auto round = [&](int bit) {
          const bool bf16 = sizeof(T) == sizeof(float) && (seed >> bit) % 2;  // products: FP32 only
          return bf16 ? Rounding::kBf16 : Rounding::kNone;
        };
        const double scale = seed % 2 ? 1.0 : 1 / std::sqrt(static_cast<double>(dim));
        problems.push_back(RandomProblem<T>({.kind = kind,
                                             .sequences = length > 64 ? 1 : 2,
                                             .length = length,
                                             .query_heads = 4,
                                             .kv_heads = 4 / group,
                                             .dim = dim,
                                             .window = window,
                                             .scale = static_cast<T>(scale),
                                             .scores = round(0),
                                             .softmax = round(1),
                                             .output = round(2),
                                             .grad_scores = round(3),
                                             .grad_softmax = round(1),
                                             .grad_query = round(4)},
                                            seed));
      }
    }
  }
  return problems;
}

template <class T>
std::string Describe(const AttentionConfig<T>& c) {
  return "length " + std::to_string(c.length) + ", window " + std::to_string(c.window) +
         ", KV heads " + std::to_string(c.kv_heads) + ", dim " + std::to_string(c.dim) +
         ", scale " + std::to_string(c.scale);
}

// What is not written stays NaN.
template <class T>
Outcome<T> Solve(Engine& engine, const Problem<T>& p) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const std::vector<T> query_like(p.q.size(), nan), key_like(p.k.size(), nan);
  Outcome<T> out = {query_like, query_like, key_like, key_like};
  AttentionSaved<T> saved;
  AttentionScratch<T> scratch;
  AttentionForward(engine, p.c, p.q.data(), p.k.data(), p.v.data(), out.output.data(), &saved,
                   &scratch);
  AttentionBackward(engine, p.c, p.q.data(), p.k.data(), p.v.data(), out.output.data(),
                    p.doutput.data(), saved, out.dq.data(), out.dk.data(), out.dv.data(), &scratch);
  return out;
}

template <class T>
void ExpectSame(const Outcome<T>& expected, const Outcome<T>& got) {
  EXPECT_EQ(-1, longhand::FirstDifference(expected.output, got.output)) << "output";
  EXPECT_EQ(-1, longhand::FirstDifference(expected.dq, got.dq)) << "dq";
  EXPECT_EQ(-1, longhand::FirstDifference(expected.dk, got.dk)) << "dk";
  EXPECT_EQ(-1, longhand::FirstDifference(expected.dv, got.dv)) << "dv";
}

// ---- Tests -------------------------------------------------------------------------------------

template <class T>
void ExpectClause9(AttentionKind kind) {
  Engine engine(Isa::kScalar, 1);
  for (const Problem<T>& problem : AllProblems<T>(kind)) {
    SCOPED_TRACE(Describe(problem.c));
    ExpectSame(Define(problem), Solve(engine, problem));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Attention, MaterialisedFollowsClause9InFp32) {
  ExpectClause9<float>(AttentionKind::kMaterialised);
}
TEST(Attention, MaterialisedFollowsClause9InFp64) {
  ExpectClause9<double>(AttentionKind::kMaterialised);
}
TEST(Attention, BlockwiseFollowsClause9InFp32) { ExpectClause9<float>(AttentionKind::kBlockwise); }
TEST(Attention, BlockwiseFollowsClause9InFp64) { ExpectClause9<double>(AttentionKind::kBlockwise); }

// More than 256 keys: the products with v and over queries are of two chains.
TEST(Attention, MaterialisedFollowsClause9BeyondOneChain) {
  Engine engine(BestIsa(), 2);
  const Problem<float> problem = RandomProblem<float>({.kind = AttentionKind::kMaterialised,
                                                       .sequences = 1,
                                                       .length = 290,
                                                       .query_heads = 2,
                                                       .kv_heads = 1,
                                                       .dim = 4,
                                                       .window = 0,
                                                       .scale = 0.5f,
                                                       .scores = Rounding::kNone,
                                                       .softmax = Rounding::kBf16,
                                                       .output = Rounding::kNone,
                                                       .grad_scores = Rounding::kNone,
                                                       .grad_softmax = Rounding::kNone,
                                                       .grad_query = Rounding::kNone},
                                                      11);
  ExpectSame(Define(problem), Solve(engine, problem));
}

TEST(Attention, GivesTheSameBitsOnEveryIsaAndNumberOfThreads) {
  for (AttentionKind kind : {AttentionKind::kMaterialised, AttentionKind::kBlockwise}) {
    const std::vector<Problem<float>> problems = AllProblems<float>(kind);
    std::vector<Outcome<float>> expected;
    Engine scalar(Isa::kScalar, 1);
    for (const Problem<float>& problem : problems) expected.push_back(Solve(scalar, problem));
    for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
      if (!IsaSupported(isa)) continue;
      for (int threads : {1, 2, 3}) {
        SCOPED_TRACE(std::string(IsaName(isa)) + ", threads " + std::to_string(threads));
        Engine engine(isa, threads);
        for (size_t i = 0; i < problems.size(); ++i) {
          ExpectSame(expected[i], Solve(engine, problems[i]));
        }
      }
    }
  }
}

// Changing keys that a query does not see, even to where its scores overflow, changes nothing.
TEST(Attention, MaskedKeysTakeNoPart) {
  Engine engine(BestIsa(), 1);
  for (AttentionKind kind : {AttentionKind::kMaterialised, AttentionKind::kBlockwise}) {
    for (Problem<float> problem : AllProblems<float>(kind)) {
      const AttentionConfig<float> c = problem.c;
      SCOPED_TRACE(Describe(c));
      const std::vector<float> before = Solve(engine, problem).output;
      const int64_t changed = c.length / 2;
      for (int64_t b = 0; b < c.sequences; ++b) {
        const int64_t row = c.kv_heads * c.dim, at = (b * c.length + changed) * row;
        std::fill_n(problem.k.begin() + at, row, 3e38f);
        std::fill_n(problem.v.begin() + at, row, -1e38f);
      }
      const std::vector<float> after = Solve(engine, problem).output;
      const int64_t row = c.query_heads * c.dim;
      for (int64_t i = 0; i < static_cast<int64_t>(after.size()); ++i) {
        const int64_t t = i / row % c.length;
        if (Sees(t, changed, c.window)) continue;
        ASSERT_EQ(longhand::Canonical(before[i]), longhand::Canonical(after[i])) << "query " << t;
      }
      EXPECT_NE(-1, longhand::FirstDifference(before, after)) << "the query itself sees the key";
    }
  }
}

double Loss(Engine& engine, const Problem<double>& p) {
  AttentionSaved<double> saved;
  AttentionScratch<double> scratch;
  std::vector<double> output(p.q.size());
  AttentionForward(engine, p.c, p.q.data(), p.k.data(), p.v.data(), output.data(), &saved,
                   &scratch);
  return std::inner_product(output.begin(), output.end(), p.doutput.begin(), 0.0);
}

void ExpectGradients(AttentionKind kind, int64_t length, int64_t window, double scale) {
  SCOPED_TRACE("length " + std::to_string(length) + ", window " + std::to_string(window));
  Engine engine(Isa::kScalar, 1);
  Problem<double> p = RandomProblem<double>({.kind = kind,
                                             .sequences = 1,
                                             .length = length,
                                             .query_heads = 4,
                                             .kv_heads = 2,
                                             .dim = 6,
                                             .window = window,
                                             .scale = scale,
                                             .scores = Rounding::kNone,
                                             .softmax = Rounding::kNone,
                                             .output = Rounding::kNone,
                                             .grad_scores = Rounding::kNone,
                                             .grad_softmax = Rounding::kNone,
                                             .grad_query = Rounding::kNone},
                                            3);
  const Outcome<double> out = Solve(engine, p);
  double magnitude = 0;
  for (size_t i = 0; i < out.output.size(); ++i) {
    magnitude += std::fabs(out.output[i] * p.doutput[i]);
  }
  std::mt19937 random(4);
  const std::pair<std::vector<double>*, const std::vector<double>*> inputs[] = {
      {&p.q, &out.dq}, {&p.k, &out.dk}, {&p.v, &out.dv}};
  for (const auto& [x, gradient] : inputs) {
    for (int sample = 0; sample < 16; ++sample) {
      const size_t i = random() % x->size();
      ExpectDerivative(&(*x)[i], (*gradient)[i], magnitude, [&] { return Loss(engine, p); });
    }
  }
}

TEST(Attention, MaterialisedGradientsAgreeWithFiniteDifferences) {
  ExpectGradients(AttentionKind::kMaterialised, 9, 0, 1.0);
  ExpectGradients(AttentionKind::kMaterialised, 21, 4, 0.4);
}

TEST(Attention, BlockwiseGradientsAgreeWithFiniteDifferences) {
  ExpectGradients(AttentionKind::kBlockwise, 9, 0, 1.0);
  ExpectGradients(AttentionKind::kBlockwise, 70, 0, 0.4);
  ExpectGradients(AttentionKind::kBlockwise, 131, 66, 0.4);
}

}  // namespace
}  // namespace retrace
