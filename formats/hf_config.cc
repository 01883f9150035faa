#include "formats/hf_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

// What the public model always does.
Status CheckExpressible(const ModelRecipe& model) {
  const auto refuse = [](const char* key, const std::string& value) {
    return UnsupportedError(
        fmt::format("model.{} = {}: Gemma 4 in transformers has no such switch, so there is no "
                    "config.json for this model",
                    key, value));
  };
  for (const auto& [key, on] : {std::pair("qk_norm", model.qk_norm),
                                {"v_norm", model.v_norm},
                                {"pre_norm", model.pre_norm},
                                {"post_norm", model.post_norm},
                                {"embed_scale", model.embed_scale}}) {
    if (!on) return refuse(key, "false");
  }
  if (model.attention_scale != 1.0) {
    return refuse("attention_scale", fmt::format("{}", model.attention_scale));
  }
  return {};
}

}  // namespace

Result<std::string> HfConfigJson(const Recipe& recipe) {
  const ModelRecipe& m = recipe.model;
  RT_RETURN_IF_ERROR(CheckExpressible(m));
  Json layer_types = Json::array();
  for (int64_t l = 0; l < m.layers; ++l) {
    layer_types.push_back(m.IsFull(l) ? "full_attention" : "sliding_attention");
  }
  const Json json = {
      {"architectures", Json::array({"Gemma4ForCausalLM"})},
      {"model_type", "gemma4_text"},
      {"dtype", "float32"},
      {"vocab_size", m.vocab_size},
      {"hidden_size", m.hidden_size},
      {"intermediate_size", m.intermediate_size},
      {"num_hidden_layers", m.layers},
      {"num_attention_heads", m.query_heads},
      {"num_key_value_heads", m.kv_heads},
      {"num_global_key_value_heads", m.global_kv_heads},
      {"head_dim", m.head_dim},
      {"global_head_dim", m.global_head_dim},
      {"attention_k_eq_v", m.attention_k_eq_v},
      {"layer_types", layer_types},
      {"sliding_window", m.sliding_window},
      {"rope_parameters",
       {{"sliding_attention", {{"rope_type", "default"}, {"rope_theta", m.sliding_rope_theta}}},
        {"full_attention",
         {{"rope_type", "proportional"},
          {"rope_theta", m.full_rope_theta},
          {"partial_rotary_factor", m.full_partial_rotary_factor}}}}},
      {"rms_norm_eps", m.rms_norm_eps},
      {"hidden_activation", "gelu_pytorch_tanh"},
      {"final_logit_softcapping",
       m.final_logit_softcapping > 0 ? Json(m.final_logit_softcapping) : Json()},
      {"tie_word_embeddings", m.tie_word_embeddings},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"hidden_size_per_layer_input", 0},
      {"vocab_size_per_layer_input", m.vocab_size},
      {"num_kv_shared_layers", 0},
      {"use_double_wide_mlp", false},
      {"enable_moe_block", false},
      {"use_bidirectional_attention", Json()},
      {"max_position_embeddings", std::max<int64_t>(131072, recipe.data.sequence_length)},
      {"initializer_range", recipe.init.std},
      {"pad_token_id", m.pad_token_id < 0 ? Json() : Json(m.pad_token_id)},
      {"use_cache", false}};
  return json.dump(2) + "\n";
}

}  // namespace retrace
