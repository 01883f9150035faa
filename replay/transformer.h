// Transformer: forward and backward of Gemma 4's text decoder on this rank's virtual shards, with
// every sum's order visible (no tape). Used by the update and by evaluation. T is float, or double
// under the fp64 policy. Not thread-safe; one per rank.
//
// Formulas: docs/architecture.md, "The model"; order and rounding: the op table of NUMERICS.md.
#ifndef RETRACE_REPLAY_TRANSFORMER_H_
#define RETRACE_REPLAY_TRANSFORMER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/recipe.h"
#include "kernels/attention.h"
#include "replay/parameter_map.h"
#include "replay/probe.h"
#include "replay/shard_tree.h"

namespace retrace {

// Token ids and labels of `sequences` rows of `length` tokens.
struct TokenBatch {
  int64_t sequences = 0, length = 0;
  std::vector<int32_t> ids, labels;  // [sequences, length]

  int64_t tokens() const { return sequences * length; }
};

// Compute weights and gradients: one pointer per slab of the ParameterMap.
template <class T>
using WeightSlabs = std::vector<const T*>;
template <class T>
using GradientSlabs = std::vector<T*>;

template <class T>
class Transformer {
 public:
  Transformer(const Recipe& recipe, const ParameterMap& map, Engine& engine, ShardTree& tree);

  void set_probe(Probe* probe) { probe_ = probe; }

  // Scores a batch. Result: the sum over tokens of the cross-entropy, in nats (FP64, clause 6 over
  // tokens). token_losses() then holds each token's. Errors: those of the Comm.
  // `name` precedes every probe name ("mb0").
  Result<double> Forward(const TokenBatch& batch, const WeightSlabs<T>& weights,
                         const std::string& name);
  const ComputeVector<T>& token_losses() const { return nll_; }
  // Sum over tokens of what the last Forward's objective has beside the cross-entropy: the z-loss.
  double z_loss_sum() const;

  // Logits of the last Forward, [tokens, vocabulary rows of shard `local`], softcapped.
  const T* logits(int local) const { return logits_[local].data(); }
  // Output of layer l of the last Forward, [tokens, hidden]; l = 0: the scaled embedding.
  const T* hidden(int64_t l) const { return x_[l].data(); }
  const T* final_norm() const { return y_.data(); }

  // Gradients of inv_n * (sum over tokens of the loss) of the batch of the last Forward, which it
  // consumes. Every element of `gradients` is written.
  Status Backward(const TokenBatch& batch, const WeightSlabs<T>& weights, T inv_n,
                  const GradientSlabs<T>& gradients);

 private:
  using Buffer = ComputeVector<T>;
  using ShardBuffers = std::vector<Buffer>;  // one per local shard

  // What one layer's forward pass leaves for its backward pass.
  struct LayerSaved {
    Buffer r_in, h, o, r_post_attention, mid, r_pre_mlp, h2, down, r_post_mlp;
    ShardBuffers q_raw, k_raw, v_raw, q, k, v, r_q, r_k, r_v, attended, gate, up, act;
    std::vector<AttentionSaved<T>> attention;
  };
  struct LayerTensors {  // indices into the layout; -1: none
    int input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm, q_norm, k_norm;
    int q, k, v, o, gate, up, down;
  };
  struct Shape {  // of one layer on one shard
    int64_t dim, query_heads, kv_heads, window;
    int64_t q_cols() const { return query_heads * dim; }
    int64_t kv_cols() const { return kv_heads * dim; }
  };
  struct RopeTable {
    Buffer cos, sin;  // [length, dim/2]
  };

  // Construction.
  void FindTensors();
  RopeTable MakeRope(int64_t dim, double theta, double partial, int64_t length) const;
  void ReserveRope(int64_t length);

  // Pieces of the pass.
  Status EmbedTokens();
  Status ForwardLayer(int64_t l, LayerSaved* s);
  void ForwardQkv(int64_t l, LayerSaved* s);
  Status ForwardMlp(int64_t l, LayerSaved* s);
  Status Head();
  void KeepZLoss();
  Status BackwardHead(T inv_n);
  Status BackwardLayer(int64_t l, LayerSaved* s);
  const T* BranchGradient(Point point);
  Status BackwardMlp(int64_t l, LayerSaved* s);
  Status BackwardAttention(int64_t l, LayerSaved* s);
  Status CombineSharedKv(int64_t l);
  Status BackwardQkv(int64_t l, LayerSaved* s);
  Status QkNormGradients(int64_t l, LayerSaved* s);
  void BackwardEmbedding();
  void ZeroBypassedGradients();

  // Ops with this transformer's shapes.
  void Norm(const Buffer& x, int tensor, Buffer* y, Buffer* r, int64_t rows, int64_t n, Point point);
  // dx += or = gradient through a norm; adds to d (the residual path) where `add`.
  void NormBackward(const T* x, const Buffer& r, int tensor, const T* dy, T* dx, int64_t rows,
                    int64_t n, Rounding round);
  void NormWeight(const T* x, const Buffer& r, const T* dy, T* dw, int64_t rows, int64_t n);
  void HiddenNormBackward(const T* x, const Buffer& r, int tensor, const T* dy, T* dx,
                          Point gradient_of_input);
  void Rope(Buffer* x, int64_t l, int64_t heads, int64_t dim, bool backward, Rounding round);
  void ApplyGain(Buffer* x, Rounding round);
  AttentionConfig<T> Attention(int64_t l) const;
  Shape ShapeOf(int64_t l) const;
  T LayerScalar(int64_t l) const;
  GemmArgs<T> Linear(const T* x, int local, int tensor, T* y, Point point) const;
  GemmArgs<T> InputGradient(const T* dy, int local, int tensor, T* dx, Rounding round) const;
  GemmArgs<T> WeightGradient(const T* dy, const T* x, int local, int tensor) const;
  // partial[local] = sum of dy_i W_i over the listed products, each finished, added in order; then
  // the tree over shards into dx.
  struct Term {
    const ShardBuffers* dy;
    int tensor;
  };
  Status SummedInputGradient(const std::vector<Term>& terms, Buffer* dx, Rounding round);
  Status SumPartials(Buffer* out, int64_t n, Rounding round);

  const T* Weight(int local, int tensor) const;
  T* Gradient(int local, int tensor) const;
  bool OwnsLocally(int local, int tensor) const;  // is `local` the first local shard that uses it?
  bool IsOwner(int local, int tensor) const;      // does it own it among all shards?
  Rounding Forward(Point point) const;
  Rounding Backward(Point point) const;
  int shards() const { return map_.shard_count(); }

  void Emit(const std::string& op, const T* data, int64_t rows, int64_t cols);
  void EmitShards(const std::string& op, const ShardBuffers& buffers, int64_t cols);
  // Of the shards that own `tensor`: what the others have of a shared KV head's gradient depends on
  // where the shards live.
  void EmitOwners(const std::string& op, const ShardBuffers& buffers, int64_t cols, int tensor);
  void EmitLayer(int64_t l, const std::string& op, const T* data, int64_t rows, int64_t cols);

  const Recipe& recipe_;
  const ModelRecipe& model_;
  const ParameterMap& map_;
  Engine& engine_;
  ShardTree& tree_;
  const OpTable<T>& ops_;
  Probe* probe_ = nullptr;
  std::string name_;

  std::vector<LayerTensors> tensors_;
  int embedding_, head_, final_norm_tensor_;
  T embed_scale_ = 1;
  RopeTable rope_sliding_, rope_full_;
  int64_t rope_length_ = 0;

  // Of the batch in hand.
  int64_t sequences_ = 0, length_ = 0, tokens_ = 0;
  WeightSlabs<T> weights_;
  GradientSlabs<T> gradients_;
  ComputeVector<int32_t> ids_, labels_;
  std::vector<Buffer> x_;  // inputs of the layers, and the last output
  std::vector<LayerSaved> saved_;
  Buffer y_, r_final_, row_max_, nll_;
  Buffer logsumexp_, p_factor_;  // with a z-loss only
  ShardBuffers logits_, tanh_, sum_exp_;

  // Scratch.
  Buffer d_, dy_, dh_, branch_;
  ShardBuffers partial_, partial2_, embedded_, dq_, dk_, dv_, da_, dgate_, dup_;
  AttentionScratch<T> attention_scratch_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_TRANSFORMER_H_
