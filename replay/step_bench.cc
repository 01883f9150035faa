#include "replay/step_bench.h"

#include <algorithm>
#include <chrono>

namespace retrace {
namespace {

using Clock = std::chrono::steady_clock;

double Seconds(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Gives the time since the op before to the phase of the op that has just finished.
class PhaseProbe : public Probe {
 public:
  // Where `spans` is given, every op's time is appended to it.
  explicit PhaseProbe(std::vector<OpSpan>* spans) : spans_(spans), origin_(Clock::now()) {}

  void Begin() {
    seconds_ = {};
    was_micro_batch_ = false;
    last_ = Clock::now();
  }
  StepSeconds End() {
    const Clock::time_point now = Clock::now();
    Span(kAfterLastOp, now);
    seconds_.optimizer += Seconds(last_, now);
    return seconds_;
  }
  void Forget() {
    if (spans_) spans_->clear();
  }

  void Op(const std::string& name, const float*, int64_t, int64_t) override { Note(name); }
  void Op(const std::string& name, const double*, int64_t, int64_t) override { Note(name); }

 private:
  void Note(const std::string& name) {
    const Clock::time_point now = Clock::now();
    if (name.starts_with("optimizer/")) return;  // belongs to what follows the last op
    const bool micro_batch = name.starts_with("mb");
    const bool gradient = name.find(".grad") != std::string::npos;
    double& phase = !micro_batch ? seconds_.evaluation
                    : gradient   ? seconds_.backward
                                 : seconds_.forward;
    Span(was_micro_batch_ && !micro_batch ? kAfterLastOp : name, now);
    // Before evaluation's first op lies what follows the last micro-batch.
    (was_micro_batch_ && !micro_batch ? seconds_.optimizer : phase) += Seconds(last_, now);
    was_micro_batch_ = micro_batch;
    last_ = now;
  }

  void Span(const std::string& name, Clock::time_point now) {
    if (spans_) spans_->push_back({name, Seconds(origin_, last_), Seconds(last_, now)});
  }

  static constexpr char kAfterLastOp[] = "lanes, norm, clip, AdamW, digest";
  std::vector<OpSpan>* const spans_;
  const Clock::time_point origin_;
  StepSeconds seconds_;
  bool was_micro_batch_ = false;
  Clock::time_point last_;
};

// Shapes, each once.
class ProductList {
 public:
  void Add(const std::string& name, const char* layout, int64_t products, int64_t m, int64_t n,
           int64_t k) {
    const auto same = [&](const GemmBenchRow& row) {
      return row.layout == layout && row.products == products && row.m == m && row.n == n &&
             row.k == k;
    };
    if (std::any_of(rows_.begin(), rows_.end(), same)) return;
    rows_.push_back({.name = name, .layout = layout, .products = products, .m = m, .n = n, .k = k});
  }
  // y = x W^T of `tokens` rows, and both of its gradients.
  void AddLinear(const std::string& name, int64_t tokens, int64_t outputs, int64_t inputs) {
    Add(name, "NT", 1, tokens, outputs, inputs);
    Add(name + " dX", "NN", 1, tokens, inputs, outputs);
    Add(name + " dW", "TN", 1, outputs, inputs, tokens);
  }
  std::vector<GemmBenchRow> Take() { return std::move(rows_); }

 private:
  std::vector<GemmBenchRow> rows_;
};

}  // namespace

Result<std::vector<StepSeconds>> MeasureSteps(Job& job, int updates,
                                              const std::function<void(int done)>& done,
                                              std::vector<OpSpan>* spans) {
  std::vector<StepSeconds> steps;
  PhaseProbe probe(spans);
  job.set_probe(&probe);
  for (int i = 0; i <= updates; ++i) {
    probe.Begin();
    RT_ASSIGN_OR_RETURN(const Job::Step step, job.Advance());
    StepSeconds seconds = probe.End();
    if (step.result.action == UpdateAction::kHalted) {
      job.set_probe(nullptr);
      return FailedError("an update halted: " + step.result.reason);
    }
    // Advance has taken the digest once; what that took is measured by taking it again.
    const Clock::time_point begin = Clock::now();
    RT_ASSIGN_OR_RETURN(const Digest digest, job.StateDigestNow());
    (void)digest;
    seconds.digest = Seconds(begin, Clock::now());
    seconds.optimizer = std::max(0.0, seconds.optimizer - seconds.digest);
    if (i > 0) {
      steps.push_back(seconds);
    } else {
      probe.Forget();
    }
    if (job.is_rank0() && done) done(i);
  }
  job.set_probe(nullptr);
  return steps;
}

std::vector<GemmBenchRow> ProductsOf(const Recipe& recipe) {
  const ModelRecipe& model = recipe.model;
  const int64_t V = recipe.topology.virtual_shards, S = recipe.data.sequence_length;
  const int64_t sequences = recipe.data.micro_batch_size, tokens = sequences * S;
  ProductList list;
  for (int64_t l = 0; l < model.layers; ++l) {
    const std::string kind = model.IsFull(l) ? "full " : "";
    const int64_t D = model.HeadDim(l), heads = model.query_heads / V;
    const int64_t kv_heads = std::max<int64_t>(1, model.KvHeads(l) / V);
    list.AddLinear(kind + "q_proj", tokens, heads * D, model.hidden_size);
    list.AddLinear(kind + "k_proj", tokens, kv_heads * D, model.hidden_size);
    list.AddLinear(kind + "o_proj", tokens, model.hidden_size, heads * D);
    list.Add(kind + "scores", "NT", sequences * heads, S, S, D);
    list.Add(kind + "p v, dQ", "NN", sequences * heads, S, D, S);
    list.Add(kind + "dK, dV", "TN", sequences * heads, S, D, S);
  }
  list.AddLinear("gate_proj", tokens, model.intermediate_size / V, model.hidden_size);
  list.AddLinear("down_proj", tokens, model.hidden_size, model.intermediate_size / V);
  list.AddLinear("head", tokens, model.vocab_size / V, model.hidden_size);
  return list.Take();
}

}  // namespace retrace
