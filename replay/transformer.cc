#include "replay/transformer.h"

#include <cmath>
#include <type_traits>

#include "core/scalar_math.h"
#include "replay/step_loss.h"

namespace retrace {
namespace {

Rounding RoundingOf(Format format) {
  return format == Format::kBf16 ? Rounding::kBf16 : Rounding::kNone;
}

template <class T>
std::vector<T*> Pointers(std::vector<ComputeVector<T>>& buffers) {
  std::vector<T*> pointers;
  for (ComputeVector<T>& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

template <class T>
void ResizeAll(std::vector<ComputeVector<T>>* buffers, size_t count, int64_t numel) {
  buffers->resize(count);
  for (ComputeVector<T>& buffer : *buffers) {
    buffer.reserve(numel);  // exactly: resize() alone would double a buffer that has to grow a bit
    buffer.resize(numel);
  }
}

}  // namespace

template <class T>
Transformer<T>::Transformer(const Recipe& recipe, const ParameterMap& map, Engine& engine,
                            ShardTree& tree)
    : recipe_(recipe),
      model_(recipe.model),
      map_(map),
      engine_(engine),
      tree_(tree),
      ops_(engine.ops<T>()) {
  FindTensors();
  if (model_.embed_scale) {
    embed_scale_ = static_cast<T>(math::Sqrt(static_cast<double>(model_.hidden_size)));
    if (model_.embed_scale_rounding == EmbedScaleRounding::kBf16) {
      embed_scale_ = math::RoundToBf16(static_cast<float>(embed_scale_));
    }
  }
  x_.resize(model_.layers + 1);
  saved_.resize(recipe.execution.recompute_activations ? 1 : model_.layers);
}

template <class T>
void Transformer<T>::FindTensors() {
  const Layout& layout = map_.layout();
  embedding_ = layout.Find("model.embed_tokens.weight");
  head_ = model_.tie_word_embeddings ? embedding_ : layout.Find("lm_head.weight");
  final_norm_tensor_ = layout.Find("model.norm.weight");
  for (int64_t l = 0; l < model_.layers; ++l) {
    const auto find = [&](const char* suffix) { return layout.Find(LayerTensorName(l, suffix)); };
    tensors_.push_back({.input_norm = find("input_layernorm.weight"),
                        .post_attention_norm = find("post_attention_layernorm.weight"),
                        .pre_mlp_norm = find("pre_feedforward_layernorm.weight"),
                        .post_mlp_norm = find("post_feedforward_layernorm.weight"),
                        .q_norm = find("self_attn.q_norm.weight"),
                        .k_norm = find("self_attn.k_norm.weight"),
                        .q = find("self_attn.q_proj.weight"),
                        .k = find("self_attn.k_proj.weight"),
                        .v = find("self_attn.v_proj.weight"),
                        .o = find("self_attn.o_proj.weight"),
                        .gate = find("mlp.gate_proj.weight"),
                        .up = find("mlp.up_proj.weight"),
                        .down = find("mlp.down_proj.weight")});
  }
}

// cos and sin of position * theta^(-2i/dim) for the first floor(partial*dim/2) pairs, of 0 for the
// rest: in FP64, rounded once (clause 2), or with the angle in FP32 as the public code has it.
template <class T>
typename Transformer<T>::RopeTable Transformer<T>::MakeRope(int64_t dim, double theta,
                                                            double partial, int64_t length) const {
  const int64_t half = dim / 2;
  const int64_t rotated = static_cast<int64_t>(partial * static_cast<double>(dim) / 2.0);
  RopeTable table{Buffer(length * half), Buffer(length * half)};
  const bool bf16 = Forward(Point::kRope) == Rounding::kBf16;
  for (int64_t i = 0; i < half; ++i) {
    const double frequency =
        i < rotated ? math::Pow(theta, -(2.0 * static_cast<double>(i)) / static_cast<double>(dim))
                    : 0.0;
    for (int64_t s = 0; s < length; ++s) {
      const double angle = model_.rope_angle_fp32
                               ? static_cast<float>(s) * static_cast<float>(frequency)
                               : static_cast<double>(s) * frequency;
      T cos = static_cast<T>(math::Cos(angle)), sin = static_cast<T>(math::Sin(angle));
      if (bf16) {
        cos = math::RoundToBf16(static_cast<float>(cos));
        sin = math::RoundToBf16(static_cast<float>(sin));
      }
      table.cos[s * half + i] = cos;
      table.sin[s * half + i] = sin;
    }
  }
  return table;
}

template <class T>
void Transformer<T>::ReserveRope(int64_t length) {
  if (length <= rope_length_) return;
  rope_length_ = length;
  rope_sliding_ = MakeRope(model_.head_dim, model_.sliding_rope_theta, 1.0, length);
  rope_full_ = MakeRope(model_.global_head_dim, model_.full_rope_theta,
                        model_.full_partial_rotary_factor, length);
}

// ---------------------------------------------------------------------------------------- lookups

template <class T>
Rounding Transformer<T>::Forward(Point point) const {
  return RoundingOf(recipe_.precision.Forward(point));
}

template <class T>
Rounding Transformer<T>::Backward(Point point) const {
  return RoundingOf(recipe_.precision.Gradient(point));
}

template <class T>
const T* Transformer<T>::Weight(int local, int tensor) const {
  const ParameterMap::Place place = map_.Find(map_.first_shard() + local, tensor);
  return weights_[place.slab] + place.offset;
}

template <class T>
T* Transformer<T>::Gradient(int local, int tensor) const {
  const ParameterMap::Place place = map_.Find(map_.first_shard() + local, tensor);
  return gradients_[place.slab] + place.offset;
}

template <class T>
bool Transformer<T>::IsOwner(int local, int tensor) const {
  const int shard = map_.first_shard() + local;
  return map_.Owner(shard, tensor) == shard;
}

template <class T>
bool Transformer<T>::OwnsLocally(int local, int tensor) const {
  const int shard = map_.first_shard() + local;
  return local == 0 || map_.Owner(shard - 1, tensor) != map_.Owner(shard, tensor);
}

template <class T>
typename Transformer<T>::Shape Transformer<T>::ShapeOf(int64_t l) const {
  const int64_t V = map_.layout().shards();
  return {.dim = model_.HeadDim(l),
          .query_heads = model_.query_heads / V,
          .kv_heads = std::max<int64_t>(1, model_.KvHeads(l) / V),
          .window = model_.IsFull(l) || model_.ignore_window ? 0 : model_.sliding_window};
}

template <class T>
AttentionConfig<T> Transformer<T>::Attention(int64_t l) const {
  const Shape shape = ShapeOf(l);
  return {.kind = model_.attention,
          .sequences = sequences_,
          .length = length_,
          .query_heads = shape.query_heads,
          .kv_heads = shape.kv_heads,
          .dim = shape.dim,
          .window = shape.window,
          .scale = static_cast<T>(model_.attention_scale),
          .scores = Forward(Point::kScores),
          .softmax = Forward(Point::kSoftmax),
          .output = Forward(Point::kAttention),
          .grad_scores = Backward(Point::kScores),
          .grad_softmax = Backward(Point::kSoftmax),
          .grad_query = Backward(Point::kRope)};
}

// A buffer of the public implementation's model, so it has the type of the weights' compute copy.
template <class T>
T Transformer<T>::LayerScalar(int64_t l) const {
  const T scalar = static_cast<T>(model_.layer_scalar[l]);
  if (Forward(Point::kWeights) == Rounding::kNone) return scalar;
  return math::RoundToBf16(static_cast<float>(scalar));
}

template <class T>
void Transformer<T>::Emit(const std::string& op, const T* data, int64_t rows, int64_t cols) {
  if (!probe_) return;
  engine_.Sync();
  probe_->Op(name_ + "/" + op, data, rows, cols);
}

template <class T>
void Transformer<T>::EmitLayer(int64_t l, const std::string& op, const T* data, int64_t rows,
                               int64_t cols) {
  if (probe_) Emit("layer" + std::to_string(l) + "/" + op, data, rows, cols);
}

template <class T>
void Transformer<T>::EmitShards(const std::string& op, const ShardBuffers& buffers, int64_t cols) {
  if (!probe_) return;
  for (int i = 0; i < shards(); ++i) {
    Emit(op + "/shard" + std::to_string(map_.first_shard() + i), buffers[i].data(),
         static_cast<int64_t>(buffers[i].size()) / cols, cols);
  }
}

template <class T>
void Transformer<T>::EmitOwners(const std::string& op, const ShardBuffers& buffers, int64_t cols,
                                int tensor) {
  for (int i = 0; probe_ && i < shards(); ++i) {
    if (!IsOwner(i, tensor)) continue;
    Emit(op + "/shard" + std::to_string(map_.first_shard() + i), buffers[i].data(),
         static_cast<int64_t>(buffers[i].size()) / cols, cols);
  }
}

// -------------------------------------------------------------------------------- products, norms

// y = x W^T
template <class T>
GemmArgs<T> Transformer<T>::Linear(const T* x, int local, int tensor, T* y, Point point) const {
  const ParameterMap::Place w = map_.Find(map_.first_shard() + local, tensor);
  return {.m = tokens_, .n = w.rows, .k = w.cols, .a = x, .a_row_stride = w.cols,
          .a_col_stride = 1, .b = Weight(local, tensor), .b_row_stride = 1,
          .b_col_stride = w.cols, .c = y, .c_row_stride = w.rows, .round = Forward(point)};
}

// dx = dy W
template <class T>
GemmArgs<T> Transformer<T>::InputGradient(const T* dy, int local, int tensor, T* dx,
                                          Rounding round) const {
  const ParameterMap::Place w = map_.Find(map_.first_shard() + local, tensor);
  return {.m = tokens_, .n = w.cols, .k = w.rows, .a = dy, .a_row_stride = w.rows,
          .a_col_stride = 1, .b = Weight(local, tensor), .b_row_stride = w.cols,
          .b_col_stride = 1, .c = dx, .c_row_stride = w.cols, .round = round};
}

// dW = dy^T x
template <class T>
GemmArgs<T> Transformer<T>::WeightGradient(const T* dy, const T* x, int local, int tensor) const {
  const ParameterMap::Place w = map_.Find(map_.first_shard() + local, tensor);
  return {.m = w.rows, .n = w.cols, .k = tokens_, .a = dy, .a_row_stride = 1,
          .a_col_stride = w.rows, .b = x, .b_row_stride = w.cols, .b_col_stride = 1,
          .c = Gradient(local, tensor), .c_row_stride = w.cols,
          .round = Backward(Point::kWeights)};
}

template <class T>
Status Transformer<T>::SumPartials(Buffer* out, int64_t n, Rounding round) {
  RT_RETURN_IF_ERROR(
      tree_.Sum(Pointers(partial_), n, RoundingOf(recipe_.precision.partials), round));
  std::swap(*out, partial_[0]);
  return {};
}

template <class T>
Status Transformer<T>::SummedInputGradient(const std::vector<Term>& terms, Buffer* dx,
                                           Rounding round) {
  const int64_t n = tokens_ * model_.hidden_size;
  ResizeAll(&partial_, shards(), n);
  for (const Term& term : terms) {
    std::vector<GemmArgs<T>> products;
    for (int i = 0; i < shards(); ++i) {
      if (!IsOwner(i, term.tensor)) continue;
      products.push_back(InputGradient((*term.dy)[i].data(), i, term.tensor, partial_[i].data(),
                                       Rounding::kNone));
      products.back().add = &term != &terms.front();
    }
    engine_.MultiplyBatch<T>(products);
  }
  return SumPartials(dx, n, round);
}

template <class T>
void Transformer<T>::Norm(const Buffer& x, int tensor, Buffer* y, Buffer* r, int64_t rows,
                          int64_t n, Point point) {
  y->resize(rows * n);
  r->resize(rows);
  const RmsNormArgs<T> args = {.x_RN = x.data(),
                               .w_N = tensor >= 0 ? Weight(0, tensor) : nullptr,
                               .y_RN = y->data(),
                               .r_R = r->data(),
                               .n = n,
                               .eps = static_cast<T>(model_.rms_norm_eps),
                               .round = Forward(point)};
  engine_.Run(&OpTable<T>::rms_norm, args, rows, 2 * n);
}

template <class T>
void Transformer<T>::NormBackward(const T* x, const Buffer& r, int tensor, const T* dy, T* dx,
                                  int64_t rows, int64_t n, Rounding round) {
  const RmsNormBackwardArgs<T> args = {.x_RN = x,
                                       .w_N = tensor >= 0 ? Weight(0, tensor) : nullptr,
                                       .r_R = r.data(),
                                       .dy_RN = dy,
                                       .dx_RN = dx,
                                       .n = n,
                                       .round = round};
  engine_.Run(ops_.rms_norm_backward, args, rows, 3 * n);
}

template <class T>
void Transformer<T>::NormWeight(const T* x, const Buffer& r, const T* dy, T* dw, int64_t rows,
                                int64_t n) {
  const RmsNormWeightArgs<T> args = {.x_RN = x, .r_R = r.data(), .dy_RN = dy, .dw_N = dw,
                                     .rows = rows, .n = n};
  engine_.Run(ops_.rms_norm_weight, args, n, rows, 16);
}

// A hidden norm: every rank has all of x and dy, so each computes the whole weight gradient.
template <class T>
void Transformer<T>::HiddenNormBackward(const T* x, const Buffer& r, int tensor, const T* dy,
                                        T* dx, Point gradient_of_input) {
  const int64_t H = model_.hidden_size;
  T* dw = Gradient(0, tensor);
  NormWeight(x, r, dy, dw, tokens_, H);
  if (Backward(Point::kWeights) != Rounding::kNone) {
    ops_.scale({.x = dw, .y = dw, .scale = T(1), .round = Backward(Point::kWeights)}, 0, H);
  }
  NormBackward(x, r, tensor, dy, dx, tokens_, H, Backward(gradient_of_input));
}

template <class T>
void Transformer<T>::Rope(Buffer* x, int64_t l, int64_t heads, int64_t dim, bool backward,
                          Rounding round) {
  const RopeTable& table = model_.IsFull(l) ? rope_full_ : rope_sliding_;
  const RopeArgs<T> args = {.x_TC = x->data(), .y_TC = x->data(), .cos_SD = table.cos.data(),
                            .sin_SD = table.sin.data(), .length = length_, .heads = heads,
                            .dim = dim, .backward = backward, .round = round};
  engine_.Run(ops_.rope, args, tokens_, 2 * heads * dim);
}

// Of q_norm's and k_norm's outputs, and of the gradients there.
template <class T>
void Transformer<T>::ApplyGain(Buffer* x, Rounding round) {
  const T gain = static_cast<T>(model_.qk_norm_gain);
  if (gain == T(1)) return;
  engine_.Run(ops_.scale,
              ScaleArgs<T>{.x = x->data(), .y = x->data(), .scale = gain, .round = round},
              static_cast<int64_t>(x->size()), 1, 16);
}

// --------------------------------------------------------------------------------------- forward

template <class T>
Result<double> Transformer<T>::Forward(const TokenBatch& batch, const WeightSlabs<T>& weights,
                                       const std::string& name) {
  sequences_ = batch.sequences;
  length_ = batch.length;
  tokens_ = batch.tokens();
  weights_ = weights;
  name_ = name;
  engine_.Sync();  // before what an earlier batch may still be read from is overwritten
  ids_.assign(batch.ids.begin(), batch.ids.end());
  labels_.assign(batch.labels.begin(), batch.labels.end());
  ReserveRope(length_);
  RT_RETURN_IF_ERROR(EmbedTokens());
  for (int64_t l = 0; l < model_.layers; ++l) {
    RT_RETURN_IF_ERROR(ForwardLayer(l, &saved_[l % saved_.size()]));
  }
  RT_RETURN_IF_ERROR(Head());
  RT_RETURN_IF_ERROR(engine_.Wait());
  return SumInFp64(nll_);
}

template <class T>
Status Transformer<T>::EmbedTokens() {
  const int64_t H = model_.hidden_size;
  ResizeAll(&embedded_, shards(), tokens_ * H);
  for (int i = 0; i < shards(); ++i) {
    const Piece* piece = map_.layout().FindPiece(map_.first_shard() + i, embedding_);
    const EmbedArgs<T> args = {.table_VN = Weight(i, embedding_), .ids_T = ids_.data(),
                               .x_TN = embedded_[i].data(), .row_first = piece->row_first,
                               .rows = piece->rows(), .n = H, .scale = embed_scale_,
                               .round = Forward(Point::kEmbedding)};
    engine_.Run(ops_.embed, args, tokens_, H);
  }
  RT_RETURN_IF_ERROR(tree_.Merge(Pointers(embedded_), tokens_ * H));
  std::swap(x_[0], embedded_[0]);
  Emit("embedding", x_[0].data(), tokens_, H);
  return {};
}

template <class T>
void Transformer<T>::ForwardQkv(int64_t l, LayerSaved* s) {
  const LayerTensors& t = tensors_[l];
  const Shape shape = ShapeOf(l);
  ResizeAll(&s->q_raw, shards(), tokens_ * shape.q_cols());
  ResizeAll(&s->k_raw, shards(), tokens_ * shape.kv_cols());
  if (t.v >= 0) ResizeAll(&s->v_raw, shards(), tokens_ * shape.kv_cols());
  for (ShardBuffers* buffers : {&s->q, &s->k, &s->v, &s->r_q, &s->r_k, &s->r_v}) {
    buffers->resize(shards());
  }
  std::vector<GemmArgs<T>> products;
  for (int i = 0; i < shards(); ++i) {
    products.push_back(Linear(s->h.data(), i, t.q, s->q_raw[i].data(), Point::kQkv));
    products.push_back(Linear(s->h.data(), i, t.k, s->k_raw[i].data(), Point::kQkv));
    if (t.v >= 0) {
      products.push_back(Linear(s->h.data(), i, t.v, s->v_raw[i].data(), Point::kQkv));
    }
  }
  engine_.MultiplyBatch<T>(products);
  for (int i = 0; i < shards(); ++i) {
    const Buffer& v_raw = t.v >= 0 ? s->v_raw[i] : s->k_raw[i];
    const int64_t q_rows = tokens_ * shape.query_heads, kv_rows = tokens_ * shape.kv_heads;
    if (model_.AppliesQkNorm()) {
      Norm(s->q_raw[i], t.q_norm, &s->q[i], &s->r_q[i], q_rows, shape.dim, Point::kQkNorm);
      Norm(s->k_raw[i], t.k_norm, &s->k[i], &s->r_k[i], kv_rows, shape.dim, Point::kQkNorm);
      ApplyGain(&s->q[i], Forward(Point::kQkNorm));
      ApplyGain(&s->k[i], Forward(Point::kQkNorm));
    } else {
      engine_.Sync();
      s->q[i] = s->q_raw[i];
      s->k[i] = s->k_raw[i];
    }
    if (model_.v_norm) {
      Norm(v_raw, -1, &s->v[i], &s->r_v[i], kv_rows, shape.dim, Point::kVNorm);
    } else {
      engine_.Sync();
      s->v[i] = v_raw;
    }
    Rope(&s->q[i], l, shape.query_heads, shape.dim, false, Forward(Point::kRope));
    Rope(&s->k[i], l, shape.kv_heads, shape.dim, false, Forward(Point::kRope));
  }
  const std::string layer = "layer" + std::to_string(l) + "/";
  EmitShards(layer + "q_proj", s->q_raw, shape.q_cols());
  EmitShards(layer + "k_proj", s->k_raw, shape.kv_cols());
  if (t.v >= 0) EmitShards(layer + "v_proj", s->v_raw, shape.kv_cols());
  EmitShards(layer + "q_rope", s->q, shape.q_cols());
  EmitShards(layer + "k_rope", s->k, shape.kv_cols());
  EmitShards(layer + "v_norm", s->v, shape.kv_cols());
}

template <class T>
Status Transformer<T>::ForwardLayer(int64_t l, LayerSaved* s) {
  const int64_t H = model_.hidden_size, n = tokens_ * H;
  const LayerTensors& t = tensors_[l];
  const Shape shape = ShapeOf(l);
  if (model_.AppliesPreNorm()) {
    Norm(x_[l], t.input_norm, &s->h, &s->r_in, tokens_, H, Point::kInputNorm);
  } else {
    engine_.Sync();
    s->h = x_[l];
  }
  EmitLayer(l, "input_norm", s->h.data(), tokens_, H);
  ForwardQkv(l, s);
  ResizeAll(&s->attended, shards(), tokens_ * shape.q_cols());
  s->attention.resize(shards());
  for (int i = 0; i < shards(); ++i) {
    AttentionForward(engine_, Attention(l), s->q[i].data(), s->k[i].data(), s->v[i].data(),
                     s->attended[i].data(), &s->attention[i], &attention_scratch_);
  }
  EmitShards("layer" + std::to_string(l) + "/attention", s->attended, shape.q_cols());
  ResizeAll(&partial_, shards(), n);
  std::vector<GemmArgs<T>> products;
  for (int i = 0; i < shards(); ++i) {
    products.push_back(Linear(s->attended[i].data(), i, t.o, partial_[i].data(), Point::kOProj));
    products.back().round = Rounding::kNone;
  }
  engine_.MultiplyBatch<T>(products);
  RT_RETURN_IF_ERROR(SumPartials(&s->o, n, Forward(Point::kOProj)));
  EmitLayer(l, "o_proj", s->o.data(), tokens_, H);
  const Buffer* branch = &s->o;
  if (model_.AppliesPostNorm()) {
    Norm(s->o, t.post_attention_norm, &branch_, &s->r_post_attention, tokens_, H,
         Point::kPostAttentionNorm);
    branch = &branch_;
    EmitLayer(l, "post_attention_norm", branch_.data(), tokens_, H);
  }
  s->mid.resize(n);
  engine_.Run(ops_.add_scale,
              AddScaleArgs<T>{.a = x_[l].data(), .b = branch->data(), .y = s->mid.data(),
                              .scale = T(1), .round_sum = Forward(Point::kResidual),
                              .round_scale = Rounding::kNone},
              n, 1, 16);
  EmitLayer(l, "residual_attention", s->mid.data(), tokens_, H);
  return ForwardMlp(l, s);
}

template <class T>
Status Transformer<T>::ForwardMlp(int64_t l, LayerSaved* s) {
  const int64_t H = model_.hidden_size, n = tokens_ * H;
  const int64_t inner = model_.intermediate_size / map_.layout().shards();
  const LayerTensors& t = tensors_[l];
  if (model_.AppliesPreNorm()) {
    Norm(s->mid, t.pre_mlp_norm, &s->h2, &s->r_pre_mlp, tokens_, H, Point::kPreMlpNorm);
  } else {
    engine_.Sync();
    s->h2 = s->mid;
  }
  EmitLayer(l, "pre_mlp_norm", s->h2.data(), tokens_, H);
  for (ShardBuffers* buffers : {&s->gate, &s->up, &s->act}) {
    ResizeAll(buffers, shards(), tokens_ * inner);
  }
  ResizeAll(&partial_, shards(), n);
  std::vector<GemmArgs<T>> in, out;
  for (int i = 0; i < shards(); ++i) {
    in.push_back(Linear(s->h2.data(), i, t.gate, s->gate[i].data(), Point::kGateUp));
    in.push_back(Linear(s->h2.data(), i, t.up, s->up[i].data(), Point::kGateUp));
    out.push_back(Linear(s->act[i].data(), i, t.down, partial_[i].data(), Point::kDown));
    out.back().round = Rounding::kNone;
  }
  engine_.MultiplyBatch<T>(in);
  for (int i = 0; i < shards(); ++i) {
    const GegluArgs<T> args = {.gate = s->gate[i].data(), .up = s->up[i].data(),
                               .act = s->act[i].data(), .round_gelu = Forward(Point::kGelu),
                               .round_product = Forward(Point::kGateTimesUp)};
    engine_.Run(&OpTable<T>::geglu, args, tokens_ * inner, 8, 16);
  }
  const std::string layer = "layer" + std::to_string(l) + "/";
  EmitShards(layer + "gate_proj", s->gate, inner);
  EmitShards(layer + "up_proj", s->up, inner);
  EmitShards(layer + "geglu", s->act, inner);
  engine_.MultiplyBatch<T>(out);
  RT_RETURN_IF_ERROR(SumPartials(&s->down, n, Forward(Point::kDown)));
  EmitLayer(l, "down_proj", s->down.data(), tokens_, H);
  const Buffer* branch = &s->down;
  if (model_.AppliesPostNorm()) {
    Norm(s->down, t.post_mlp_norm, &branch_, &s->r_post_mlp, tokens_, H, Point::kPostMlpNorm);
    branch = &branch_;
    EmitLayer(l, "post_mlp_norm", branch_.data(), tokens_, H);
  }
  x_[l + 1].resize(n);
  engine_.Run(ops_.add_scale,
              AddScaleArgs<T>{.a = s->mid.data(), .b = branch->data(), .y = x_[l + 1].data(),
                              .scale = LayerScalar(l),
                              .round_sum = Forward(Point::kResidual),
                              .round_scale = Forward(Point::kLayerScalar)},
              n, 1, 16);
  EmitLayer(l, "output", x_[l + 1].data(), tokens_, H);
  return {};
}

template <class T>
Status Transformer<T>::Head() {
  const int64_t H = model_.hidden_size;
  const int64_t vocab = model_.vocab_size / map_.layout().shards();
  Norm(x_[model_.layers], final_norm_tensor_, &y_, &r_final_, tokens_, H, Point::kFinalNorm);
  Emit("final_norm", y_.data(), tokens_, H);
  ResizeAll(&logits_, shards(), tokens_ * vocab);
  std::vector<GemmArgs<T>> products;
  for (int i = 0; i < shards(); ++i) {
    products.push_back(Linear(y_.data(), i, head_, logits_[i].data(), Point::kLogits));
  }
  engine_.MultiplyBatch<T>(products);
  if (model_.final_logit_softcapping > 0) {
    ResizeAll(&tanh_, shards(), tokens_ * vocab);
    for (int i = 0; i < shards(); ++i) {
      const SoftcapArgs<T> args = {.z = logits_[i].data(), .tanh = tanh_[i].data(),
                                   .cap = static_cast<T>(model_.final_logit_softcapping),
                                   .round = Forward(Point::kSoftcap)};
      engine_.Run(&OpTable<T>::softcap, args, tokens_ * vocab, 8, 16);
    }
  }
  EmitShards("logits", logits_, vocab);
  ShardBuffers max(shards(), Buffer(tokens_));
  for (int i = 0; i < shards(); ++i) {
    const RowMaxArgs<T> args = {.z_TV = logits_[i].data(), .m_T = max[i].data(), .n = vocab};
    engine_.Run(ops_.row_max, args, tokens_, vocab);
  }
  RT_RETURN_IF_ERROR(tree_.Max(Pointers(max), tokens_));
  row_max_ = std::move(max[0]);
  ResizeAll(&sum_exp_, shards(), 2 * tokens_);  // sums, then label logits
  for (int i = 0; i < shards(); ++i) {
    const SumExpArgs<T> args = {.z_TV = logits_[i].data(), .m_T = row_max_.data(),
                                .labels_T = labels_.data(), .sum_T = sum_exp_[i].data(),
                                .label_T = sum_exp_[i].data() + tokens_,
                                .row_first = (map_.first_shard() + i) * vocab, .n = vocab};
    engine_.Run(&OpTable<T>::sum_exp, args, tokens_, 4 * vocab);
  }
  // Frameworks reduce these in FP32 whatever the policy of partials.
  RT_RETURN_IF_ERROR(
      tree_.Sum(Pointers(sum_exp_), 2 * tokens_, Rounding::kNone, Rounding::kNone));
  engine_.Sync();
  nll_.resize(tokens_);
  for (int64_t t = 0; t < tokens_; ++t) {
    nll_[t] = (math::Log(sum_exp_[0][t]) + row_max_[t]) - sum_exp_[0][tokens_ + t];
  }
  KeepZLoss();
  if (Forward(Point::kCrossEntropy) != Rounding::kNone) {
    ops_.scale({.x = nll_.data(), .y = nll_.data(), .scale = T(1),
                .round = Forward(Point::kCrossEntropy)},
               0, tokens_);
  }
  Emit("loss", nll_.data(), tokens_, 1);
  return {};
}

// What the z-loss's gradient needs: the sums of the head are gone by then.
template <class T>
void Transformer<T>::KeepZLoss() {
  if (!(model_.z_loss > 0)) return;
  const T twice = static_cast<T>(2.0 * model_.z_loss);
  logsumexp_.resize(tokens_);
  p_factor_.resize(tokens_);
  for (int64_t t = 0; t < tokens_; ++t) {
    logsumexp_[t] = math::Log(sum_exp_[0][t]) + row_max_[t];
    p_factor_[t] = T(1) + twice * logsumexp_[t];
  }
  Emit("logsumexp", logsumexp_.data(), tokens_, 1);
}

template <class T>
double Transformer<T>::z_loss_sum() const {
  if (!(model_.z_loss > 0)) return 0;
  std::vector<double> terms;
  for (const T x : logsumexp_) {
    terms.push_back(model_.z_loss * (static_cast<double>(x) * static_cast<double>(x)));
  }
  return SumInFp64(terms);
}

// -------------------------------------------------------------------------------------- backward

template <class T>
Status Transformer<T>::Backward(const TokenBatch& batch, const WeightSlabs<T>& weights, T inv_n,
                                const GradientSlabs<T>& gradients) {
  RT_CHECK_EQ(tokens_, batch.tokens());
  weights_ = weights;
  gradients_ = gradients;
  RT_RETURN_IF_ERROR(BackwardHead(inv_n));
  for (int64_t l = model_.layers - 1; l >= 0; --l) {
    LayerSaved* saved = &saved_[l % saved_.size()];
    if (recipe_.execution.recompute_activations && l + 1 < model_.layers) {
      Probe* probe = std::exchange(probe_, nullptr);
      RT_RETURN_IF_ERROR(ForwardLayer(l, saved));
      probe_ = probe;
    }
    RT_RETURN_IF_ERROR(BackwardLayer(l, saved));
  }
  BackwardEmbedding();
  RT_RETURN_IF_ERROR(engine_.Wait());
  ZeroBypassedGradients();
  return {};
}

template <class T>
void Transformer<T>::ZeroBypassedGradients() {
  const std::vector<TensorSpec>& tensors = map_.layout().tensors();
  for (size_t t = 0; t < tensors.size(); ++t) {
    if (!IsBypassed(model_, tensors[t])) continue;
    std::fill_n(Gradient(0, static_cast<int>(t)), tensors[t].numel(), T(0));
  }
}

template <class T>
Status Transformer<T>::BackwardHead(T inv_n) {
  const int64_t H = model_.hidden_size;
  const int64_t vocab = model_.vocab_size / map_.layout().shards();
  const bool capped = model_.final_logit_softcapping > 0;
  std::vector<GemmArgs<T>> weight, input;
  ResizeAll(&partial_, shards(), tokens_ * H);
  for (int i = 0; i < shards(); ++i) {
    const CrossEntropyBackwardArgs<T> args = {
        .z_TV = logits_[i].data(),
        .m_T = row_max_.data(),
        .sum_T = sum_exp_[0].data(),
        .labels_T = labels_.data(),
        .row_first = (map_.first_shard() + i) * vocab,
        .n = vocab,
        .inv_n = inv_n,
        .round = Backward(capped ? Point::kSoftcap : Point::kLogits),
        .factor_T = model_.z_loss > 0 ? p_factor_.data() : nullptr};
    engine_.Run(ops_.cross_entropy_backward, args, tokens_, 4 * vocab);
    if (capped) {
      const SoftcapBackwardArgs<T> cap = {.dz = logits_[i].data(), .tanh = tanh_[i].data(),
                                          .cap = static_cast<T>(model_.final_logit_softcapping),
                                          .round = Backward(Point::kLogits)};
      engine_.Run(&OpTable<T>::softcap_backward, cap, tokens_ * vocab, 4, 16);
    }
    weight.push_back(WeightGradient(logits_[i].data(), y_.data(), i, head_));
    // The tied matrix is finished, and rounded, by BackwardEmbedding.
    if (model_.tie_word_embeddings) weight.back().round = Rounding::kNone;
    input.push_back(
        InputGradient(logits_[i].data(), i, head_, partial_[i].data(), Rounding::kNone));
  }
  EmitShards("logits.grad", logits_, vocab);
  engine_.MultiplyBatch<T>(weight);
  engine_.MultiplyBatch<T>(input);
  RT_RETURN_IF_ERROR(SumPartials(&dy_, tokens_ * H, Backward(Point::kFinalNorm)));
  Emit("final_norm.grad", dy_.data(), tokens_, H);
  d_.resize(tokens_ * H);
  HiddenNormBackward(x_[model_.layers].data(), r_final_, final_norm_tensor_, dy_.data(),
                     d_.data(), Point::kLayerScalar);
  return {};
}

// d_: in, the gradient of the layer's output; out, that of its input.
template <class T>
Status Transformer<T>::BackwardLayer(int64_t l, LayerSaved* s) {
  const int64_t n = tokens_ * model_.hidden_size;
  EmitLayer(l, "output.grad", d_.data(), tokens_, model_.hidden_size);
  if (LayerScalar(l) != T(1)) {
    engine_.Run(ops_.scale,
                ScaleArgs<T>{.x = d_.data(), .y = d_.data(),
                             .scale = LayerScalar(l), .round = Backward(Point::kResidual)},
                n, 1, 16);
  }
  RT_RETURN_IF_ERROR(BackwardMlp(l, s));
  return BackwardAttention(l, s);
}

// d_ as the gradient of a branch's output: the residual stream's, rounded once more where the
// branch has another format.
template <class T>
const T* Transformer<T>::BranchGradient(Point point) {
  if (Backward(point) == Rounding::kNone) return d_.data();
  dh_.resize(d_.size());
  engine_.Run(ops_.scale,
              ScaleArgs<T>{.x = d_.data(), .y = dh_.data(), .scale = T(1),
                           .round = Backward(point)},
              static_cast<int64_t>(d_.size()), 1, 16);
  return dh_.data();
}

template <class T>
Status Transformer<T>::BackwardMlp(int64_t l, LayerSaved* s) {
  const int64_t H = model_.hidden_size, n = tokens_ * H;
  const int64_t inner = model_.intermediate_size / map_.layout().shards();
  const LayerTensors& t = tensors_[l];
  const T* ddown = BranchGradient(model_.AppliesPostNorm() ? Point::kPostMlpNorm : Point::kDown);
  if (model_.AppliesPostNorm()) {
    branch_.resize(n);
    HiddenNormBackward(s->down.data(), s->r_post_mlp, t.post_mlp_norm, ddown, branch_.data(),
                       Point::kDown);
    ddown = branch_.data();
  }
  EmitLayer(l, "down_proj.grad", ddown, tokens_, H);
  for (ShardBuffers* buffers : {&da_, &dgate_, &dup_}) {
    ResizeAll(buffers, shards(), tokens_ * inner);
  }
  std::vector<GemmArgs<T>> products;
  for (int i = 0; i < shards(); ++i) {
    products.push_back(
        InputGradient(ddown, i, t.down, da_[i].data(), Backward(Point::kGateTimesUp)));
    products.push_back(WeightGradient(ddown, s->act[i].data(), i, t.down));
  }
  engine_.MultiplyBatch<T>(products);
  products.clear();
  for (int i = 0; i < shards(); ++i) {
    const GegluBackwardArgs<T> args = {.gate = s->gate[i].data(), .up = s->up[i].data(),
                                       .dact = da_[i].data(), .dgate = dgate_[i].data(),
                                       .dup = dup_[i].data(), .round_gelu = Forward(Point::kGelu),
                                       .round_dgelu = Backward(Point::kGelu),
                                       .round = Backward(Point::kGateUp)};
    engine_.Run(&OpTable<T>::geglu_backward, args, tokens_ * inner, 8, 16);
    products.push_back(WeightGradient(dgate_[i].data(), s->h2.data(), i, t.gate));
    products.push_back(WeightGradient(dup_[i].data(), s->h2.data(), i, t.up));
  }
  const std::string layer = "layer" + std::to_string(l) + "/";
  EmitShards(layer + "geglu.grad", da_, inner);
  EmitShards(layer + "gate_proj.grad", dgate_, inner);
  EmitShards(layer + "up_proj.grad", dup_, inner);
  engine_.MultiplyBatch<T>(products);
  RT_RETURN_IF_ERROR(SummedInputGradient({{&dgate_, t.gate}, {&dup_, t.up}}, &dh_,
                                         Backward(Point::kPreMlpNorm)));
  EmitLayer(l, "pre_mlp_norm.grad", dh_.data(), tokens_, H);
  if (model_.AppliesPreNorm()) {
    HiddenNormBackward(s->mid.data(), s->r_pre_mlp, t.pre_mlp_norm, dh_.data(), dh_.data(),
                       Point::kResidual);
  }
  engine_.Run(ops_.add,
              AddArgs<T>{.dst = d_.data(), .src = dh_.data(), .round = Backward(Point::kResidual)},
              n, 1, 16);
  EmitLayer(l, "residual_attention.grad", d_.data(), tokens_, H);
  return {};
}

template <class T>
Status Transformer<T>::BackwardAttention(int64_t l, LayerSaved* s) {
  const int64_t H = model_.hidden_size, n = tokens_ * H;
  const LayerTensors& t = tensors_[l];
  const Shape shape = ShapeOf(l);
  const T* dout =
      BranchGradient(model_.AppliesPostNorm() ? Point::kPostAttentionNorm : Point::kOProj);
  if (model_.AppliesPostNorm()) {
    branch_.resize(n);
    HiddenNormBackward(s->o.data(), s->r_post_attention, t.post_attention_norm, dout,
                       branch_.data(), Point::kOProj);
    dout = branch_.data();
  }
  EmitLayer(l, "o_proj.grad", dout, tokens_, H);
  ResizeAll(&da_, shards(), tokens_ * shape.q_cols());
  ResizeAll(&dq_, shards(), tokens_ * shape.q_cols());
  ResizeAll(&dk_, shards(), tokens_ * shape.kv_cols());
  ResizeAll(&dv_, shards(), tokens_ * shape.kv_cols());
  std::vector<GemmArgs<T>> products;
  for (int i = 0; i < shards(); ++i) {
    products.push_back(InputGradient(dout, i, t.o, da_[i].data(), Backward(Point::kAttention)));
    products.push_back(WeightGradient(dout, s->attended[i].data(), i, t.o));
  }
  engine_.MultiplyBatch<T>(products);
  for (int i = 0; i < shards(); ++i) {
    AttentionBackward(engine_, Attention(l), s->q[i].data(), s->k[i].data(), s->v[i].data(),
                      s->attended[i].data(), da_[i].data(), s->attention[i], dq_[i].data(),
                      dk_[i].data(), dv_[i].data(), &attention_scratch_);
  }
  const std::string layer = "layer" + std::to_string(l) + "/";
  EmitShards(layer + "attention.grad", da_, shape.q_cols());
  RT_RETURN_IF_ERROR(CombineSharedKv(l));
  EmitShards(layer + "q_rope.grad", dq_, shape.q_cols());
  EmitOwners(layer + "k_rope.grad", dk_, shape.kv_cols(), t.k);
  EmitOwners(layer + "v_norm.grad", dv_, shape.kv_cols(), t.k);
  RT_RETURN_IF_ERROR(BackwardQkv(l, s));
  EmitLayer(l, "input_norm.grad", dh_.data(), tokens_, H);
  if (model_.AppliesPreNorm()) {
    HiddenNormBackward(x_[l].data(), s->r_in, t.input_norm, dh_.data(), dh_.data(),
                       Point::kResidual);
  }
  engine_.Run(ops_.add,
              AddArgs<T>{.dst = d_.data(), .src = dh_.data(), .round = Backward(Point::kResidual)},
              n, 1, 16);
  return {};
}

// Gradients of k and v of a head that several shards use: the tree over those shards. Afterwards
// the first local shard of each head holds the sum; that of a head of one shard alone is rounded.
template <class T>
Status Transformer<T>::CombineSharedKv(int64_t l) {
  const int64_t V = map_.layout().shards();
  const int64_t sharing = std::max<int64_t>(1, V / model_.KvHeads(l));
  const int64_t local = std::min<int64_t>(sharing, shards());
  const int64_t n = tokens_ * ShapeOf(l).kv_cols();
  const Rounding partial_round =
      sharing > 1 ? RoundingOf(recipe_.precision.partials) : Rounding::kNone;
  const Point v_point = model_.v_norm ? Point::kVNorm : Point::kQkv;
  for (int64_t first = 0; first < shards(); first += local) {
    for (auto [buffers, point] : {std::pair(&dk_, Point::kRope), std::pair(&dv_, v_point)}) {
      std::vector<T*> parts;
      for (int64_t i = first; i < first + local; ++i) parts.push_back((*buffers)[i].data());
      RT_RETURN_IF_ERROR(tree_.Sum(parts, n, partial_round, Backward(point),
                                   static_cast<int>(sharing / local)));
    }
  }
  return {};
}

template <class T>
Status Transformer<T>::QkNormGradients(int64_t l, LayerSaved* s) {
  const LayerTensors& t = tensors_[l];
  const Shape shape = ShapeOf(l);
  ShardBuffers partials(shards(), Buffer(2 * shape.dim));
  for (int i = 0; i < shards(); ++i) {
    const bool counts = model_.qk_norm_gradient == QkNormGradient::kAllShards ||
                        map_.first_shard() + i == 0;
    if (!counts) continue;  // +0: as where ranks do not reduce, seen from the first
    NormWeight(s->q_raw[i].data(), s->r_q[i], dq_[i].data(), partials[i].data(),
               tokens_ * shape.query_heads, shape.dim);
    if (!IsOwner(i, t.k)) continue;  // +0: the head counts once
    NormWeight(s->k_raw[i].data(), s->r_k[i], dk_[i].data(), partials[i].data() + shape.dim,
               tokens_ * shape.kv_heads, shape.dim);
  }
  RT_RETURN_IF_ERROR(tree_.Sum(Pointers(partials), 2 * shape.dim,
                               RoundingOf(recipe_.precision.partials),
                               Backward(Point::kWeights)));
  engine_.Sync();
  std::copy_n(partials[0].data(), shape.dim, Gradient(0, t.q_norm));
  std::copy_n(partials[0].data() + shape.dim, shape.dim, Gradient(0, t.k_norm));
  return {};
}

// From dq, dk, dv after RoPE to the projections' gradients and dh_.
template <class T>
Status Transformer<T>::BackwardQkv(int64_t l, LayerSaved* s) {
  const LayerTensors& t = tensors_[l];
  const Shape shape = ShapeOf(l);
  const Point rope_input = model_.AppliesQkNorm() ? Point::kQkNorm : Point::kQkv;
  for (int i = 0; i < shards(); ++i) {
    Rope(&dq_[i], l, shape.query_heads, shape.dim, true, Backward(rope_input));
    if (model_.AppliesQkNorm()) ApplyGain(&dq_[i], Backward(Point::kQkNorm));
    if (!OwnsLocally(i, t.k)) continue;
    Rope(&dk_[i], l, shape.kv_heads, shape.dim, true, Backward(rope_input));
    if (model_.AppliesQkNorm()) ApplyGain(&dk_[i], Backward(Point::kQkNorm));
  }
  if (model_.AppliesQkNorm()) RT_RETURN_IF_ERROR(QkNormGradients(l, s));
  const Rounding round = Backward(Point::kQkv);
  std::vector<GemmArgs<T>> products;
  for (int i = 0; i < shards(); ++i) {
    const int64_t q_rows = tokens_ * shape.query_heads, kv_rows = tokens_ * shape.kv_heads;
    if (model_.AppliesQkNorm()) {
      NormBackward(s->q_raw[i].data(), s->r_q[i], t.q_norm, dq_[i].data(), dq_[i].data(), q_rows,
                   shape.dim, round);
    }
    products.push_back(WeightGradient(dq_[i].data(), s->h.data(), i, t.q));
    if (!OwnsLocally(i, t.k)) continue;
    if (model_.AppliesQkNorm()) {
      NormBackward(s->k_raw[i].data(), s->r_k[i], t.k_norm, dk_[i].data(), dk_[i].data(), kv_rows,
                   shape.dim, round);
    }
    const Buffer& v_raw = t.v >= 0 ? s->v_raw[i] : s->k_raw[i];
    if (model_.v_norm) {
      NormBackward(v_raw.data(), s->r_v[i], -1, dv_[i].data(), dv_[i].data(), kv_rows, shape.dim,
                   round);
    }
    if (t.v < 0) {  // v is the raw k
      engine_.Run(ops_.add,
                  AddArgs<T>{.dst = dk_[i].data(), .src = dv_[i].data(), .round = round},
                  tokens_ * shape.kv_cols(), 1, 16);
    }
    products.push_back(WeightGradient(dk_[i].data(), s->h.data(), i, t.k));
    if (t.v >= 0) products.push_back(WeightGradient(dv_[i].data(), s->h.data(), i, t.v));
  }
  const std::string layer = "layer" + std::to_string(l) + "/";
  EmitShards(layer + "q_proj.grad", dq_, shape.q_cols());
  EmitOwners(layer + "k_proj.grad", dk_, shape.kv_cols(), t.k);
  if (t.v >= 0) EmitOwners(layer + "v_proj.grad", dv_, shape.kv_cols(), t.v);
  engine_.MultiplyBatch<T>(products);
  std::vector<Term> terms = {{&dq_, t.q}, {&dk_, t.k}};
  if (t.v >= 0) terms.push_back({&dv_, t.v});
  return SummedInputGradient(terms, &dh_, Backward(Point::kInputNorm));
}

template <class T>
void Transformer<T>::BackwardEmbedding() {
  const int64_t H = model_.hidden_size;
  Emit("embedding.grad", d_.data(), tokens_, H);
  for (int i = 0; i < shards(); ++i) {
    const Piece* piece = map_.layout().FindPiece(map_.first_shard() + i, embedding_);
    T* gradient = Gradient(i, embedding_);
    if (!model_.tie_word_embeddings) {
      engine_.Sync();
      std::fill_n(gradient, piece->numel(), T(0));
    }
    const EmbedBackwardArgs<T> args = {
        .dx_TN = d_.data(), .ids_T = ids_.data(), .dtable_VN = gradient, .tokens = tokens_,
        .row_first = piece->row_first, .rows = piece->rows(), .n = H,
        .dropped = model_.pad_lookup_gradient ? -1 : static_cast<int32_t>(model_.pad_token_id),
        .scale = embed_scale_, .round = Backward(Point::kEmbedding)};
    engine_.Run(ops_.embed_backward, args, H, tokens_, 16);
    if (Backward(Point::kWeights) == Rounding::kNone) continue;
    engine_.Run(ops_.scale,
                ScaleArgs<T>{.x = gradient, .y = gradient, .scale = T(1),
                             .round = Backward(Point::kWeights)},
                piece->numel(), 1, 16);
  }
}

template class Transformer<float>;
template class Transformer<double>;

}  // namespace retrace
