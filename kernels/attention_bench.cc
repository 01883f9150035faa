#include "kernels/attention_bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "kernels/attention.h"
#include "kernels/op_samples.h"

namespace retrace {
namespace {

// One row's operands, results and buffers.
class Bench {
 public:
  Bench(const AttentionBenchRow& row, Isa isa, int threads)
      : engine_(isa, threads),
        config_{.kind = row.kind,
                .sequences = row.sequences,
                .length = row.length,
                .query_heads = row.query_heads,
                .kv_heads = row.kv_heads,
                .dim = row.dim,
                .window = row.window,
                .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(row.dim))),
                .scores = Rounding::kNone,
                .softmax = Rounding::kNone,
                .output = Rounding::kNone,
                .grad_scores = Rounding::kNone,
                .grad_softmax = Rounding::kNone,
                .grad_query = Rounding::kNone} {
    const int64_t tokens = row.sequences * row.length;
    const int64_t queries = tokens * row.query_heads * row.dim;
    const int64_t keys = tokens * row.kv_heads * row.dim;
    for (std::vector<float>* x : {&q_, &doutput_}) *x = Values(queries);
    for (std::vector<float>* x : {&k_, &v_}) *x = Values(keys);
    for (std::vector<float>* x : {&output_, &dq_}) x->resize(queries);
    for (std::vector<float>* x : {&dk_, &dv_}) x->resize(keys);
  }

  void Measure(double seconds, AttentionBenchRow* row) {
    row->forward_seconds = Fastest(seconds / 2, [&] {
      AttentionForward<float>(engine_, config_, q_.data(), k_.data(), v_.data(), output_.data(),
                              &saved_, &scratch_);
    });
    row->backward_seconds = Fastest(seconds / 2, [&] {
      AttentionBackward<float>(engine_, config_, q_.data(), k_.data(), v_.data(), output_.data(),
                               doutput_.data(), saved_, dq_.data(), dk_.data(), dv_.data(),
                               &scratch_);
    });
  }

 private:
  std::vector<float> Values(int64_t count) { return SampleValues(1, ++stream_, count, false); }

  template <class F>
  static double Fastest(double seconds, F call) {
    double fastest = 1e300, spent = 0;
    for (int run = 0; run < 3 || spent < seconds; ++run) {
      const auto begin = std::chrono::steady_clock::now();
      call();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      fastest = std::min(fastest, took.count());
      spent += took.count();
    }
    return fastest;
  }

  Engine engine_;
  const AttentionConfig<float> config_;
  uint64_t stream_ = 0;
  std::vector<float> q_, k_, v_, output_, doutput_, dq_, dk_, dv_;
  AttentionSaved<float> saved_;
  AttentionScratch<float> scratch_;
};

}  // namespace

std::vector<AttentionBenchRow> AttentionsOf(const Recipe& recipe) {
  const ModelRecipe& model = recipe.model;
  std::vector<AttentionBenchRow> rows;
  for (const bool full : {false, true}) {
    bool occurs = false;
    for (int64_t l = 0; l < model.layers; ++l) occurs = occurs || model.IsFull(l) == full;
    for (const AttentionKind kind : {AttentionKind::kMaterialised, AttentionKind::kBlockwise}) {
      const std::string name = kind == AttentionKind::kBlockwise ? "blockwise" : "materialised";
      if (!occurs) continue;
      rows.push_back({.name = (full ? "full, " : "sliding, ") + name,
                      .kind = kind,
                      .sequences = recipe.data.micro_batch_size,
                      .length = recipe.data.sequence_length,
                      .query_heads = model.query_heads,
                      .kv_heads = full ? model.global_kv_heads : model.kv_heads,
                      .dim = full ? model.global_head_dim : model.head_dim,
                      .window = full || model.ignore_window ? 0 : model.sliding_window});
    }
  }
  return rows;
}

std::vector<AttentionBenchRow> AttentionBenchmark(std::vector<AttentionBenchRow> rows, Isa isa,
                                                  int threads, double seconds_per_row) {
  for (AttentionBenchRow& row : rows) Bench(row, isa, threads).Measure(seconds_per_row, &row);
  return rows;
}

}  // namespace retrace
