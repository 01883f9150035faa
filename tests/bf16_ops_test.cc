// Every op of the step in BF16, given the public implementation's inputs, against its outputs
// (transformers 5.24 in eager mode, torch 2.11; tests/data/parity/bf16_ops.py recorded both). Each
// op runs as the transformer runs it under the `bf16` preset, on every instruction set of this
// machine.
//
// The bound is one BF16 ULP. Both sides compute an element in FP32, x here and y there, and round
// it to BF16; rounding moves each by half an ULP at most, so |round(x) - round(y)| <= |x - y| + 1
// ULP, and on the grid the two are the same or neighbours wherever |x - y| is below an ULP. That
// fails only where addends cancel: then |x - y| is that of the addends' scale, not the result's. So
// each comparison takes a *slack*, a bound of |x - y| derived from the FP32 arithmetic of both
// sides (u = 2^-24 per operation, times the sum of the addends' magnitudes), and an element passes
// if the grid distance is at most 1, or |ours - theirs| <= slack + 1 ULP. For a product over K
// terms the slack is 2(K+1)u * sum|a_k b_k| <= 2K(K+1)u * max|a_k b_k|, for K <= 128 less than 2^-9
// of the largest addend, a quarter of its ULP or less: the rule is stricter than one ULP at that
// scale.
#include "tests/parity_case.h"

namespace retrace {
namespace {

constexpr double kU = 0x1p-24;  // half an ULP of FP32, relative

using Values = std::vector<float>;
using Slack = std::vector<double>;  // per element; empty: none

std::vector<Isa> Isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (IsaSupported(isa)) isas.push_back(isa);
  }
  return isas;
}

// Position of a BF16 number on the grid of all of them; both zeros are 0.
int64_t GridIndex(float x) {
  const int32_t bits = math::Bits(x);
  EXPECT_EQ(bits & 0xffff, 0) << x << " is no BF16 number";
  const int64_t magnitude = (bits & 0x7fffffff) >> 16;
  return bits < 0 ? -magnitude : magnitude;
}

// One BF16 ULP at the scale of x.
double Ulp(double x) {
  return x == 0 ? 0x1p-133 : std::ldexp(1.0, std::max(std::ilogb(x), -126) - 7);
}

struct Tally {
  int64_t equal = 0, one = 0, cancelled = 0, beyond = 0;
  std::string worst;  // the first element beyond
};

Tally Compare(const Values& ours, const Values& theirs, const Slack& slack = {}) {
  Tally tally;
  EXPECT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < std::min(ours.size(), theirs.size()); ++i) {
    const int64_t distance = std::abs(GridIndex(ours[i]) - GridIndex(theirs[i]));
    const double difference = std::abs(double(ours[i]) - double(theirs[i]));
    const double ulp = Ulp(std::max(std::abs(ours[i]), std::abs(theirs[i])));
    if (distance == 0) {
      ++tally.equal;
    } else if (distance == 1) {
      ++tally.one;
    } else if (!slack.empty() && difference <= slack[i] + ulp) {
      ++tally.cancelled;
    } else if (tally.beyond++ == 0) {
      std::ostringstream text;
      text << "element " << i << ": ours " << ours[i] << ", theirs " << theirs[i] << ", "
           << distance << " ULP";
      tally.worst = text.str();
    }
  }
  return tally;
}

struct Product {
  Values value;
  Slack slack;
};

// One configuration, its weights in BF16, and the engine of one instruction set.
struct Recorded {
  ParityCase c;
  SafetensorsFile ops, model;
  Engine engine;
  const OpTable<float>& table;

  Recorded(const std::string& directory, Isa isa)
      : c(directory),
        ops(SafetensorsFile::Open(directory + "/bf16_ops.safetensors").value()),
        model(SafetensorsFile::Open(directory + "/model.safetensors").value()),
        engine(isa, 1),
        table(Ops<float>(isa)) {}

  bool Has(const std::string& name) const { return ops.tensors().contains(name); }
  Values Read(const std::string& name) const { return ops.ReadFloat(name).value(); }
  Values Weight(const std::string& name) const {
    Values w = model.ReadFloat(name).value();
    for (float& x : w) x = math::RoundToBf16(x);
    return w;
  }
  // The layers recorded.
  std::vector<int64_t> Layers() const {
    std::vector<int64_t> layers;
    for (int64_t l = 0; l < c.recipe.model.layers; ++l) {
      if (Has("layer" + std::to_string(l) + ".in")) layers.push_back(l);
    }
    EXPECT_EQ(layers.size(), 2u);
    return layers;
  }
  int64_t tokens() const { return c.batch.tokens(); }
  int64_t hidden() const { return c.recipe.model.hidden_size; }

  void Expect(const std::string& op, const Values& ours, const Values& theirs,
              const Slack& slack = {}) const {
    const Tally t = Compare(ours, theirs, slack);
    EXPECT_EQ(t.beyond, 0) << op << " (" << IsaName(engine.isa()) << "): " << t.worst;
    EXPECT_GT(ours.size(), 0u) << op;
    std::ostringstream text;
    text << "equal " << t.equal << " one " << t.one << " cancelled " << t.cancelled << " beyond "
         << t.beyond;
    testing::Test::RecordProperty(std::string(IsaName(engine.isa())) + " " + op, text.str());
  }

  // round(A B), with the strides of GemmArgs.
  Product Multiply(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col,
                   const float* b, int64_t b_row, int64_t b_col, Rounding round = Rounding::kBf16) {
    Product p{Values(m * n), Slack(m * n)};
    engine.Multiply(GemmArgs<float>{.m = m,
                                    .n = n,
                                    .k = k,
                                    .a = a,
                                    .a_row_stride = a_row,
                                    .a_col_stride = a_col,
                                    .b = b,
                                    .b_row_stride = b_row,
                                    .b_col_stride = b_col,
                                    .c = p.value.data(),
                                    .c_row_stride = n,
                                    .round = round});
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t l = 0; l < k; ++l) {
          sum += std::abs(double(a[i * a_row + l * a_col]) * b[l * b_row + j * b_col]);
        }
        p.slack[i * n + j] = 2 * double(k + 1) * kU * sum;
      }
    }
    return p;
  }

  // A projection: y = x W^T, dx = dy W, dW = dy^T x.
  void ExpectProjection(const std::string& op, const Values& w) {
    const Values x = Read(op + ".in"), dy = Read(op + ".out.grad");
    const int64_t t = tokens(), in = int64_t(x.size()) / t, out = int64_t(dy.size()) / t;
    ASSERT_EQ(int64_t(w.size()), in * out) << op;
    const Product y = Multiply(t, out, in, x.data(), in, 1, w.data(), 1, in);
    Expect(op, y.value, Read(op + ".out"), y.slack);
    const Product dx = Multiply(t, in, out, dy.data(), out, 1, w.data(), in, 1);
    Expect(op + ".in.grad", dx.value, Read(op + ".in.grad"), dx.slack);
    const Product dw = Multiply(out, in, t, dy.data(), 1, out, x.data(), in, 1);
    Expect(op + ".weight.grad", dw.value, Read(op + ".weight.grad"), dw.slack);
  }

  // A norm over rows of n elements; w empty: without weight.
  void ExpectNorm(const std::string& op, const Values& w, int64_t n) {
    const Values x = Read(op + ".in"), dy = Read(op + ".out.grad");
    const int64_t rows = int64_t(x.size()) / n;
    const float* weight = w.empty() ? nullptr : w.data();
    Values y(x.size()), r(rows), dx(x.size());
    table.rms_norm({.x_RN = x.data(),
                    .w_N = weight,
                    .y_RN = y.data(),
                    .r_R = r.data(),
                    .n = n,
                    .eps = static_cast<float>(c.recipe.model.rms_norm_eps),
                    .round = Rounding::kBf16},
                   0, rows);
    Expect(op, y, Read(op + ".out"));
    table.rms_norm_backward({.x_RN = x.data(),
                             .w_N = weight,
                             .r_R = r.data(),
                             .dy_RN = dy.data(),
                             .dx_RN = dx.data(),
                             .n = n,
                             .round = Rounding::kBf16},
                            0, rows);
    // dx = r g - (x r) c r with c = sum(g x r)/n. On either side r carries a sum of n squares and
    // c a sum of n products, each with at most n+8 roundings.
    Slack slack(x.size()), dw_slack(n);
    for (int64_t i = 0; i < rows; ++i) {
      const auto g = [&](int64_t j) { return double(dy[i * n + j]) * (weight ? w[j] : 1.0f); };
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += std::abs(g(j) * x[i * n + j] * r[i]) / double(n);
      for (int64_t j = 0; j < n; ++j) {
        const double xr = std::abs(double(x[i * n + j]) * r[i]);
        slack[i * n + j] = 4 * double(n + 8) * kU * r[i] * (std::abs(g(j)) + xr * sum);
        dw_slack[j] += 2 * double(rows + n + 8) * kU * std::abs(dy[i * n + j]) * xr;
      }
    }
    Expect(op + ".in.grad", dx, Read(op + ".in.grad"), slack);
    if (!weight) return;
    Values dw(n);
    table.rms_norm_weight({.x_RN = x.data(),
                           .r_R = r.data(),
                           .dy_RN = dy.data(),
                           .dw_N = dw.data(),
                           .rows = rows,
                           .n = n},
                          0, n);
    Expect(op + ".weight.grad", Rounded(dw), Read(op + ".weight.grad"), dw_slack);
  }

  Values Rounded(Values x) const {
    table.scale({.x = x.data(), .y = x.data(), .scale = 1.0f, .round = Rounding::kBf16}, 0,
                int64_t(x.size()));
    return x;
  }
  // round(a + b)
  Values Sum(Values a, const Values& b) const {
    EXPECT_EQ(a.size(), b.size());
    table.add({.dst = a.data(), .src = b.data(), .round = Rounding::kBf16}, 0, int64_t(a.size()));
    return a;
  }
};

class Bf16Ops : public testing::TestWithParam<std::string> {
 protected:
  template <class F>
  void OnEveryIsa(F f) {
    for (Isa isa : Isas()) {
      Recorded r(GetParam(), isa);
      f(r);
    }
  }
  template <class F>
  void OnEveryLayer(F f) {
    OnEveryIsa([&](Recorded& r) {
      for (int64_t l : r.Layers()) f(r, l, "layer" + std::to_string(l) + ".");
    });
  }
};

TEST_P(Bf16Ops, NormsAreWithinOneUlp) {
  OnEveryIsa([](Recorded& r) { r.ExpectNorm("norm", r.Weight("model.norm.weight"), r.hidden()); });
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    for (const char* name : {"input_layernorm", "post_attention_layernorm",
                             "pre_feedforward_layernorm", "post_feedforward_layernorm"}) {
      r.ExpectNorm(P + name, r.Weight(LayerTensorName(l, name + std::string(".weight"))),
                   r.hidden());
    }
    const int64_t dim = r.c.recipe.model.HeadDim(l);
    r.ExpectNorm(P + "q_norm", r.Weight(LayerTensorName(l, "self_attn.q_norm.weight")), dim);
    r.ExpectNorm(P + "k_norm", r.Weight(LayerTensorName(l, "self_attn.k_norm.weight")), dim);
    r.ExpectNorm(P + "v_norm", {}, dim);
  });
}

TEST_P(Bf16Ops, ProjectionsAreWithinOneUlp) {
  OnEveryIsa(
      [](Recorded& r) { r.ExpectProjection("head", r.Weight("model.embed_tokens.weight")); });
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                             "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
      const std::string op = P + std::string(name).substr(std::string(name).find('.') + 1);
      if (!r.Has(op + ".in")) {
        EXPECT_EQ(op, P + "v_proj");  // only where v is k
        EXPECT_TRUE(r.c.recipe.model.IsFull(l) && r.c.recipe.model.attention_k_eq_v);
        continue;
      }
      r.ExpectProjection(op, r.Weight(LayerTensorName(l, name + std::string(".weight"))));
    }
  });
}

// cos and sin as Transformer::MakeRope has them. The reference's angle is a product in FP32 of a
// frequency in FP32, of relative error below 8u, which moves cos and sin by as much times the
// angle.
void ExpectRopeTable(Recorded& r, int64_t l, const std::string& P) {
  const ModelRecipe& m = r.c.recipe.model;
  const int64_t half = m.HeadDim(l) / 2;
  const double theta = m.IsFull(l) ? m.full_rope_theta : m.sliding_rope_theta;
  const double partial = m.IsFull(l) ? m.full_partial_rotary_factor : 1.0;
  Values cos, sin;
  Slack slack;
  for (int64_t s = 0; s < r.c.batch.length; ++s) {
    for (int64_t i = 0; i < half; ++i) {
      const bool rotated = i < static_cast<int64_t>(partial * double(2 * half) / 2.0);
      const double angle =
          rotated ? double(s) * math::Pow(theta, -2.0 * double(i) / double(2 * half)) : 0.0;
      cos.push_back(math::RoundToBf16(static_cast<float>(math::Cos(angle))));
      sin.push_back(math::RoundToBf16(static_cast<float>(math::Sin(angle))));
      slack.push_back(8 * kU * angle);
    }
  }
  r.Expect(P + "cos", cos, r.Read(P + "cos"), slack);
  r.Expect(P + "sin", sin, r.Read(P + "sin"), slack);
}

TEST_P(Bf16Ops, RopeIsWithinOneUlp) {
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    ExpectRopeTable(r, l, P);
    const Values cos = r.Read(P + "cos"), sin = r.Read(P + "sin");
    const int64_t dim = r.c.recipe.model.HeadDim(l);
    for (const char* name : {"q_rope", "k_rope"}) {
      const auto rotate = [&](const Values& x, bool backward) {
        Values y(x.size());
        r.table.rope({.x_TC = x.data(),
                      .y_TC = y.data(),
                      .cos_SD = cos.data(),
                      .sin_SD = sin.data(),
                      .length = r.c.batch.length,
                      .heads = int64_t(x.size()) / (r.tokens() * dim),
                      .dim = dim,
                      .backward = backward,
                      .round = Rounding::kBf16},
                     0, r.tokens());
        return y;
      };
      r.Expect(P + name, rotate(r.Read(P + name + ".in"), false), r.Read(P + name + ".out"));
      r.Expect(P + name + ".in.grad", rotate(r.Read(P + name + ".out.grad"), true),
               r.Read(P + name + ".in.grad"));
    }
  });
}

// One (sequence, query head) of the recorded attention.
struct AttentionHead {
  int64_t S, D, q_stride, kv_stride, q_offset, kv_offset, square, rep;
};
template <class F>
void ForEachHead(const Recorded& r, int64_t l, F f) {
  const ModelRecipe& m = r.c.recipe.model;
  const int64_t S = r.c.batch.length, D = m.HeadDim(l), heads = m.query_heads, kv = m.KvHeads(l);
  for (int64_t b = 0; b < r.c.batch.sequences; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      f(AttentionHead{S, D, heads * D, kv * D, b * S * heads * D + h * D,
                      b * S * kv * D + h * kv / heads * D, (b * heads + h) * S * S,
                      (b * heads + h) * S * D});
    }
  }
}

// Compares the products of all heads: `theirs(h)` gives pointer and row stride of a head's result.
struct HeadProducts {
  Values ours, theirs;
  Slack slack;
  void Append(const Product& p, const float* expected, int64_t rows, int64_t cols, int64_t stride) {
    ours.insert(ours.end(), p.value.begin(), p.value.end());
    slack.insert(slack.end(), p.slack.begin(), p.slack.end());
    for (int64_t i = 0; i < rows; ++i) {
      theirs.insert(theirs.end(), expected + i * stride, expected + i * stride + cols);
    }
  }
};

TEST_P(Bf16Ops, AttentionProductsAreWithinOneUlp) {
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    const Values q = r.Read(P + "q_rope.out"), k = r.Read(P + "k_rope.out"),
                 v = r.Read(P + "v_norm.out"), s = r.Read(P + "scores"), p = r.Read(P + "probs"),
                 o = r.Read(P + "o_proj.in"), d_o = r.Read(P + "o_proj.in.grad"),
                 dp = r.Read(P + "probs.grad"), ds = r.Read(P + "scores.grad"),
                 dq = r.Read(P + "q_rope.out.grad"), dk = r.Read(P + "k_rep.grad"),
                 dv = r.Read(P + "v_rep.grad");
    HeadProducts scores, output, grad_p, grad_q, grad_k, grad_v;
    ForEachHead(r, l, [&](const AttentionHead& h) {
      const int64_t S = h.S, D = h.D, qs = h.q_stride, ks = h.kv_stride;
      const float *qh = &q[h.q_offset], *kh = &k[h.kv_offset], *vh = &v[h.kv_offset],
                  *oh = &d_o[h.q_offset], *ph = &p[h.square], *dsh = &ds[h.square];
      scores.Append(r.Multiply(S, S, D, qh, qs, 1, kh, 1, ks), &s[h.square], S, S, S);
      output.Append(r.Multiply(S, D, S, ph, S, 1, vh, ks, 1), &o[h.q_offset], S, D, qs);
      grad_p.Append(r.Multiply(S, S, D, oh, qs, 1, vh, 1, ks), &dp[h.square], S, S, S);
      grad_q.Append(r.Multiply(S, D, S, dsh, S, 1, kh, ks, 1), &dq[h.q_offset], S, D, qs);
      grad_k.Append(r.Multiply(S, D, S, dsh, 1, S, qh, qs, 1), &dk[h.rep], S, D, D);
      grad_v.Append(r.Multiply(S, D, S, ph, 1, S, oh, qs, 1), &dv[h.rep], S, D, D);
    });
    for (const auto& [name, products] :
         {std::pair("scores", &scores), std::pair("attention", &output),
          std::pair("probs.grad", &grad_p), std::pair("q.grad", &grad_q),
          std::pair("k_head.grad", &grad_k), std::pair("v_head.grad", &grad_v)}) {
      r.Expect(P + name, products->ours, products->theirs, products->slack);
    }
  });
}

TEST_P(Bf16Ops, SoftmaxIsWithinOneUlp) {
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    const ModelRecipe& m = r.c.recipe.model;
    const int64_t S = r.c.batch.length, window = m.IsFull(l) ? 0 : m.sliding_window;
    Values p = r.Read(P + "scores"), rounded(p.size()), ds = r.Read(P + "probs.grad");
    const int64_t rows = int64_t(p.size()) / S;
    r.table.softmax({.s_RS = p.data(),
                     .p_rounded_RS = rounded.data(),
                     .length = S,
                     .window = window,
                     .scale = 1.0f,
                     .round_scores = Rounding::kBf16,
                     .round = Rounding::kBf16},
                    0, rows);
    r.Expect(P + "softmax", rounded, r.Read(P + "probs"));
    // ds = p (dp - sum(p dp)): the sum of S products, and p itself after a sum of S exponentials.
    Slack slack(p.size());
    for (int64_t i = 0; i < rows; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < S; ++k) sum += std::abs(double(p[i * S + k]) * ds[i * S + k]);
      for (int64_t k = 0; k < S; ++k) {
        slack[i * S + k] = 4 * double(S + 8) * kU * p[i * S + k] * (std::abs(ds[i * S + k]) + sum);
      }
    }
    r.table.softmax_backward({.p_RS = p.data(),
                              .dp_RS = ds.data(),
                              .length = S,
                              .window = window,
                              .scale = 1.0f,
                              .round = Rounding::kBf16},
                             0, rows);
    r.Expect(P + "scores.grad", ds, r.Read(P + "scores.grad"), slack);
  });
}

TEST_P(Bf16Ops, GegluIsWithinOneUlp) {
  OnEveryLayer([](Recorded& r, int64_t, const std::string& P) {
    const Values gate = r.Read(P + "gate_proj.out"), up = r.Read(P + "up_proj.out"),
                 da = r.Read(P + "down_proj.in.grad"), their_gelu = r.Read(P + "gelu.out"),
                 dgelu = r.Read(P + "gelu.out.grad"), ones(gate.size(), 1.0f);
    const int64_t n = int64_t(gate.size());
    const auto geglu = [&](const Values& u) {
      Values act(n);
      r.table.geglu({.gate = gate.data(),
                     .up = u.data(),
                     .act = act.data(),
                     .round_gelu = Rounding::kBf16,
                     .round_product = Rounding::kBf16},
                    0, n);
      return act;
    };
    Values dgate(n), dup(n);
    r.table.geglu_backward({.gate = gate.data(),
                            .up = up.data(),
                            .dact = da.data(),
                            .dgate = dgate.data(),
                            .dup = dup.data(),
                            .round_gelu = Rounding::kBf16,
                            .round_dgelu = Rounding::kBf16,
                            .round = Rounding::kBf16},
                           0, n);
    // gelu = t/2 (1 + tanh): left of 0 the two cancel, tanh being right to 4u. Its slope has the
    // same sum and 1 - tanh^2, times t/2 * 0.8 (1 + 0.134 t^2). In the products a gelu that
    // rounded to the neighbour counts with its own ULP.
    const Values gelu = geglu(ones);
    Slack gelu_slack(n), act_slack(n), dup_slack(n), dgate_slack(n);
    for (int64_t i = 0; i < n; ++i) {
      const double t = std::abs(gate[i]), flip = std::abs(double(gelu[i]) - their_gelu[i]);
      gelu_slack[i] = 2 * 4 * kU * t / 2;
      act_slack[i] = flip * std::abs(up[i]);
      dup_slack[i] = flip * std::abs(da[i]);
      dgate_slack[i] = 2 * kU * std::abs(dgelu[i]) * (2 + 8 * t / 2 * 0.8 * (1 + 0.134145 * t * t));
    }
    r.Expect(P + "gelu", gelu, their_gelu, gelu_slack);
    r.Expect(P + "gelu_times_up", geglu(up), r.Read(P + "down_proj.in"), act_slack);
    r.Expect(P + "up.grad", dup, r.Read(P + "up_proj.out.grad"), dup_slack);
    r.Expect(P + "gate.grad", dgate, r.Read(P + "gate_proj.out.grad"), dgate_slack);
  });
}

TEST_P(Bf16Ops, ResidualAndLayerScalarAreWithinOneUlp) {
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    // The scalar is a buffer of the model, so it is BF16 as the weights are.
    const float scalar = math::RoundToBf16(static_cast<float>(r.c.recipe.model.layer_scalar[l]));
    const auto add_scale = [&](const std::string& a, const std::string& b, float scale) {
      const Values x = r.Read(P + a), y = r.Read(P + b);
      Values sum(x.size());
      r.table.add_scale({.a = x.data(),
                         .b = y.data(),
                         .y = sum.data(),
                         .scale = scale,
                         .round_sum = Rounding::kBf16,
                         .round_scale = Rounding::kBf16},
                        0, int64_t(x.size()));
      return sum;
    };
    r.Expect(P + "residual_attention", add_scale("in", "post_attention_layernorm.out", 1.0f),
             r.Read(P + "pre_feedforward_layernorm.in"));
    r.Expect(P + "output",
             add_scale("pre_feedforward_layernorm.in", "post_feedforward_layernorm.out", scalar),
             r.Read(P + "out"));
    Values d = r.Read(P + "out.grad");
    r.table.scale({.x = d.data(), .y = d.data(), .scale = scalar, .round = Rounding::kBf16}, 0,
                  int64_t(d.size()));
    const Values through = r.Read(P + "post_feedforward_layernorm.out.grad");
    r.Expect(P + "output.grad", d, through);
    const Values mid = r.Sum(through, r.Read(P + "pre_feedforward_layernorm.in.grad"));
    const Values their_mid = r.Read(P + "post_attention_layernorm.out.grad");
    r.Expect(P + "residual_attention.grad", mid, their_mid);
    r.Expect(P + "in.grad", r.Sum(their_mid, r.Read(P + "input_layernorm.in.grad")),
             r.Read(P + "in.grad"));
  });
}

TEST_P(Bf16Ops, SoftcapAndCrossEntropyAreWithinOneUlp) {
  OnEveryIsa([](Recorded& r) {
    const int64_t T = r.tokens(), V = r.c.recipe.model.vocab_size;
    const float cap = static_cast<float>(r.c.recipe.model.final_logit_softcapping);
    ASSERT_GT(cap, 0);
    Values z = r.Read("head.out"), th(z.size()), dz = r.Read("logits.grad");
    r.table.softcap({.z = z.data(), .tanh = th.data(), .cap = cap, .round = Rounding::kBf16}, 0,
                    T * V);
    const Values logits = r.Read("logits");
    r.Expect("softcap", z, logits);
    r.table.softcap_backward(
        {.dz = dz.data(), .tanh = th.data(), .cap = cap, .round = Rounding::kBf16}, 0, T * V);
    r.Expect("softcap.grad", dz, r.Read("head.out.grad"));

    Values grad = logits, max(T), sum(T), label(T);
    const std::vector<int32_t>& labels = r.c.batch.labels;
    r.table.row_max({.z_TV = grad.data(), .m_T = max.data(), .n = V}, 0, T);
    r.table.sum_exp({.z_TV = grad.data(),
                     .m_T = max.data(),
                     .labels_T = labels.data(),
                     .sum_T = sum.data(),
                     .label_T = label.data(),
                     .row_first = 0,
                     .n = V},
                    0, T);
    const float inv_n = 1.0f / static_cast<float>(T);
    r.table.cross_entropy_backward({.z_TV = grad.data(),
                                    .m_T = max.data(),
                                    .sum_T = sum.data(),
                                    .labels_T = labels.data(),
                                    .row_first = 0,
                                    .n = V,
                                    .inv_n = inv_n,
                                    .round = Rounding::kBf16},
                                   0, T);
    // p - 1 at the label: p after a sum of V exponentials.
    r.Expect("logits.grad", grad, r.Read("logits.grad"),
             Slack(T * V, 2 * double(V + 8) * kU * inv_n));
    const Values losses = r.Read("losses");  // FP32 on both sides
    for (int64_t t = 0; t < T; ++t) {
      const double loss = (math::Log(sum[t]) + max[t]) - label[t];
      const double scale = 1 + std::abs(max[t]) + std::abs(label[t]) + std::abs(losses[t]);
      EXPECT_NEAR(loss, losses[t], 2 * double(V + 8) * kU * scale) << "token " << t;
    }
  });
}

TEST_P(Bf16Ops, EmbeddingIsWithinOneUlp) {
  OnEveryIsa([](Recorded& r) {
    const int64_t T = r.tokens(), H = r.hidden(), V = r.c.recipe.model.vocab_size;
    const Values table = r.Weight("model.embed_tokens.weight"), dx = r.Read("embed.out.grad");
    const float scale = math::RoundToBf16(static_cast<float>(math::Sqrt(double(H))));
    Values x(T * H);
    r.table.embed({.table_VN = table.data(),
                   .ids_T = r.c.batch.ids.data(),
                   .x_TN = x.data(),
                   .row_first = 0,
                   .rows = V,
                   .n = H,
                   .scale = scale,
                   .round = Rounding::kBf16},
                  0, T);
    r.Expect("embedding", x, r.Read("embed.out"));
    // The reference adds the rows of a token that occurs again in BF16; so does this, by rounding
    // after each token.
    Values rows(V * H, 0.0f);
    for (int64_t t = 0; t < T; ++t) {
      r.table.embed_backward({.dx_TN = dx.data() + t * H,
                              .ids_T = r.c.batch.ids.data() + t,
                              .dtable_VN = rows.data(),
                              .tokens = 1,
                              .row_first = 0,
                              .rows = V,
                              .n = H,
                              .dropped = 0,
                              .scale = scale,
                              .round = Rounding::kBf16},
                             0, H);
      rows = r.Rounded(rows);
    }
    r.Expect("embedding.weight.grad", rows, r.Read("embed.weight.grad"));
    r.Expect("tied.weight.grad", r.Sum(r.Read("head.weight.grad"), r.Read("embed.weight.grad")),
             r.Read("tied.weight.grad"));
  });
}

// ------------------------------------------------------------------------------------------------
// Where the transformer adds in FP32 what the reference rounds first (NUMERICS.md, clauses 7 and
// 8): there the reference's own roundings, half an ULP of each addend and of each partial sum, are
// part of |x - y|, and only they and the FP32 slack are allowed.

// |x - y| for a sum of terms listed in the reference's order of addition: the FP32 slack of each,
// its rounding, and, where the reference rounds partial sums too, theirs. (The last sum's rounding
// is the one that both sides make.) A rounding is half an ULP at what the reference may have there,
// ours give or take the slack so far.
Slack SlackOfSum(const std::vector<const Product*>& terms, bool rounds_partial_sums) {
  Slack slack(terms.front()->value.size(), 0.0);
  for (size_t i = 0; i < slack.size(); ++i) {
    double sum = 0;
    for (const Product* term : terms) {
      slack[i] += term->slack[i] + Ulp(std::abs(term->value[i]) + term->slack[i]) / 2;
      sum += term->value[i];
      slack[i] += 2 * double(terms.size()) * kU * std::abs(term->value[i]);
      const bool partial = term != terms.front() && term != terms.back();
      if (partial && rounds_partial_sums) slack[i] += Ulp(std::abs(sum) + slack[i]) / 2;
    }
  }
  return slack;
}

// The terms added left to right in FP32, then rounded.
Values RoundedSum(const Recorded& r, const std::vector<const Product*>& terms) {
  Values sum = terms.front()->value;
  for (size_t t = 1; t < terms.size(); ++t) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += terms[t]->value[i];
  }
  return r.Rounded(sum);
}

TEST_P(Bf16Ops, SumsInFp32DifferByTheReferencesRoundingsAlone) {
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    const auto input_gradient = [&](const std::string& op, const char* weight) {
      const Values dy = r.Read(P + op + ".out.grad");
      const Values w = r.Weight(LayerTensorName(l, weight));
      const int64_t out = int64_t(dy.size()) / r.tokens();
      return r.Multiply(r.tokens(), r.hidden(), out, dy.data(), out, 1, w.data(), r.hidden(), 1,
                        Rounding::kNone);
    };
    const Product q = input_gradient("q_proj", "self_attn.q_proj.weight");
    const Product k = input_gradient("k_proj", "self_attn.k_proj.weight");
    const Product gate = input_gradient("gate_proj", "mlp.gate_proj.weight");
    const Product up = input_gradient("up_proj", "mlp.up_proj.weight");
    std::vector<const Product*> ours = {&q, &k}, theirs = {&k, &q};
    Product v;
    if (r.Has(P + "v_proj.in")) {
      v = input_gradient("v_proj", "self_attn.v_proj.weight");
      ours = {&q, &k, &v};
      theirs = {&v, &k, &q};  // autograd goes backwards
    }
    r.Expect(P + "qkv.in.grad", RoundedSum(r, ours), r.Read(P + "input_layernorm.out.grad"),
             SlackOfSum(theirs, true));
    r.Expect(P + "gate_up.in.grad", RoundedSum(r, {&gate, &up}),
             r.Read(P + "pre_feedforward_layernorm.out.grad"), SlackOfSum({&up, &gate}, true));
    // With the reference's roundings, its bits: nothing else is between the two.
    Values sum = r.Sum(r.Read(P + "up_proj.in.grad"), r.Read(P + "gate_proj.in.grad"));
    EXPECT_EQ(sum, r.Read(P + "pre_feedforward_layernorm.out.grad"));
    sum = r.Read(P + "k_proj.in.grad");
    if (r.Has(P + "v_proj.in")) sum = r.Sum(r.Read(P + "v_proj.in.grad"), sum);
    EXPECT_EQ(r.Sum(sum, r.Read(P + "q_proj.in.grad")), r.Read(P + "input_layernorm.out.grad"));
  });
}

TEST_P(Bf16Ops, KeyAndValueGradientsOfAGroupDifferByTheReferencesRoundingsAlone) {
  OnEveryLayer([](Recorded& r, int64_t l, const std::string& P) {
    const ModelRecipe& m = r.c.recipe.model;
    const int64_t S = r.c.batch.length, D = m.HeadDim(l), heads = m.query_heads;
    const Values q = r.Read(P + "q_rope.out"), p = r.Read(P + "probs"),
                 ds = r.Read(P + "scores.grad"), d_o = r.Read(P + "o_proj.in.grad"),
                 k_rep = r.Read(P + "k_rep.grad"), v_rep = r.Read(P + "v_rep.grad");
    const int64_t group = heads / m.KvHeads(l);
    for (const bool value : {false, true}) {
      const Values theirs = r.Read(P + (value ? "v_norm.out.grad" : "k_rope.out.grad"));
      const Values& left = value ? p : ds;
      const Values& right = value ? d_o : q;
      const Values& rep = value ? v_rep : k_rep;
      std::vector<Product> terms;  // of the group in hand
      HeadProducts all, from_heads;
      Values sum(S * D, 0.0f);
      ForEachHead(r, l, [&](const AttentionHead& h) {
        terms.push_back(r.Multiply(S, D, S, &left[h.square], 1, S, &right[h.q_offset], h.q_stride,
                                   1, Rounding::kNone));
        for (int64_t i = 0; i < S * D; ++i) sum[i] += rep[h.rep + i];
        if (int64_t(terms.size()) < group) return;
        std::vector<const Product*> list;
        for (const Product& term : terms) list.push_back(&term);
        all.Append({RoundedSum(r, list), SlackOfSum(list, false)}, &theirs[h.kv_offset], S, D,
                   h.kv_stride);
        from_heads.Append({r.Rounded(sum), Slack(S * D, 0.0)}, &theirs[h.kv_offset], S, D,
                          h.kv_stride);
        terms.clear();
        sum.assign(S * D, 0.0f);
      });
      const std::string name = value ? "v.grad" : "k.grad";
      r.Expect(P + name, all.ours, all.theirs, all.slack);
      r.Expect(P + name + " of their heads", from_heads.ours, from_heads.theirs);
    }
  });
}

TEST_P(Bf16Ops, TheTiedGradientDiffersByTheReferencesRoundingsAlone) {
  OnEveryIsa([](Recorded& r) {
    const int64_t T = r.tokens(), H = r.hidden(), V = r.c.recipe.model.vocab_size;
    const Values y = r.Read("head.in"), dz = r.Read("head.out.grad"), dx = r.Read("embed.out.grad");
    const float scale = math::RoundToBf16(static_cast<float>(math::Sqrt(double(H))));
    Product tied = r.Multiply(V, H, T, dz.data(), 1, V, y.data(), H, 1, Rounding::kNone);
    // The reference adds the looked-up rows among themselves and then to the head's product,
    // rounded itself; the partial sums of either order are below the sum of magnitudes.
    Values magnitude = tied.value;
    for (size_t i = 0; i < magnitude.size(); ++i) {
      magnitude[i] = std::abs(magnitude[i]);
      tied.slack[i] += Ulp(magnitude[i] + tied.slack[i]) / 2;
    }
    std::vector<int> seen(V);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t row = r.c.batch.ids[t];
      const bool again = seen[row]++ > 0;
      for (int64_t j = 0; j < H; ++j) {
        const int64_t i = row * H + j;
        magnitude[i] += std::abs(math::RoundToBf16(dx[t * H + j] * scale));
        tied.slack[i] += (again ? Ulp(magnitude[i]) / 2 : 0) + 4 * kU * magnitude[i];
      }
    }
    r.table.embed_backward({.dx_TN = dx.data(),
                            .ids_T = r.c.batch.ids.data(),
                            .dtable_VN = tied.value.data(),
                            .tokens = T,
                            .row_first = 0,
                            .rows = V,
                            .n = H,
                            .dropped = 0,
                            .scale = scale,
                            .round = Rounding::kBf16},
                           0, H);
    r.Expect("tied", r.Rounded(tied.value), r.Read("tied.weight.grad"), tied.slack);
  });
}

TEST(Bf16Comparison, SeesTwoUlps) {
  const Values theirs = {1.0f, -2.0f, 0.0f, 0x1p-126f};
  Values ours = theirs;
  EXPECT_EQ(Compare(ours, theirs).equal, 4);
  ours[0] = 1.0f + 0x1p-7f;
  EXPECT_EQ(Compare(ours, theirs).one, 1);
  ours[0] = 1.0f + 0x1p-6f;
  EXPECT_EQ(Compare(ours, theirs).beyond, 1);
  EXPECT_EQ(Compare(ours, theirs, Slack(4, 0x1p-9)).beyond, 1);
  EXPECT_EQ(Compare(ours, theirs, Slack(4, 0x1p-7)).cancelled, 1);
}

std::vector<std::string> RecordedDirectories() {
  std::vector<std::string> found;
  for (const std::string& directory : ParityDirectories()) {
    if (std::filesystem::exists(directory + "/bf16_ops.safetensors")) found.push_back(directory);
  }
  return found;
}

INSTANTIATE_TEST_SUITE_P(Configurations, Bf16Ops, testing::ValuesIn(RecordedDirectories()),
                         [](const auto& info) {
                           return std::filesystem::path(info.param).filename().string();
                         });

}  // namespace
}  // namespace retrace
