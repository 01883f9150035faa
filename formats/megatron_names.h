// Megatron's names of a Gemma 4's tensors, and where in them the tensors are that Hugging Face's
// layout and retrace have apart: q, k and v in the fused linear_qkv, gate and up in linear_fc1.
// Used by diff. A pure function; thread-safe.
#ifndef RETRACE_FORMATS_MEGATRON_NAMES_H_
#define RETRACE_FORMATS_MEGATRON_NAMES_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/status.h"

namespace retrace {

// Rows of a stored tensor that make up one of ours.
struct MegatronTensor {
  std::string name;    // "model.layers.0.self_attn.q_proj.weight"
  std::string stored;  // "decoder.layers.0.self_attention.linear_qkv.weight"
  std::vector<std::pair<int64_t, int64_t>> rows;  // [first, last), in order; empty: all of it
};

bool HasMegatronNames(const std::map<std::string, std::vector<int64_t>>& shapes);

// All tensors of a file, by shape. Of whole (TP 1) files: linear_qkv holds, for each KV head, the
// query heads that use it, k, v; linear_fc1 gate, then up. What has no counterpart keeps its name.
// Errors: kDamaged where a fused tensor's rows are not what its neighbours' shapes say.
// Source  megatron-bridge 0.6.2, models/gemma; megatron-core 0.19.2, transformer/attention
Result<std::vector<MegatronTensor>> SplitMegatronTensors(
    const std::map<std::string, std::vector<int64_t>>& shapes);

}  // namespace retrace

#endif  // RETRACE_FORMATS_MEGATRON_NAMES_H_
