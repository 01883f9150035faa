// What the diagnostics of a pass say, against the op outputs themselves and against planted cases.
#include "replay/pass_diagnostics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/recipe_toml.h"
#include "replay/job.h"
#include "replay/solo_comm.h"
#include "tests/places.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

struct Output {
  std::vector<double> values;
  int64_t rows = 0, cols = 0;

  double Square() const {
    double sum = 0;
    for (double v : values) sum += v * v;
    return sum;
  }
};

// Shows another probe all that it sees, and keeps it.
class Capture : public Probe {
 public:
  explicit Capture(Probe* other) : other_(other) {}
  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override {
    Keep(name, data, rows, cols);
  }
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override {
    Keep(name, data, rows, cols);
  }

  const Output& Of(const std::string& name) const { return outputs_.at(name); }
  bool Has(const std::string& name) const { return outputs_.contains(name); }
  // Over all micro-batches.
  double Square(const std::string& op) const {
    double sum = 0;
    for (int mb = 0; Has(Name(mb, op)); ++mb) sum += Of(Name(mb, op)).Square();
    return sum;
  }
  double Elements(const std::string& op) const {
    double sum = 0;
    for (int mb = 0; Has(Name(mb, op)); ++mb) {
      sum += static_cast<double>(Of(Name(mb, op)).values.size());
    }
    return sum;
  }
  double Rms(const std::string& op) const { return std::sqrt(Square(op) / Elements(op)); }
  static std::string Name(int mb, const std::string& op) {
    return "mb" + std::to_string(mb) + "/" + op;
  }

 private:
  template <class T>
  void Keep(const std::string& name, const T* data, int64_t rows, int64_t cols) {
    other_->Op(name, data, rows, cols);
    outputs_[name] = {{data, data + rows * cols}, rows, cols};
  }

  Probe* other_;
  std::map<std::string, Output> outputs_;
};

// One update of the tiny recipe.
struct Lived {
  Recipe recipe;
  UpdateRecord record;
  PassDiagnostics diagnostics;
  std::unique_ptr<DiagnosticProbe> probe;
  std::unique_ptr<Capture> capture;
  int64_t shards = 0;
};

Lived Live(std::vector<std::string> sets) {
  sets.push_back("data.path=" + TestData("dataset/tiny"));
  Lived lived;
  lived.recipe =
      LoadRecipe(SourceDir() + "/examples/tiny.toml", sets).value();
  SoloComm comm;
  const auto job = Job::Make(lived.recipe, comm, {}).value();
  EXPECT_TRUE(job->StartFresh().ok());
  lived.shards = job->layout().shards();
  lived.probe = std::make_unique<DiagnosticProbe>(
      lived.shards, lived.recipe.data.sequence_length, [&] { return job->recipe().model; });
  lived.capture = std::make_unique<Capture>(lived.probe.get());
  job->set_probe(lived.capture.get());
  lived.record = job->Advance().value().result.record;
  lived.record = job->Advance().value().result.record;  // the second starts anew
  lived.diagnostics = lived.probe->Diagnostics();
  return lived;
}

void ExpectNear(double expected, double got) {
  EXPECT_NEAR(expected, got, 1e-9 * std::fabs(expected));
}

TEST(PassDiagnostics, ResidualsBranchesAndGradientsAreThoseOfTheOps) {
  for (const char* post_norm : {"true", "false"}) {
    const Lived lived = Live({std::string("model.post_norm=") + post_norm});
    const Capture& c = *lived.capture;
    const PassDiagnostics& d = lived.diagnostics;
    ASSERT_EQ(lived.recipe.model.layers, std::ssize(d.layers));
    std::string into = "embedding";
    const bool norm = lived.recipe.model.post_norm;
    ExpectNear(c.Rms("embedding"), d.embedding_rms);
    ExpectNear(std::sqrt(c.Square("embedding.grad")), d.embedding_gradient);
    for (size_t l = 0; l < d.layers.size(); ++l) {
      const std::string layer = "layer" + std::to_string(l) + "/";
      const std::string mid = layer + "residual_attention", out = layer + "output";
      ExpectNear(c.Rms(layer + (norm ? "post_attention_norm" : "o_proj")) / c.Rms(into),
                 d.layers[l].attention_ratio);
      ExpectNear(c.Rms(layer + (norm ? "post_mlp_norm" : "down_proj")) / c.Rms(mid),
                 d.layers[l].mlp_ratio);
      ExpectNear(c.Rms(out), d.layers[l].residual_rms);
      ExpectNear(std::sqrt(c.Square(out + ".grad")), d.layers[l].gradient_norm);
      into = out;
    }
  }
}

TEST(PassDiagnostics, SequenceLossesAverageToTheRecords) {
  const Lived lived = Live({});
  const std::vector<double>& losses = lived.diagnostics.sequence_losses;
  ASSERT_EQ(lived.recipe.data.SamplesPerStep(), std::ssize(losses));
  double sum = 0;
  for (double loss : losses) sum += loss;
  EXPECT_NEAR(lived.record.loss, sum / static_cast<double>(losses.size()), 1e-5);
}

TEST(PassDiagnostics, LogitsAreThoseOfTheOps) {
  const Lived lived = Live({"model.final_logit_softcapping=0.5"});
  const Capture& c = *lived.capture;
  double square = 0, count = 0, saturated = 0, sum = 0, most = -INFINITY, tokens = 0;
  std::map<int64_t, int64_t> predicted;
  std::map<int64_t, double> probability;
  for (int mb = 0; c.Has(Capture::Name(mb, "loss")); ++mb) {
    const int64_t rows = c.Of(Capture::Name(mb, "logits.grad/shard0")).rows;
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<double> row;
      for (int64_t shard = 0; shard < lived.shards; ++shard) {
        const Output& o = c.Of(Capture::Name(mb, "logits/shard" + std::to_string(shard)));
        row.insert(row.end(), o.values.begin() + t * o.cols,
                   o.values.begin() + (t + 1) * o.cols);
      }
      double exps = 0;
      for (double z : row) {
        square += z * z;
        saturated += std::fabs(z) > 0.45;
        exps += std::exp(z);
      }
      const auto best = std::max_element(row.begin(), row.end());
      const int64_t token = best - row.begin();
      ++predicted[token];
      probability[token] += std::exp(*best) / exps;
      count += static_cast<double>(row.size());
      sum += std::log(exps);
      most = std::max(most, std::log(exps));
      ++tokens;
    }
  }
  const PassDiagnostics& d = lived.diagnostics;
  ExpectNear(std::sqrt(square / count), d.logit_rms);
  ExpectNear(saturated / count, d.softcap_saturated);
  EXPECT_GT(d.softcap_saturated, 0);
  ExpectNear(sum / tokens, d.logsumexp_mean);
  ExpectNear(most, d.logsumexp_max);
  const auto often = std::max_element(
      predicted.begin(), predicted.end(),
      [](const auto& a, const auto& b) { return a.second < b.second; });
  EXPECT_EQ(often->first, d.predicted_token);
  ExpectNear(static_cast<double>(often->second) / tokens, d.predicted_share);
  ExpectNear(probability[often->first] / static_cast<double>(often->second),
             d.predicted_probability);
}

TEST(PassDiagnostics, TheTokenCosineIsTheMeanOverPairs) {
  const Lived lived = Live({});
  double mean = 0;
  int batches = 0;
  for (; lived.capture->Has(Capture::Name(batches, "final_norm")); ++batches) {
    const Output& o = lived.capture->Of(Capture::Name(batches, "final_norm"));
    const auto dot = [&](int64_t a, int64_t b) {
      double sum = 0;
      for (int64_t i = 0; i < o.cols; ++i) sum += o.values[a * o.cols + i] * o.values[b * o.cols + i];
      return sum;
    };
    double sum = 0, pairs = 0;
    for (int64_t a = 0; a < o.rows; ++a) {
      for (int64_t b = 0; b < a; ++b) {
        sum += dot(a, b) / std::sqrt(dot(a, a) * dot(b, b));
        ++pairs;
      }
    }
    mean += sum / pairs;
  }
  EXPECT_NEAR(mean / batches, lived.diagnostics.token_cosine, 1e-9);
}

// Without scale all keys are alike: a query that sees n of them gives each 1/n.
TEST(PassDiagnostics, AttentionWithoutScaleIsUniformOverTheKeysThatAQuerySees) {
  const Lived lived = Live({"model.attention_scale=0"});
  const ModelRecipe& model = lived.recipe.model;
  std::set<bool> kinds;
  for (int64_t l = 0; l < model.layers; ++l) {
    double entropy = 0, peak = 0, queries = 0;
    for (int64_t i = 1; i < lived.recipe.data.sequence_length; ++i) {
      const auto keys = static_cast<double>(
          model.IsFull(l) ? i + 1 : std::min(i + 1, model.sliding_window));
      if (keys < 2) continue;
      entropy += std::log(keys);
      peak += 1 / keys;
      ++queries;
    }
    EXPECT_NEAR(entropy / queries, lived.diagnostics.layers[l].attention_entropy, 1e-12);
    EXPECT_NEAR(peak / queries, lived.diagnostics.layers[l].attention_peak, 1e-12);
    EXPECT_EQ(0, lived.diagnostics.layers[l].attention_logit);
    kinds.insert(model.IsFull(l));
  }
  EXPECT_EQ(2u, kinds.size()) << "the tiny recipe has sliding and full layers";
}

// Against the public formula, head by head: softmax(scale q k).
TEST(PassDiagnostics, AttentionLogitsArePeaksOfScaledProducts) {
  const Lived lived = Live({});
  const ModelRecipe& model = lived.recipe.model;
  const int64_t length = lived.recipe.data.sequence_length;
  const Output& q = lived.capture->Of("mb0/layer0/q_rope/shard0");
  const Output& k = lived.capture->Of("mb0/layer0/k_rope/shard0");
  const int64_t dim = model.HeadDim(0);
  double most = 0;
  for (int64_t i = 0; i < length; ++i) {  // of the first sequence and head: a lower bound
    for (int64_t j = std::max<int64_t>(0, i - model.sliding_window + 1); j <= i; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < dim; ++d) {
        dot += q.values[i * q.cols + d] * k.values[j * k.cols + d];
      }
      most = std::max(most, std::fabs(dot * model.attention_scale));
    }
  }
  EXPECT_GE(lived.diagnostics.layers[0].attention_logit, most * (1 - 1e-12));
  EXPECT_GT(most, 0);
}

}  // namespace
}  // namespace retrace
