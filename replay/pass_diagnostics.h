// PassDiagnostics: what the forward and backward pass of an update look like, layer by layer, and
// the probe that sees it. Used by surgery/diagnose.h. One process carries the whole update: the probe
// sees every shard and every micro-batch. Not thread-safe.
#ifndef RETRACE_REPLAY_PASS_DIAGNOSTICS_H_
#define RETRACE_REPLAY_PASS_DIAGNOSTICS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/recipe.h"
#include "replay/probe.h"

namespace retrace {

// Sums over all micro-batches; the numbers are FP64, from the values that the pass computed with.
struct LayerDiagnostics {
  double residual_rms = 0;         // of the layer's output
  double attention_ratio = 0;      // RMS of what attention adds over that of what it is added to
  double mlp_ratio = 0;            // the same of the MLP
  double attention_logit = 0;      // largest magnitude, scaled, of the keys that a query sees
  double attention_peak = 0;       // largest probability of a query, mean over queries and heads
  double attention_entropy = 0;    // nats, mean over queries and heads
  double gradient_norm = 0;        // ||dL/dx|| of the layer's output x
};
// Peak and entropy leave out queries that see one key alone, whose probability is 1.

struct PassDiagnostics {
  std::vector<LayerDiagnostics> layers;
  double embedding_rms = 0;         // of the first residual
  double embedding_gradient = 0;    // ||dL/dx|| of it
  double logit_rms = 0;             // of what the cross-entropy sees
  double softcap_saturated = 0;     // share of logits beyond 9/10 of the cap; 0 without one
  double logsumexp_mean = 0, logsumexp_max = 0;
  double token_cosine = 0;          // mean over pairs of tokens of a micro-batch, after the last norm
  int64_t predicted_token = -1;     // the one that is predicted most often
  double predicted_share = 0;       // of tokens where it is
  double predicted_probability = 0; // its mean probability there
  std::vector<double> sequence_losses;  // nats a token, in the order of the micro-batches
};

class DiagnosticProbe : public Probe {
 public:
  // `model` is asked at the beginning of each update: surgery may have changed it.
  DiagnosticProbe(int64_t virtual_shards, int64_t sequence_length,
                  std::function<ModelRecipe()> model)
      : shards_(virtual_shards), length_(sequence_length), model_of_(std::move(model)) {}

  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override;
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override;

  // Of the update that was lived last.
  PassDiagnostics Diagnostics() const;

 private:
  struct Mean {
    double sum = 0, count = 0;
    double value() const { return count > 0 ? sum / count : 0; }
    double Root() const;
  };
  struct Layer {
    Mean output2, attention2, attention_into2, mlp2, mlp_into2, peak, entropy;
    double logit = 0, gradient2 = 0;
  };
  struct Token {  // of the micro-batch that is under way
    double max = 0, sum_exp = 0;
    int64_t argmax = -1;
  };
  struct Prediction {
    int64_t count = 0;
    double probability = 0;  // sum
  };

  template <class T>
  void See(std::string_view name, const T* data, int64_t rows, int64_t cols);
  template <class T>
  void SeeLayer(int64_t l, std::string_view op, const T* data, int64_t rows, int64_t cols);
  template <class T>
  void SeeKeys(int64_t l, int64_t shard, const T* k, int64_t rows, int64_t cols);
  template <class T>
  void SeeLogits(int64_t shard, const T* data, int64_t rows, int64_t cols);
  template <class T>
  void SeeLosses(const T* data, int64_t rows);
  template <class T>
  void SeeHidden(const T* data, int64_t rows, int64_t cols);
  void AddQuery(const std::vector<double>& scores, Layer* layer);
  void Begin();

  const int64_t shards_, length_;
  const std::function<ModelRecipe()> model_of_;
  ModelRecipe model_;
  std::vector<Layer> layers_;
  std::map<int64_t, std::vector<double>> queries_;  // of the layer under way, by shard
  Mean embedding2_, residual2_, branch2_;           // the latter two: seen last
  Mean logits2_, saturated_, logsumexp_, cosine_;
  double embedding_gradient2_ = 0, logsumexp_max_ = 0;
  std::vector<Token> tokens_;
  std::map<int64_t, Prediction> predictions_;
  std::vector<double> sequence_losses_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_PASS_DIAGNOSTICS_H_
