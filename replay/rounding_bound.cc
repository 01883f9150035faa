#include "replay/rounding_bound.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

namespace retrace {
namespace {

constexpr double kLambda = 4;
constexpr double kFewRoundings = 16;  // of elementwise ops: products, exp, tanh within some ULP
constexpr double kUnitFp32 = 0x1p-24, kUnitBf16 = 0x1p-9, kUnitFp64 = 0x1p-53, kUnitFp16 = 0x1p-11;

double UnitOf(TensorType type) {
  switch (type) {
    case TensorType::kF64: return kUnitFp64;
    case TensorType::kBf16: return kUnitBf16;
    case TensorType::kF16: return kUnitFp16;
    default: return kUnitFp32;
  }
}

double UnitOf(const WholeTrace& trace) {
  double unit = 0;
  for (const WholeTrace::Op& op : trace.ops()) {
    if (op.name.starts_with("mb") && op.has_elements) unit = std::max(unit, UnitOf(op.type));
  }
  if (!trace.trace().header().producer.starts_with("retrace ")) return unit;
  for (int i = 0; i < kNumPoints; ++i) {
    const auto point = static_cast<Point>(i);
    for (const Format format :
         {trace.recipe().precision.Forward(point), trace.recipe().precision.Gradient(point)}) {
      if (format == Format::kBf16) unit = std::max(unit, kUnitBf16);
    }
  }
  return unit;
}

double SquaresOf(const std::vector<double>& x, int64_t first, int64_t count) {
  double sum = 0;
  for (int64_t i = first; i < first + count; ++i) sum += x[i] * x[i];
  return sum;
}

}  // namespace

double UnitRoundoff(const WholeTrace& a, const WholeTrace& b) {
  return std::max(UnitOf(a), UnitOf(b));
}

// ---------------------------------------------------------------------------- magnitudes of inputs

double RoundingBound::Both::Magnitude(int64_t i) const {
  return std::max(std::fabs(a[i]), std::fabs(b[i]));
}

double RoundingBound::Both::Difference(int64_t i) const { return std::fabs(a[i] - b[i]); }

double RoundingBound::Both::Norm() const {
  return std::sqrt(std::max(SquaresOf(a, 0, std::ssize(a)), SquaresOf(b, 0, std::ssize(b))));
}

double RoundingBound::Both::Distance() const {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

double RoundingBound::Both::MaxRow(int64_t width) const {
  double most = 0;
  for (int64_t at = 0; at < std::ssize(a); at += width) {
    most = std::max({most, SquaresOf(a, at, width), SquaresOf(b, at, width)});
  }
  return std::sqrt(most);
}

double RoundingBound::Both::MaxRowDistance(int64_t width) const {
  double most = 0;
  for (int64_t at = 0; at < std::ssize(a); at += width) {
    double sum = 0;
    for (int64_t i = at; i < at + width; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    most = std::max(most, sum);
  }
  return std::sqrt(most);
}

RoundingBound::RoundingBound(const WholeTrace& a, const WholeTrace& b)
    : a_(a), b_(b), recipe_(a.recipe()), model_(recipe_.model), u_(UnitRoundoff(a, b)) {}

const RoundingBound::Both& RoundingBound::In(const std::string& name) {
  const auto [held, fresh] = held_.emplace(name, Both{});
  Both& both = held->second;
  if (!fresh) return both;
  const WholeTrace::Op *a = a_.Find(name), *b = b_.Find(name);
  if (a == nullptr || b == nullptr || !a->has_elements || !b->has_elements ||
      a->numel() != b->numel()) {
    missing_ = true;
    return both;
  }
  Result<std::vector<double>> x = a_.Read(*a), y = b_.Read(*b);
  if (!x.ok() || !y.ok()) {
    status_ = x.ok() ? y.status() : x.status();
    return both;
  }
  both = {std::move(x).value(), std::move(y).value(), a->rows, a->cols};
  return both;
}

std::string RoundingBound::LayerName(const Place& at, const std::string& op) const {
  return fmt::format("{}/layer{}/{}", at.batch, at.layer, op);
}

// The residual stream before the layer.
std::string RoundingBound::LayerInput(const Place& at) const {
  if (at.layer == 0) return at.batch + "/embedding";
  return fmt::format("{}/layer{}/output", at.batch, at.layer - 1);
}

RoundingBound::Weight RoundingBound::Norms(const std::string& tensor) {
  for (const WholeTrace* trace : {&a_, &b_}) {
    const WholeTrace::Op* op = trace->Find("state/" + tensor + "#p");
    if (op != nullptr && std::isfinite(op->l2) && std::isfinite(op->max)) return {op->l2, op->max};
  }
  missing_ = true;
  return {};
}

RoundingBound::Weight RoundingBound::LayerNorms(int64_t layer, const char* suffix) {
  return Norms(LayerTensorName(layer, suffix));
}

// --------------------------------------------------------------------------------- kinds of ops

double RoundingBound::Gamma(int64_t n) const {
  return kLambda * std::sqrt(static_cast<double>(std::max<int64_t>(n, 1))) * u_;
}

double RoundingBound::Identity(const Both& x) const { return x.Distance() + 2 * u_ * x.Norm(); }

// x W^T, sums of n terms.
double RoundingBound::Linear(const Both& x, double weight, int64_t n) const {
  return weight * (x.Distance() + (Gamma(n) + 2 * u_) * x.Norm());
}

// x / rms(x) * w: the Jacobian's norm is at most max|w| / rms; twice that for a change that is not
// infinitesimal, and never more than both outputs together.
double RoundingBound::RmsNorm(const Both& x, double weight_max, int64_t width) const {
  double sum = 0;
  const double n = static_cast<double>(width), whole = weight_max * std::sqrt(n);
  for (int64_t at = 0; at < std::ssize(x.a); at += width) {
    double distance = 0;
    for (int64_t i = at; i < at + width; ++i) distance += x.Difference(i) * x.Difference(i);
    const double squares = std::min(SquaresOf(x.a, at, width), SquaresOf(x.b, at, width));
    const double rms = std::sqrt(squares / n + model_.rms_norm_eps);
    const double row = std::min(2 * weight_max * std::sqrt(distance) / rms, 2 * whole) +
                       (Gamma(width) + kFewRoundings * u_) * whole;
    sum += row * row;
  }
  return std::sqrt(sum);
}

// r (w dy - xhat mean(xhat w dy)), r = 1 / rms(x): at most 2 r max|w| ||dy||, and relative to that as dy
// and x are.
double RoundingBound::RmsNormBackward(const Both& x, const Both& dy, double weight_max,
                                      int64_t width) const {
  double sum = 0;
  const double n = static_cast<double>(width);
  for (int64_t at = 0; at < std::min(std::ssize(x.a), std::ssize(dy.a)); at += width) {
    double dx = 0, ddy = 0;
    for (int64_t i = at; i < at + width; ++i) {
      dx += x.Difference(i) * x.Difference(i);
      ddy += dy.Difference(i) * dy.Difference(i);
    }
    const double squares = std::min(SquaresOf(x.a, at, width), SquaresOf(x.b, at, width));
    const double rms = std::sqrt(squares / n + model_.rms_norm_eps);
    const double norm =
        std::sqrt(std::max(SquaresOf(dy.a, at, width), SquaresOf(dy.b, at, width)));
    const double relative = std::min(1.0, std::sqrt(dx) / (rms * std::sqrt(n)));
    const double row = 2 * weight_max / rms *
                       (std::sqrt(ddy) +
                        norm * (3 * relative + Gamma(width) + kFewRoundings * u_));
    sum += row * row;
  }
  return std::sqrt(sum);
}

// Angles are FP32 in some implementations: position * frequency is off by as much as u of FP32 times
// the position.
double RoundingBound::RopeRounding(const Both& x) const {
  const double angle = static_cast<double>(recipe_.data.sequence_length) * 2 * kUnitFp32;
  return x.MaxRow(1) * std::sqrt(static_cast<double>(x.a.size())) * (angle + kFewRoundings * u_);
}

// How far a score may be off: what probabilities are off by, relative, is twice that.
double RoundingBound::ScoreShift(const Place& at) {
  const int64_t dim = model_.HeadDim(at.layer);
  const Both &q = InLayer(at, "q_rope"), &k = InLayer(at, "k_rope");
  const double most = q.MaxRow(dim) * k.MaxRow(dim);
  return std::fabs(model_.attention_scale) *
         (q.MaxRowDistance(dim) * k.MaxRow(dim) + q.MaxRow(dim) * k.MaxRowDistance(dim) +
          (Gamma(dim) + kFewRoundings * u_) * most);
}

// ---------------------------------------------------------------------------------------- forward

double RoundingBound::ForwardAttention(const Place& at) {
  const int64_t dim = model_.HeadDim(at.layer), H = model_.hidden_size;
  const auto weight = [&](const char* name) {
    return LayerNorms(at.layer, (std::string("self_attn.") + name + ".weight").c_str());
  };
  if (at.op == "q_proj" || at.op == "k_proj" || at.op == "v_proj") {
    return Linear(InLayer(at, "input_norm"), weight(at.op.c_str()).frobenius, H);
  }
  if (at.op == "q_rope" || at.op == "k_rope") {
    const bool q = at.op[0] == 'q';
    const Both& x = InLayer(at, q ? "q_proj" : "k_proj");
    const double rounding = RopeRounding(InLayer(at, at.op));
    if (!model_.AppliesQkNorm()) return x.Distance() + rounding;
    const double w = weight(q ? "q_norm" : "k_norm").max * std::fabs(model_.qk_norm_gain);
    return RmsNorm(x, w, dim) + rounding;
  }
  if (at.op == "v_norm") {
    const Both& x = InLayer(at, model_.HasValueProjection(at.layer) ? "v_proj" : "k_proj");
    return model_.v_norm ? RmsNorm(x, 1, dim) : Identity(x);
  }
  if (at.op == "attention") {
    const Both& v = InLayer(at, "v_norm");
    const double rows = static_cast<double>(InLayer(at, "q_rope").a.size()) / static_cast<double>(dim);
    const double shift = std::min(2.0, std::expm1(2 * ScoreShift(at)));
    const double row = (shift + Gamma(recipe_.data.sequence_length) + kFewRoundings * u_) *
                           v.MaxRow(dim) +
                       v.MaxRowDistance(dim);
    return std::sqrt(rows) * row;
  }
  if (at.op == "o_proj") {
    return Linear(InLayer(at, "attention"), weight("o_proj").frobenius, model_.query_heads * dim);
  }
  if (at.op == "post_attention_norm") {
    return RmsNorm(InLayer(at, "o_proj"),
                   LayerNorms(at.layer, "post_attention_layernorm.weight").max, H);
  }
  const Both& branch =
      InLayer(at, model_.AppliesPostNorm() ? "post_attention_norm" : "o_proj");
  return Identity(In(LayerInput(at))) + Identity(branch);  // residual_attention
}

double RoundingBound::ForwardMlp(const Place& at) {
  const int64_t H = model_.hidden_size;
  if (at.op == "pre_mlp_norm") {
    const Both& x = InLayer(at, "residual_attention");
    if (!model_.AppliesPreNorm()) return Identity(x);
    return RmsNorm(x, LayerNorms(at.layer, "pre_feedforward_layernorm.weight").max, H);
  }
  if (at.op == "gate_proj" || at.op == "up_proj") {
    return Linear(InLayer(at, "pre_mlp_norm"),
                  LayerNorms(at.layer, ("mlp." + at.op + ".weight").c_str()).frobenius, H);
  }
  if (at.op == "geglu") {  // |gelu(g)| <= |g|, |gelu'| < 1.2
    const Both &g = InLayer(at, "gate_proj"), &up = InLayer(at, "up_proj");
    double sum = 0;
    for (int64_t i = 0; i < std::min(std::ssize(g.a), std::ssize(up.a)); ++i) {
      const double e = 1.2 * up.Magnitude(i) * g.Difference(i) +
                       g.Magnitude(i) * up.Difference(i) +
                       kFewRoundings * u_ * g.Magnitude(i) * up.Magnitude(i);
      sum += e * e;
    }
    return std::sqrt(sum);
  }
  if (at.op == "down_proj") {
    return Linear(InLayer(at, "geglu"), LayerNorms(at.layer, "mlp.down_proj.weight").frobenius,
                  model_.intermediate_size);
  }
  if (at.op == "post_mlp_norm") {
    return RmsNorm(InLayer(at, "down_proj"),
                   LayerNorms(at.layer, "post_feedforward_layernorm.weight").max, H);
  }
  const Both& branch = InLayer(at, model_.AppliesPostNorm() ? "post_mlp_norm" : "down_proj");
  return std::fabs(model_.layer_scalar[at.layer]) *  // output
         (Identity(InLayer(at, "residual_attention")) + Identity(branch) +
          4 * u_ * InLayer(at, "residual_attention").Norm());
}

std::string HeadTensor(const ModelRecipe& model) {
  return model.tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
}

double RoundingBound::ForwardHead(const Place& at) {
  const int64_t H = model_.hidden_size;
  if (at.op == "ids" || at.op == "labels") return 0;
  if (at.op == "embedding") return 4 * u_ * In(at.batch + "/embedding").Norm();
  if (at.op == "final_norm") {
    return RmsNorm(In(fmt::format("{}/layer{}/output", at.batch, model_.layers - 1)),
                   Norms("model.norm.weight").max, H);
  }
  const Both& z = In(at.batch + "/logits");
  if (at.op == "logits") {  // |d softcap| <= 1
    return Linear(In(at.batch + "/final_norm"), Norms(HeadTensor(model_)).frobenius, H) +
           kFewRoundings * u_ * z.Norm();
  }
  double sum = 0;  // loss, or logsumexp: off by at most twice what a logit is off by
  for (int64_t row = 0; row < z.rows; ++row) {
    double most = 0, shift = 0;
    for (int64_t i = row * z.cols; i < (row + 1) * z.cols; ++i) {
      most = std::max(most, z.Magnitude(i));
      shift = std::max(shift, z.Difference(i));
    }
    const double e = 2 * shift + Gamma(z.cols) +
                     kFewRoundings * u_ * (2 * most + std::log(static_cast<double>(z.cols)));
    sum += e * e;
  }
  return std::sqrt(sum);
}

double RoundingBound::Forward(const Place& at) {
  if (at.layer < 0) return ForwardHead(at);
  if (at.op == "input_norm") {
    const Both& x = In(LayerInput(at));
    if (!model_.AppliesPreNorm()) return Identity(x);
    return RmsNorm(x, LayerNorms(at.layer, "input_layernorm.weight").max, model_.hidden_size);
  }
  for (const char* op : {"pre_mlp_norm", "gate_proj", "up_proj", "geglu", "down_proj",
                         "post_mlp_norm", "output"}) {
    if (at.op == op) return ForwardMlp(at);
  }
  return ForwardAttention(at);
}

// --------------------------------------------------------------------------------------- backward

double RoundingBound::BackwardHead(const Place& at) {
  const Both& z = In(at.batch + "/logits");
  if (at.op == "final_norm") {
    return Linear(In(at.batch + "/logits.grad"), Norms(HeadTensor(model_)).frobenius,
                  model_.vocab_size);
  }
  if (at.op == "embedding") return ResidualBackward(at, 0);
  // logits: (p - 1 at the label) / N * (1 - (z / cap)^2), p off by as much as twice a logit, relative.
  const double cap = model_.final_logit_softcapping;
  const double tokens = static_cast<double>(z.rows) * static_cast<double>(recipe_.data.micro_batches);
  double sum = 0;
  for (int64_t row = 0; row < z.rows; ++row) {
    double shift = 0;
    for (int64_t i = row * z.cols; i < (row + 1) * z.cols; ++i) {
      shift = std::max(shift, z.Difference(i));
    }
    const double e = std::expm1(2 * std::min(shift, 1.0)) + (cap > 0 ? 2 * shift / cap : 0) +
                     Gamma(z.cols) + kFewRoundings * u_;
    sum += 2 * e * e;
  }
  return std::sqrt(sum) / tokens;
}

// The gradient of layer `layer`'s input: that of the residual stream within it, and what comes through
// attention.
double RoundingBound::ResidualBackward(const Place& at, int64_t layer) {
  const Place inside = {at.batch, layer, ""};
  const Both& dy = InLayer(inside, "input_norm.grad");
  const Both& stream = InLayer(inside, "residual_attention.grad");
  if (!model_.AppliesPreNorm()) return Identity(stream) + Identity(dy);
  return Identity(stream) +
         RmsNormBackward(In(LayerInput(inside)), dy,
                         LayerNorms(layer, "input_layernorm.weight").max, model_.hidden_size);
}

double RoundingBound::BackwardMlp(const Place& at) {
  const int64_t H = model_.hidden_size;
  const double scalar = std::fabs(model_.layer_scalar[at.layer]);
  if (at.op == "down_proj") {
    const Both& dy = InLayer(at, "output.grad");
    if (!model_.AppliesPostNorm()) return scalar * Identity(dy);
    return scalar * RmsNormBackward(InLayer(at, "down_proj"), dy,
                                    LayerNorms(at.layer, "post_feedforward_layernorm.weight").max, H);
  }
  if (at.op == "geglu") {
    return Linear(InLayer(at, "down_proj.grad"),
                  LayerNorms(at.layer, "mlp.down_proj.weight").frobenius, H);
  }
  if (at.op == "pre_mlp_norm") {
    return Linear(InLayer(at, "gate_proj.grad"),
                  LayerNorms(at.layer, "mlp.gate_proj.weight").frobenius, model_.intermediate_size) +
           Linear(InLayer(at, "up_proj.grad"), LayerNorms(at.layer, "mlp.up_proj.weight").frobenius,
                  model_.intermediate_size);
  }
  if (at.op == "residual_attention") {
    const Both& dy = InLayer(at, "pre_mlp_norm.grad");
    const double stream = scalar * Identity(InLayer(at, "output.grad"));
    if (!model_.AppliesPreNorm()) return stream + Identity(dy);
    return stream +
           RmsNormBackward(InLayer(at, "residual_attention"), dy,
                           LayerNorms(at.layer, "pre_feedforward_layernorm.weight").max, H);
  }
  // gate_proj: da up gelu'(gate); up_proj: da gelu(gate). |gelu''| < 1.2.
  const Both &g = InLayer(at, "gate_proj"), &up = InLayer(at, "up_proj");
  const Both& da = InLayer(at, "geglu.grad");
  const bool gate = at.op == "gate_proj";
  double sum = 0;
  for (int64_t i = 0; i < std::min({std::ssize(g.a), std::ssize(up.a), std::ssize(da.a)}); ++i) {
    const double other = gate ? up.Magnitude(i) : g.Magnitude(i);
    double e = 1.2 * other * da.Difference(i) + kFewRoundings * u_ * other * da.Magnitude(i);
    e += gate ? 1.2 * da.Magnitude(i) * (up.Difference(i) + up.Magnitude(i) * g.Difference(i))
              : 1.2 * da.Magnitude(i) * g.Difference(i);
    sum += e * e;
  }
  return std::sqrt(sum);
}

// dS = P (dP - D), dP = dO V^T: |dS| <= 2 P |dO| |V|, and relative to that as its factors are.
double RoundingBound::BackwardAttention(const Place& at) {
  const int64_t dim = model_.HeadDim(at.layer), length = recipe_.data.sequence_length;
  const Both& dout = InLayer(at, "attention.grad");
  const Both &q = InLayer(at, "q_rope"), &k = InLayer(at, "k_rope"), &v = InLayer(at, "v_norm");
  const double shift = std::min(2.0, std::expm1(2 * ScoreShift(at)));
  const double group = static_cast<double>(model_.query_heads / model_.KvHeads(at.layer));
  // Columns of P sum to at most the number of queries that see a key.
  const double spread = std::sqrt(static_cast<double>(length) * group);
  const double rounding = Gamma(length * model_.query_heads) + Gamma(dim) + kFewRoundings * u_;
  // What many queries add to one key: their roundings are independent, differences of dO may not be.
  if (at.op == "v_norm") return spread * dout.Distance() + dout.Norm() * (shift + rounding);
  const auto relative = [&](const Both& x) {
    const double most = x.MaxRow(dim);
    return most > 0 ? x.MaxRowDistance(dim) / most : 0;
  };
  const Both& other = at.op == "q_rope" ? k : q;
  const double factor = 4 * std::fabs(model_.attention_scale) * other.MaxRow(dim) * v.MaxRow(dim);
  return factor * ((at.op == "q_rope" ? 1 : spread) *
                       (dout.Distance() + dout.Norm() * relative(v)) +
                   dout.Norm() * (shift + relative(other) + rounding));
}

double RoundingBound::BackwardQkv(const Place& at) {
  const int64_t dim = model_.HeadDim(at.layer);
  const bool own_v = model_.HasValueProjection(at.layer);
  const auto through_v = [&](const char* projection) {
    const Both& dy = InLayer(at, "v_norm.grad");
    return model_.v_norm ? RmsNormBackward(InLayer(at, projection), dy, 1, dim) : Identity(dy);
  };
  if (at.op == "v_proj") return through_v("v_proj");
  const bool q = at.op == "q_proj";
  const Both& dy = InLayer(at, q ? "q_rope.grad" : "k_rope.grad");
  const double w = !model_.AppliesQkNorm()
                       ? 1
                       : LayerNorms(at.layer, q ? "self_attn.q_norm.weight"
                                                : "self_attn.k_norm.weight").max *
                             std::fabs(model_.qk_norm_gain);
  double bound = dy.Distance();
  if (model_.AppliesQkNorm()) bound = RmsNormBackward(InLayer(at, at.op), dy, w, dim);
  // The rotation's rounding goes through the norm: 1 / rms of the smallest row.
  const Both& x = InLayer(at, at.op);
  double least = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < std::ssize(x.a); i += dim) {
    least = std::min({least, SquaresOf(x.a, i, dim), SquaresOf(x.b, i, dim)});
  }
  const double rms = std::sqrt(least / static_cast<double>(dim) + model_.rms_norm_eps);
  const double angle = static_cast<double>(recipe_.data.sequence_length) * 2 * kUnitFp32;
  bound += dy.Norm() * (angle + kFewRoundings * u_) * (model_.AppliesQkNorm() ? 2 * w / rms : 1);
  return q || own_v ? bound : bound + through_v("k_proj");
}

double RoundingBound::Backward(const Place& at) {
  if (at.layer < 0) return BackwardHead(at);
  const int64_t H = model_.hidden_size;
  if (at.op == "output") {
    if (at.layer + 1 < model_.layers) return ResidualBackward(at, at.layer + 1);
    return RmsNormBackward(InLayer(at, "output"), In(at.batch + "/final_norm.grad"),
                           Norms("model.norm.weight").max, H);
  }
  if (at.op == "o_proj") {
    const Both& dy = InLayer(at, "residual_attention.grad");
    if (!model_.AppliesPostNorm()) return Identity(dy);
    return RmsNormBackward(InLayer(at, "o_proj"), dy,
                           LayerNorms(at.layer, "post_attention_layernorm.weight").max, H);
  }
  if (at.op == "attention") {
    return Linear(InLayer(at, "o_proj.grad"),
                  LayerNorms(at.layer, "self_attn.o_proj.weight").frobenius, H);
  }
  if (at.op == "q_rope" || at.op == "k_rope" || at.op == "v_norm") return BackwardAttention(at);
  if (at.op == "q_proj" || at.op == "k_proj" || at.op == "v_proj") return BackwardQkv(at);
  if (at.op != "input_norm") return BackwardMlp(at);
  double bound = 0;
  for (const char* projection : {"q_proj", "k_proj", "v_proj"}) {
    if (projection[0] == 'v' && !model_.HasValueProjection(at.layer)) continue;
    const Both& dy = InLayer(at, std::string(projection) + ".grad");
    bound += Linear(dy, LayerNorms(at.layer, ("self_attn." + std::string(projection) + ".weight")
                                                 .c_str()).frobenius, dy.cols);
  }
  return bound;
}

// ------------------------------------------------------------------------- gradients of parameters

// dy^T x, sums over tokens.
double OuterBound(double x, double dx, double dy, double ddy, double gamma) {
  return dy * dx + ddy * x + gamma * dy * x;
}

// The sum over rows of dy xhat.
double RoundingBound::NormGradient(const Both& x, const Both& dy, int64_t width) const {
  const double n = static_cast<double>(width);
  double hat = 0, relative = 0;  // ||xhat||_F, and how far it is off
  for (int64_t at = 0; at < std::ssize(x.a); at += width) {
    double dx = 0;
    for (int64_t i = at; i < at + width; ++i) dx += x.Difference(i) * x.Difference(i);
    const double squares = std::min(SquaresOf(x.a, at, width), SquaresOf(x.b, at, width));
    const double rms2 = squares / n + model_.rms_norm_eps;
    hat += n;
    relative += std::min(4 * n, 4 * dx / rms2);
  }
  const int64_t rows = width == 0 ? 0 : std::ssize(x.a) / width;
  return OuterBound(std::sqrt(hat), std::sqrt(relative), dy.Norm(), dy.Distance(),
                    Gamma(rows) + kFewRoundings * u_);
}

double RoundingBound::ProjectionGradient(const Place& at, const std::string& kind) {
  const char* input = kind == "down_proj" ? "geglu"
                      : kind == "o_proj"  ? "attention"
                      : kind == "gate_proj" || kind == "up_proj" ? "pre_mlp_norm" : "input_norm";
  const Both &x = InLayer(at, input), &dy = InLayer(at, kind + ".grad");
  return OuterBound(x.Norm(), x.Distance(), dy.Norm(), dy.Distance(), Gamma(x.rows) + 4 * u_);
}

double RoundingBound::Parameter(const std::string& batch, const std::string& tensor) {
  const int64_t H = model_.hidden_size;
  const std::string last = fmt::format("{}/layer{}/output", batch, model_.layers - 1);
  if (tensor == "model.norm.weight") {
    return NormGradient(In(last), In(batch + "/final_norm.grad"), H);
  }
  if (tensor == "model.embed_tokens.weight" || tensor == "lm_head.weight") {
    double bound = 0;
    if (tensor == HeadTensor(model_)) {
      const Both &x = In(batch + "/final_norm"), &dy = In(batch + "/logits.grad");
      bound += OuterBound(x.Norm(), x.Distance(), dy.Norm(), dy.Distance(), Gamma(x.rows) + 4 * u_);
    }
    if (tensor == "lm_head.weight") return bound;
    const Both& dx = In(batch + "/embedding.grad");  // a token's rows are added, all tokens' at most
    const double scale = model_.embed_scale ? std::sqrt(static_cast<double>(H)) : 1;
    const double spread = std::sqrt(static_cast<double>(std::max<int64_t>(dx.rows, 1)));
    return bound + scale * spread * (dx.Distance() + (Gamma(dx.rows) + 4 * u_) * dx.Norm());
  }
  Place at = {batch, -1, ""};
  const size_t begin = sizeof("model.layers.") - 1;
  const char* end = tensor.data() + tensor.size();
  const auto [behind, error] = std::from_chars(tensor.data() + begin, end, at.layer);
  if (!tensor.starts_with("model.layers.") || error != std::errc()) {
    missing_ = true;
    return 0;
  }
  const std::string suffix(behind + 1, end);
  const auto qk_norm = [&](const char* projection, const char* gradient) {
    const Both& dy = InLayer(at, gradient);  // turned back before it meets the norm
    const double angle = static_cast<double>(recipe_.data.sequence_length) * 2 * kUnitFp32;
    return std::max(1.0, std::fabs(model_.qk_norm_gain)) *
           (NormGradient(InLayer(at, projection), dy, model_.HeadDim(at.layer)) +
            std::sqrt(static_cast<double>(dy.a.size())) * dy.Norm() * angle);
  };
  if (suffix == "input_layernorm.weight") {
    return NormGradient(In(LayerInput(at)), InLayer(at, "input_norm.grad"), H);
  }
  if (suffix == "post_attention_layernorm.weight") {
    return NormGradient(InLayer(at, "o_proj"), InLayer(at, "residual_attention.grad"), H);
  }
  if (suffix == "pre_feedforward_layernorm.weight") {
    return NormGradient(InLayer(at, "residual_attention"), InLayer(at, "pre_mlp_norm.grad"), H);
  }
  if (suffix == "post_feedforward_layernorm.weight") {
    return std::max(1.0, std::fabs(model_.layer_scalar[at.layer])) *
           NormGradient(InLayer(at, "down_proj"), InLayer(at, "output.grad"), H);
  }
  if (suffix == "self_attn.q_norm.weight") {
    return qk_norm("q_proj", "q_rope.grad");
  }
  if (suffix == "self_attn.k_norm.weight") {
    return qk_norm("k_proj", "k_rope.grad");
  }
  const std::string kind = suffix.substr(suffix.find('.') + 1);  // "q_proj.weight"
  return ProjectionGradient(at, kind.substr(0, kind.find('.')));
}

// ------------------------------------------------------------------------------------------------

Result<std::optional<double>> RoundingBound::Of(const std::string& op) {
  held_.clear();
  missing_ = false;
  const size_t slash = op.find('/');
  if (slash == std::string::npos || op.starts_with("optimizer/") || op.starts_with("state/") ||
      op.find('@') != std::string::npos) {
    return std::optional<double>();
  }
  Place at = {op.substr(0, slash), -1, op.substr(slash + 1)};
  double bound = 0;
  const bool gradient = at.op.ends_with(".grad");
  if (gradient) at.op.resize(at.op.size() - 5);
  if (gradient && (at.op.starts_with("model.") || at.op.starts_with("lm_head"))) {
    bound = Parameter(at.batch, at.op);
  } else {
    if (at.op.starts_with("layer")) {
      const size_t behind = at.op.find('/');
      const char* first = at.op.data() + 5;
      const auto [end, error] = std::from_chars(first, at.op.data() + at.op.size(), at.layer);
      if (error != std::errc() || behind == std::string::npos || at.layer >= model_.layers) {
        return std::optional<double>();
      }
      at.op = at.op.substr(behind + 1);
    }
    bound = gradient ? Backward(at) : Forward(at);
  }
  RT_RETURN_IF_ERROR(status_);
  return missing_ ? std::optional<double>() : std::optional<double>(bound);
}

}  // namespace retrace
