#include "replay/pass_diagnostics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "core/check.h"

namespace retrace {
namespace {

constexpr double kSaturated = 0.9;  // of the cap

// Takes "PREFIXn" and a slash or the end from the front of *name; -1: it begins otherwise.
int64_t TakeNumber(std::string_view* name, std::string_view prefix) {
  if (!name->starts_with(prefix)) return -1;
  int64_t number = -1;
  const char *first = name->data() + prefix.size(), *last = name->data() + name->size();
  const auto [end, error] = std::from_chars(first, last, number);
  if (error != std::errc() || (end != last && *end != '/')) return -1;
  name->remove_prefix(std::min<size_t>(name->size(), end - name->data() + 1));
  return number;
}

// Takes "/shardN" from the end of *op.
int64_t TakeShard(std::string_view* op) {
  const size_t at = op->rfind("/shard");
  if (at == std::string_view::npos) return -1;
  std::string_view tail = op->substr(at + 1);
  *op = op->substr(0, at);
  return TakeNumber(&tail, "shard");
}

template <class T>
double Squares(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

double Ratio(double above, double below) { return below > 0 ? above / below : 0; }

}  // namespace

double DiagnosticProbe::Mean::Root() const { return std::sqrt(value()); }

void DiagnosticProbe::Op(const std::string& name, const float* data, int64_t rows, int64_t cols) {
  See(name, data, rows, cols);
}
void DiagnosticProbe::Op(const std::string& name, const double* data, int64_t rows, int64_t cols) {
  See(name, data, rows, cols);
}

void DiagnosticProbe::Begin() {
  model_ = model_of_();
  layers_.assign(model_.layers, {});
  queries_.clear();
  embedding2_ = residual2_ = branch2_ = logits2_ = saturated_ = logsumexp_ = cosine_ = {};
  embedding_gradient2_ = 0;
  logsumexp_max_ = -std::numeric_limits<double>::infinity();
  tokens_.clear();
  predictions_.clear();
  sequence_losses_.clear();
}

template <class T>
void DiagnosticProbe::See(std::string_view name, const T* data, int64_t rows, int64_t cols) {
  // "evaluation/..." is no part of the update.
  const int64_t micro_batch = TakeNumber(&name, "mb");
  if (micro_batch < 0) return;
  if (micro_batch == 0 && name == "embedding") Begin();
  const int64_t layer = TakeNumber(&name, "layer");
  if (layer >= 0) return SeeLayer(layer, name, data, rows, cols);
  const int64_t shard = TakeShard(&name);
  const auto n = static_cast<double>(rows * cols);
  if (name == "embedding") {
    residual2_ = {Squares(data, rows * cols), n};
    embedding2_ = {embedding2_.sum + residual2_.sum, embedding2_.count + n};
  } else if (name == "embedding.grad") {
    embedding_gradient2_ += Squares(data, rows * cols);
  } else if (name == "final_norm") {
    SeeHidden(data, rows, cols);
  } else if (name == "logits") {
    SeeLogits(shard, data, rows, cols);
  } else if (name == "loss") {
    SeeLosses(data, rows);
  }
}

template <class T>
void DiagnosticProbe::SeeLayer(int64_t l, std::string_view op, const T* data, int64_t rows,
                               int64_t cols) {
  const auto add = [](Mean* mean, const Mean& more) {
    mean->sum += more.sum;
    mean->count += more.count;
  };
  Layer& layer = layers_[l];
  const int64_t shard = TakeShard(&op);
  if (op == "q_rope") {
    queries_[shard].assign(data, data + rows * cols);
  } else if (op == "k_rope") {
    SeeKeys(l, shard, data, rows, cols);
  } else if (op == "o_proj" || op == "post_attention_norm" || op == "down_proj" ||
             op == "post_mlp_norm") {  // the norm, where there is one, comes later and counts
    branch2_ = {Squares(data, rows * cols), static_cast<double>(rows * cols)};
  } else if (op == "residual_attention") {
    add(&layer.attention2, branch2_);
    add(&layer.attention_into2, residual2_);
    residual2_ = {Squares(data, rows * cols), static_cast<double>(rows * cols)};
  } else if (op == "output") {
    add(&layer.mlp2, branch2_);
    add(&layer.mlp_into2, residual2_);
    residual2_ = {Squares(data, rows * cols), static_cast<double>(rows * cols)};
    add(&layer.output2, residual2_);
  } else if (op == "output.grad") {
    layer.gradient2 += Squares(data, rows * cols);
  }
}

// The scores of one query.
void DiagnosticProbe::AddQuery(const std::vector<double>& scores, Layer* layer) {
  double max = -std::numeric_limits<double>::infinity(), sum = 0, weighted = 0;
  for (double s : scores) {
    max = std::max(max, s);
    layer->logit = std::max(layer->logit, std::fabs(s));
  }
  if (scores.size() < 2) return;
  for (double s : scores) {
    sum += std::exp(s - max);
    weighted += std::exp(s - max) * (s - max);
  }
  // -sum p log p with p = exp(s - max) / sum.
  layer->entropy.sum += std::log(sum) - weighted / sum;
  layer->peak.sum += 1 / sum;
  layer->entropy.count += 1;
  layer->peak.count += 1;
}

template <class T>
void DiagnosticProbe::SeeKeys(int64_t l, int64_t shard, const T* k, int64_t rows, int64_t cols) {
  const std::vector<double>& q = queries_[shard];
  const int64_t dim = model_.HeadDim(l), kv_heads = cols / dim;
  const int64_t q_cols = std::ssize(q) / rows, heads = q_cols / dim;
  const int64_t group = heads / kv_heads;
  const int64_t window = model_.IsFull(l) || model_.ignore_window || model_.sliding_window == 0
                             ? rows
                             : model_.sliding_window;
  std::vector<double> scores;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t sequence = i / length_ * length_;  // its first row
      scores.clear();
      for (int64_t j = std::max(sequence, i - window + 1); j <= i; ++j) {
        double dot = 0;
        for (int64_t d = 0; d < dim; ++d) {
          dot += q[i * q_cols + h * dim + d] * static_cast<double>(k[j * cols + h / group * dim + d]);
        }
        scores.push_back(dot * model_.attention_scale);
      }
      AddQuery(scores, &layers_[l]);
    }
  }
}

// Mean cosine of pairs, from the sum of unit vectors: |sum|^2 is n plus twice the pairs' cosines.
template <class T>
void DiagnosticProbe::SeeHidden(const T* data, int64_t rows, int64_t cols) {
  std::vector<double> sum(cols);
  double n = 0;
  for (int64_t t = 0; t < rows; ++t) {
    const double norm = std::sqrt(Squares(data + t * cols, cols));
    if (!(norm > 0)) continue;
    for (int64_t i = 0; i < cols; ++i) sum[i] += static_cast<double>(data[t * cols + i]) / norm;
    n += 1;
  }
  if (n < 2) return;
  cosine_.sum += (Squares(sum.data(), cols) - n) / (n * (n - 1));
  cosine_.count += 1;
}

template <class T>
void DiagnosticProbe::SeeLogits(int64_t shard, const T* data, int64_t rows, int64_t cols) {
  if (shard == 0) tokens_.assign(rows, {-std::numeric_limits<double>::infinity(), 0, -1});
  RT_CHECK_EQ(rows, std::ssize(tokens_));
  logits2_.sum += Squares(data, rows * cols);
  logits2_.count += static_cast<double>(rows * cols);
  saturated_.count += static_cast<double>(rows * cols);
  const double cap = model_.final_logit_softcapping, much = kSaturated * cap;
  for (int64_t t = 0; t < rows; ++t) {
    Token& token = tokens_[t];
    const T* row = data + t * cols;
    const T* most = std::max_element(row, row + cols);
    const auto max = static_cast<double>(*most);
    if (max > token.max) {
      token.sum_exp *= std::exp(token.max - max);
      token.max = max;
      token.argmax = shard * cols + (most - row);
    }
    for (int64_t i = 0; i < cols; ++i) {
      token.sum_exp += std::exp(static_cast<double>(row[i]) - token.max);
      saturated_.sum += cap > 0 && std::fabs(static_cast<double>(row[i])) > much ? 1 : 0;
    }
  }
}

// Comes after the logits of all shards.
template <class T>
void DiagnosticProbe::SeeLosses(const T* data, int64_t rows) {
  for (const Token& token : tokens_) {
    const double logsumexp = token.max + std::log(token.sum_exp);
    logsumexp_.sum += logsumexp;
    logsumexp_.count += 1;
    logsumexp_max_ = std::max(logsumexp_max_, logsumexp);
    Prediction& prediction = predictions_[token.argmax];
    prediction.count += 1;
    prediction.probability += 1 / token.sum_exp;
  }
  for (int64_t first = 0; first < rows; first += length_) {
    double sum = 0;
    for (int64_t t = first; t < first + length_; ++t) sum += static_cast<double>(data[t]);
    sequence_losses_.push_back(sum / static_cast<double>(length_));
  }
}

PassDiagnostics DiagnosticProbe::Diagnostics() const {
  PassDiagnostics d;
  for (const Layer& layer : layers_) {
    d.layers.push_back(
        {.residual_rms = layer.output2.Root(),
         .attention_ratio = Ratio(layer.attention2.Root(), layer.attention_into2.Root()),
         .mlp_ratio = Ratio(layer.mlp2.Root(), layer.mlp_into2.Root()),
         .attention_logit = layer.logit,
         .attention_peak = layer.peak.value(),
         .attention_entropy = layer.entropy.value(),
         .gradient_norm = std::sqrt(layer.gradient2)});
  }
  d.embedding_rms = embedding2_.Root();
  d.embedding_gradient = std::sqrt(embedding_gradient2_);
  d.logit_rms = logits2_.Root();
  d.softcap_saturated = saturated_.value();
  d.logsumexp_mean = logsumexp_.value();
  d.logsumexp_max = logsumexp_max_;
  d.token_cosine = cosine_.value();
  const Prediction* most = nullptr;
  for (const auto& [token, prediction] : predictions_) {
    if (most != nullptr && prediction.count <= most->count) continue;
    most = &prediction;
    d.predicted_token = token;
  }
  if (most != nullptr) {
    d.predicted_share = static_cast<double>(most->count) / logsumexp_.count;
    d.predicted_probability = most->probability / static_cast<double>(most->count);
  }
  d.sequence_losses = sequence_losses_;
  return d;
}

}  // namespace retrace
