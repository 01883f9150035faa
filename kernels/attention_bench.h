// Speed of attention, forward and backward, in a model's shapes. Used by `retrace bench attention`.
// Measures only: no result is kept. Thread-safety: none needed; owns what it uses.
#ifndef RETRACE_KERNELS_ATTENTION_BENCH_H_
#define RETRACE_KERNELS_ATTENTION_BENCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/recipe.h"
#include "kernels/isa.h"

namespace retrace {

struct AttentionBenchRow {
  std::string name;  // "sliding" or "full", and the kind of attention
  AttentionKind kind = AttentionKind::kMaterialised;
  int64_t sequences = 1, length = 1, query_heads = 1, kv_heads = 1, dim = 1;
  int64_t window = 0;  // 0: every key before the query
  double forward_seconds = 0, backward_seconds = 0;  // of the fastest of several calls
};

// Of one micro-batch: each kind of layer that the recipe has, by both kinds of attention.
std::vector<AttentionBenchRow> AttentionsOf(const Recipe& recipe);

// FP32, each row measured for about `seconds_per_row`: `rows` with seconds set.
std::vector<AttentionBenchRow> AttentionBenchmark(std::vector<AttentionBenchRow> rows, Isa isa,
                                                  int threads, double seconds_per_row);

}  // namespace retrace

#endif  // RETRACE_KERNELS_ATTENTION_BENCH_H_
