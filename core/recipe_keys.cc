#include "core/recipe_keys.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/freeze_rule.h"
#include "core/nearest_name.h"

namespace retrace {
namespace {

constexpr int64_t kMany = int64_t{1} << 40;        // updates, samples
constexpr int64_t kSize = (int64_t{1} << 31) - 1;  // one dimension of a tensor
constexpr double kLarge = 1e30;                    // fits FP32, into which such values are rounded
constexpr double kTiny = 1e-37;                    // a normal number of FP32

// Spells a member once: its dotted name and its accessor.
#define AT(member) \
#member, [](auto& recipe) -> auto& { return recipe.member; }

template <class Member>
Key Base(const char* name, Member, KeyKind kind, const char* doc) {
  Key key;
  key.name = name;
  key.doc = doc;
  key.kind = kind;
  return key;
}

template <class Member>
Key Flag(const char* name, Member member, const char* doc) {
  Key key = Base(name, member, KeyKind::kBool, doc);
  key.get = [member](const Recipe& r) -> KeyValue { return member(r); };
  key.set = [member](const KeyValue& value, Recipe* r) { member(*r) = std::get<bool>(value); };
  return key;
}

template <class Member>
Key Integer(const char* name, Member member, int64_t min, int64_t max, const char* doc) {
  Key key = Base(name, member, KeyKind::kInteger, doc);
  key.integer_min = min;
  key.integer_max = max;
  key.get = [member](const Recipe& r) -> KeyValue { return static_cast<int64_t>(member(r)); };
  key.set = [member](const KeyValue& value, Recipe* r) {
    auto& target = member(*r);
    target = static_cast<std::remove_reference_t<decltype(target)>>(std::get<int64_t>(value));
  };
  return key;
}

template <class Member>
Key Real(const char* name, Member member, double min, double max, const char* doc) {
  Key key = Base(name, member, KeyKind::kReal, doc);
  key.real_min = min;
  key.real_max = max;
  key.get = [member](const Recipe& r) -> KeyValue { return member(r); };
  key.set = [member](const KeyValue& value, Recipe* r) { member(*r) = std::get<double>(value); };
  return key;
}

template <class Member>
Key Text(const char* name, Member member, const char* doc) {
  Key key = Base(name, member, KeyKind::kText, doc);
  key.get = [member](const Recipe& r) -> KeyValue { return member(r); };
  key.set = [member](const KeyValue& value, Recipe* r) {
    member(*r) = std::get<std::string>(value);
  };
  return key;
}

size_t IndexOf(const std::vector<std::string>& names, const std::string& name) {
  const size_t i = std::find(names.begin(), names.end(), name) - names.begin();
  RT_CHECK(i < names.size());
  return i;
}

// The choices in the order of the enumeration.
template <class Member>
Key Choice(const char* name, Member member, std::vector<std::string> choices, const char* doc) {
  Key key = Base(name, member, KeyKind::kChoice, doc);
  key.choices = choices;
  key.get = [member, choices](const Recipe& r) -> KeyValue {
    return choices[static_cast<size_t>(member(r))];
  };
  key.set = [member, choices](const KeyValue& value, Recipe* r) {
    auto& target = member(*r);
    target = static_cast<std::remove_reference_t<decltype(target)>>(
        IndexOf(choices, std::get<std::string>(value)));
  };
  return key;
}

Key InputOnly(std::string_view name, KeyKind kind, const char* default_note, const char* doc) {
  Key key;
  key.name = std::string(name);
  key.kind = kind;
  key.input_only = true;
  key.default_note = default_note;
  key.doc = doc;
  return key;
}

Key Required(Key key) {
  key.required = true;
  return key;
}

Key Noted(Key key, const char* default_note) {
  key.default_note = default_note;
  return key;
}

Key Open(Key key, bool min_open, bool max_open) {
  key.real_min_open = min_open;
  key.real_max_open = max_open;
  return key;
}

Key Quiet(Key key) {
  key.quiet = true;
  return key;
}

// Keys that only interventions used to change; recipes may give them too.
Key FreezeKey() {
  Key key;
  key.name = "optimizer.freeze";
  key.doc = "tensors whose parameters stay: a glob over their names; whether their gradient counts "
            "in the norm; whether m, v and t go on or stay. Of two that match, the last";
  key.kind = KeyKind::kTexts;
  key.form = "GLOB,norm=counted|left-out,moments=move|stay";
  key.check_text = [](const std::string& text) { return ParseFreezeRule(text).status(); };
  key.get = [](const Recipe& r) -> KeyValue {
    std::vector<std::string> list;
    for (const FreezeRule& rule : r.optimizer.freeze) list.push_back(FreezeRuleText(rule));
    return list;
  };
  key.set = [](const KeyValue& value, Recipe* r) {
    r->optimizer.freeze.clear();
    for (const std::string& text : std::get<std::vector<std::string>>(value)) {
      r->optimizer.freeze.push_back(ParseFreezeRule(text).value());
    }
  };
  return key;
}

Key LayerTypesKey() {
  Key key;
  key.name = "model.layer_types";
  key.doc = "the kind of each layer, in place of the two keys above";
  key.kind = KeyKind::kChoices;
  key.choices = {"sliding", "full"};
  key.default_note = "from the two keys above";
  const std::vector<std::string> names = key.choices;
  key.get = [names](const Recipe& r) -> KeyValue {
    std::vector<std::string> list;
    for (LayerKind kind : r.model.layer_types) list.push_back(names[static_cast<size_t>(kind)]);
    return list;
  };
  key.set = [names](const KeyValue& value, Recipe* r) {
    r->model.layer_types.clear();
    for (const std::string& name : std::get<std::vector<std::string>>(value)) {
      r->model.layer_types.push_back(static_cast<LayerKind>(IndexOf(names, name)));
    }
  };
  return key;
}

// One number stands for every layer, and is the canonical form where all are equal.
Key LayerScalarKey() {
  Key key;
  key.name = "model.layer_scalar";
  key.doc =
      "factor on the residual stream after each layer; not trained. One number, or a list with "
      "one per layer";
  key.kind = KeyKind::kRealOrReals;
  key.real_min = -kLarge;
  key.real_max = kLarge;
  key.default_note = "1.0";
  key.get = [](const Recipe& r) -> KeyValue {
    const std::vector<double>& list = r.model.layer_scalar;
    const bool equal =
        std::adjacent_find(list.begin(), list.end(), std::not_equal_to<>()) == list.end();
    if (equal && !list.empty() && static_cast<int64_t>(list.size()) == r.model.layers) {
      return list[0];
    }
    return list;
  };
  key.set = [](const KeyValue& value, Recipe* r) {
    if (const double* one = std::get_if<double>(&value)) {
      r->model.layer_scalar.assign(r->model.layers, *one);
    } else {
      r->model.layer_scalar = std::get<std::vector<double>>(value);
    }
  };
  return key;
}

Key WindowKey() {
  Key key;
  key.name = "store.window";
  key.doc = "positions [first, last] whose states are all kept; [] for none";
  key.kind = KeyKind::kIntegerPair;
  key.integer_min = 0;
  key.integer_max = kMany;
  key.get = [](const Recipe& r) -> KeyValue {
    if (r.store.window_last < r.store.window_first) return std::vector<int64_t>{};
    return std::vector<int64_t>{r.store.window_first, r.store.window_last};
  };
  key.set = [](const KeyValue& value, Recipe* r) {
    const auto& pair = std::get<std::vector<int64_t>>(value);
    r->store.window_first = pair.empty() ? 0 : pair[0];
    r->store.window_last = pair.empty() ? -1 : pair[1];
  };
  return key;
}

using KeyList = std::vector<Key>;

void Append(KeyList* list, KeyList more) {
  for (Key& key : more) list->push_back(std::move(key));
}

KeyList RunKeys() {
  Key preset =
      InputOnly(kPresetKey, KeyKind::kChoice, "none",
                "the framework whose defaults fill in what the recipe leaves out; see below");
  preset.choices = {"automodel", "megatron"};
  return {preset, Text(AT(name), "free text"),
          Required(Integer(AT(steps), 1, kMany, "updates of the run"))};
}

KeyList ShapeKeys() {
  return {
      Required(Integer(AT(model.vocab_size), 1, kSize, "tokens of the vocabulary")),
      Required(Integer(AT(model.hidden_size), 1, kSize, "elements of the residual stream")),
      Required(Integer(AT(model.intermediate_size), 1, kSize, "columns of the MLP")),
      Required(Integer(AT(model.layers), 1, 1024, "layers")),
      Required(Integer(AT(model.query_heads), 1, 65536, "query heads of every layer")),
      Required(Integer(AT(model.kv_heads), 1, 65536,
                       "KV heads of sliding layers, and of full ones without attention_k_eq_v")),
      Noted(Integer(AT(model.global_kv_heads), 1, 65536,
                    "KV heads of full layers with attention_k_eq_v"),
            "model.kv_heads"),
      Required(Integer(AT(model.head_dim), 2, 65536, "elements of a head in sliding layers; even")),
      Noted(Integer(AT(model.global_head_dim), 2, 65536, "elements of a head in full layers; even"),
            "model.head_dim"),
      Flag(AT(model.attention_k_eq_v), "full layers have no v_proj: the value is the raw key"),
  };
}

KeyList PatternKeys() {
  Key every = InputOnly(kFullEveryKey, KeyKind::kInteger, "6",
                        "layer l (from 0) is full where l + 1 is a multiple of this; 0: none");
  every.integer_max = 1024;
  return {every,
          InputOnly(kLastFullKey, KeyKind::kBool, "true",
                    "the last layer is full whatever the pattern, as transformers has it"),
          LayerTypesKey(),
          Required(Integer(AT(model.sliding_window), 1, kSize,
                           "keys that a query of a sliding layer sees, itself included"))};
}

KeyList ModelKeys() {
  return {
      Open(Real(AT(model.sliding_rope_theta), 0, kLarge, "RoPE base of sliding layers"), true,
           false),
      Open(Real(AT(model.full_rope_theta), 0, kLarge, "RoPE base of full layers"), true, false),
      Open(Real(AT(model.full_partial_rotary_factor), 0, 1,
                "share of a full layer's head that is rotated"),
           true, false),
      Flag(AT(model.rope_angle_fp32),
           "RoPE angle = fp32(position) times fp32(inverse frequency), as public code; else FP64"),
      Real(AT(model.rms_norm_eps), kTiny, 1, "added to the mean square inside the root"),
      Real(AT(model.final_logit_softcapping), 0, kLarge, "c of c tanh(z / c) on logits; 0: off"),
      Flag(AT(model.tie_word_embeddings), "the head is the embedding"),
      Flag(AT(model.embed_scale), "looked-up rows are multiplied by sqrt(hidden_size)"),
      Choice(AT(model.embed_scale_rounding), {"none", "bf16"},
             "rounding of sqrt(hidden_size) itself: transformers rounds it to the weights' type"),
      Real(AT(model.attention_scale), 0, kLarge, "factor on q k^T"),
      Flag(AT(model.qk_norm), "q_norm and k_norm"),
      Flag(AT(model.v_norm), "the weightless norm of values"),
      Flag(AT(model.pre_norm), "input_layernorm and pre_feedforward_layernorm"),
      Flag(AT(model.post_norm), "post_attention_layernorm and post_feedforward_layernorm"),
      LayerScalarKey(),
      Choice(AT(model.attention), {"materialised", "blockwise"},
             "how attention is computed (clause 9); changes bits"),
      Integer(AT(model.pad_token_id), -1, kSize, "the pad token; -1: none"),
      Flag(AT(model.pad_lookup_gradient),
           "false: the pad row gets no gradient from look-ups (from the head it does)"),
  };
}

// Switches that a run may throw midway: its tensors stay.
KeyList BypassKeys() {
  KeyList keys = {
      Flag(AT(model.bypass_qk_norm),
           "leave q_norm and k_norm out of the computation; their weights stay and are not updated"),
      Flag(AT(model.bypass_pre_norm), "the same of the norms at a branch's entry"),
      Flag(AT(model.bypass_post_norm), "the same of the norms at a branch's end"),
      Real(AT(model.qk_norm_gain), 0, kLarge, "factor on the outputs of q_norm and k_norm"),
      Choice(AT(model.qk_norm_gradient), {"all-shards", "first-shard"},
             "what the gradients of q_norm and k_norm are summed over: first-shard as on the first "
             "rank of a framework that does not reduce them (clause 7)"),
      Flag(AT(model.ignore_window),
           "sliding layers see all keys before, as with a fused softmax that knows no window"),
      Real(AT(model.z_loss), 0, kLarge,
           "factor on logsumexp squared, added to what is minimised; the recorded loss is the cross "
           "entropy alone"),
  };
  for (Key& key : keys) key = Quiet(std::move(key));
  return keys;
}

KeyList InitKeys() {
  return {
      Choice(AT(init.scheme), {"hf", "residual-scaled"},
             "hf: every matrix N(0, std); residual-scaled: o_proj and down_proj N(0, std / sqrt(2 "
             "layers)). Norm weights are 1"),
      Real(AT(init.std), 0, kLarge, "standard deviation of matrices"),
      Real(AT(init.embedding_std), 0, kLarge, "standard deviation of the embedding"),
      Flag(AT(init.zero_pad_row), "the pad token's embedding row starts as zeros"),
      Integer(AT(init.seed), 0, std::numeric_limits<int64_t>::max(), "seed of initial values"),
  };
}

KeyList DataKeys() {
  return {
      Required(Text(AT(data.path), "prefix of the dataset's .bin and .idx files")),
      Quiet(Text(AT(data.identity),
                 "digest that the dataset has to have (of its .idx and the size of its .bin); "
                 "empty: any")),
      Text(AT(data.split), "weights of the train, validation and test parts"),
      Required(Integer(AT(data.sequence_length), 1, int64_t{1} << 24, "tokens of a sample")),
      Integer(AT(data.seed), 0, std::numeric_limits<uint32_t>::max(), "seed of the shuffles"),
      Integer(AT(data.micro_batch_size), 1, int64_t{1} << 20, "sequences of a micro-batch"),
      Integer(AT(data.micro_batches), 1, int64_t{1} << 20, "micro-batches of an update"),
      Integer(AT(data.evaluation_samples), 0, int64_t{1} << 20,
              "validation samples that are scored at every update; 0: none"),
  };
}

KeyList OptimizerKeys() {
  return {
      Open(Real(AT(optimizer.beta1), 0, 1, "decay of Adam's m"), false, true),
      Open(Real(AT(optimizer.beta2), 0, 1, "decay of Adam's v"), false, true),
      Real(AT(optimizer.eps), kTiny, kLarge, "added to sqrt(v) after bias correction"),
      Real(AT(optimizer.weight_decay), 0, kLarge, "decoupled decay, times the learning rate"),
      Choice(AT(optimizer.decay_on), {"all", "matrices"},
             "what decays: every parameter, or those with two dimensions"),
      Real(AT(optimizer.clip), 0, kLarge, "largest global gradient norm; 0: no clipping"),
      Choice(
          AT(optimizer.loss_division), {"step-tokens", "per-micro-batch"},
          "the loss is the sum over the tokens of the update divided by their number, or the mean "
          "over micro-batches of their means"),
      Choice(AT(optimizer.non_finite), {"halt", "skip", "record"},
             "where the gradient norm is not finite: stop before the update, skip it, or go on"),
  };
}

KeyList OptimizerRuleKeys() {
  KeyList keys = {
      Text(AT(optimizer.decay_only), "glob over the names of the tensors that decay"),
      Choice(AT(optimizer.clip_scope), {"global", "layer", "tensor", "embedding-rows"},
             "whose norm is clipped: the whole gradient's; each layer's and, outside of layers, each "
             "tensor's; each tensor's; each row's of the embedding and an untied head, and that of "
             "all other tensors together"),
      Choice(AT(optimizer.clip_rule), {"fixed", "ema", "z-score"},
             "the threshold: optimizer.clip; clip_factor times the mean of past norms; clip_z "
             "standard deviations above it (clause 11)"),
      Real(AT(optimizer.clip_factor), 0, kLarge, "of clip_rule = ema"),
      Real(AT(optimizer.clip_z), 0, kLarge, "of clip_rule = z-score"),
      Open(Real(AT(optimizer.clip_decay), 0, 1, "of the mean and the variance of past norms"), false,
           true),
      Integer(AT(optimizer.clip_warmup), 0, kMany,
              "updates, from the rule's first, during which clip_warmup_norm is the threshold"),
      Real(AT(optimizer.clip_warmup_norm), 0, kLarge, "0: no clipping during the warm-up"),
      Real(AT(optimizer.update_clip), 0, kLarge,
           "largest root mean square of a tensor's g / sqrt(v); 0: no such clipping"),
      Choice(AT(optimizer.bias_correction), {"both", "m", "v", "none"},
             "which of Adam's moments are divided by 1 - beta^t"),
      FreezeKey(),
  };
  for (Key& key : keys) key = Quiet(std::move(key));
  return keys;
}

KeyList ScheduleKeys() {
  return {
      Choice(AT(schedule.shape), {"constant", "cosine"}, "what follows the warm-up"),
      Real(AT(schedule.initial), 0, kLarge, "learning rate lr(0), where the warm-up starts"),
      Real(AT(schedule.peak), 0, kLarge, "learning rate at the end of the warm-up"),
      Real(AT(schedule.minimum), 0, kLarge, "learning rate at the end of the cosine, and after"),
      Integer(AT(schedule.warmup_steps), 0, kMany, "updates of the linear warm-up"),
      Integer(AT(schedule.total_steps), 1, kMany, "updates at the end of the cosine"),
      Choice(AT(schedule.indexing), {"step", "step-minus-one"},
             "update n (from 1) applies lr(n), or lr(n - 1) as AutoModel and Megatron do"),
      Quiet(Integer(AT(schedule.hold), 0, kMany,
                    "updates after this one, by the schedule's count, apply its learning rate; 0: off")),
  };
}

KeyList NumericsKeys() {
  KeyList keys = {
      Choice(AT(numerics.level), {"portable", "native"},
             "portable: the bits of NUMERICS.md, the same on every machine; native: matrix products "
             "and functions of the forward and backward pass by LibTorch (MKL on processors), the "
             "same bits for the same processor model, libraries and native_threads"),
      Integer(AT(numerics.native_threads), 1, 1024,
              "threads of each rank within the libraries of level native, on which its bits depend"),
  };
  for (Key& key : keys) key = Quiet(std::move(key));
  return keys;
}

KeyList TopologyKeys() {
  return {
      Integer(AT(topology.virtual_shards), 1, 256,
              "V: shards that the model is always computed as "
              "(clause 7); a power of two"),
      Integer(AT(topology.lanes), 1, int64_t{1} << 20,
              "G: lanes of gradient accumulation (clause 8); a power of two"),
  };
}

Key FormatKey(const std::string& name, std::string doc,
              std::function<Format(const PrecisionPolicy&)> read) {
  Key key;
  key.name = "precision." + name;
  key.doc = std::move(doc);
  key.kind = KeyKind::kChoice;
  key.choices = {"bf16", "fp32", "fp64"};
  key.default_note = "the preset's";
  key.get = [read](const Recipe& r) -> KeyValue {
    return std::string(FormatName(read(r.precision)));
  };
  key.set = [name](const KeyValue& value, Recipe* r) {
    RT_CHECK(SetPrecision(name, std::get<std::string>(value), &r->precision).ok());
  };
  return key;
}

KeyList PrecisionKeys() {
  Key preset = InputOnly(kPrecisionPresetKey, KeyKind::kChoice, "fp32",
                         "sets every rounding point; the keys below change single ones");
  preset.choices = PrecisionPresets();
  KeyList keys = {preset};
  for (int i = 0; i < kNumPoints; ++i) {
    const Point point = static_cast<Point>(i);
    const std::string name = PointName(point);
    keys.push_back(FormatKey(name, PointMeaning(point),
                             [point](const PrecisionPolicy& p) { return p.Forward(point); }));
    if (point == Point::kCrossEntropy) continue;
    keys.push_back(FormatKey(name + ".grad", "gradient of the above",
                             [point](const PrecisionPolicy& p) { return p.Gradient(point); }));
  }
  keys.push_back(FormatKey(
      "partials",
      "shard partials before the tree of clause 7; bf16 as an all-reduce in BF16 has them",
      [](const PrecisionPolicy& p) { return p.partials; }));
  return keys;
}

KeyList StoreAndExecutionKeys() {
  return {
      WindowKey(),
      Integer(AT(store.every), 0, kMany, "also keep the state of every n-th position; 0: none"),
      Integer(AT(store.keep_last), 0, kMany,
              "also keep the last n states, dropping older ones as the run goes on; 0: none"),
      Integer(AT(store.keyframe_every), 1, kMany,
              "within what is kept, every n-th state is stored whole, the others as journals"),
      Integer(AT(store.flight.steps), 0, kMany,
              "flight recorder: a ring of the last n states, which stays when a trigger fires; 0: "
              "none. `touch RUN/fire`, SIGUSR1 and a value that is not finite always are triggers"),
      Integer(AT(store.flight.bytes), 0, int64_t{1} << 60,
              "the most that the ring's files take, as far as one keyframe and the journals after "
              "it allow; 0: no bound"),
      Integer(AT(store.flight.after), 0, kMany, "states after a firing that stay, too"),
      Integer(AT(store.flight.firings_max), 0, kMany,
              "after so many firings the ring goes on, but nothing more stays"),
      Real(AT(store.flight.loss_mads), 0, kLarge,
           "trigger: loss above its running minimum by max(x * MAD, 0.5 nat), MAD the median "
           "absolute deviation of the last 64 changes of the loss from their mean; 0: off"),
      Real(AT(store.flight.norm_collapse), 0, kLarge,
           "trigger: the gradient norm falls by this factor within `flight.norm_steps` updates; 0: "
           "off"),
      Integer(AT(store.flight.norm_steps), 1, 4096, "see above, updates"),
      Real(AT(store.flight.update_rms), 0, kLarge,
           "trigger: the RMS of Adam's update (before the learning rate and decay) exceeds this; "
           "it is then part of the record; 0: off"),
      Flag(AT(execution.recompute_activations),
           "compute activations again in the backward pass rather than keep them"),
  };
}
#undef AT

KeyList BuildKeys() {
  KeyList keys;
  for (KeyList (*part)() :
       {RunKeys, ShapeKeys, PatternKeys, ModelKeys, BypassKeys, InitKeys, DataKeys, OptimizerKeys,
        OptimizerRuleKeys, ScheduleKeys, TopologyKeys, NumericsKeys, PrecisionKeys, StoreAndExecutionKeys}) {
    Append(&keys, part());
  }
  return keys;
}

std::string RealText(double value) {
  if (value == 0) return "0.0";  // -0.0 too: a recipe has one zero
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value);
  std::string text(buffer, end.ptr);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

template <class T, class Format>
std::string ListText(const std::vector<T>& list, Format format) {
  std::string text = "[", line;
  bool wrapped = false;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string item = format(list[i]) + (i + 1 < list.size() ? ", " : "");
    if (line.size() + item.size() > 90) {
      text += "\n  " + line;
      line.clear();
      wrapped = true;
    }
    line += item;
  }
  text += wrapped ? "\n  " + line + "\n]" : line + "]";
  // A wrapped line ends in a comma, not in a blank.
  for (size_t at = 0; (at = text.find(", \n", at)) != std::string::npos;) text.erase(at + 1, 1);
  return text;
}

std::string Got(const KeyValue& value) {
  std::string text = ValueText(value);
  std::erase(text, '\n');
  if (constexpr size_t kShown = 60; text.size() > kShown) {
    size_t end = kShown;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // whole UTF-8
    text = text.substr(0, end) + "...";
  }
  static constexpr const char* kNames[] = {
      "boolean", "integer", "real", "text", "list of integers", "list of reals", "list of text"};
  return text + " (" + kNames[value.index()] + ")";
}

Status Unexpected(const Key& key, const KeyValue& given, std::string more = "") {
  return UsageError("expected " + ExpectedOf(key) + ", got " + Got(given) + more);
}

bool InRange(const Key& key, double value) {
  if (!std::isfinite(value)) return false;
  if (key.real_min_open ? value <= key.real_min : value < key.real_min) return false;
  return key.real_max_open ? value < key.real_max : value <= key.real_max;
}

bool InRange(const Key& key, int64_t value) {
  return value >= key.integer_min && value <= key.integer_max;
}

bool HasControlCharacters(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f;
  });
}

std::optional<double> AsReal(const KeyValue& value) {
  if (const double* real = std::get_if<double>(&value)) return *real;
  if (const int64_t* integer = std::get_if<int64_t>(&value)) return static_cast<double>(*integer);
  return std::nullopt;
}

Result<KeyValue> CheckReal(const Key& key, const KeyValue& given) {
  const std::optional<double> value = AsReal(given);
  if (!value || !InRange(key, *value)) return Unexpected(key, given);
  return KeyValue(*value);
}

// A list of numbers arrives as integers where all of them are.
Result<KeyValue> CheckReals(const Key& key, const KeyValue& given) {
  std::vector<double> list;
  if (const auto* integers = std::get_if<std::vector<int64_t>>(&given)) {
    list.assign(integers->begin(), integers->end());
  } else if (const auto* reals = std::get_if<std::vector<double>>(&given)) {
    list = *reals;
  } else {
    return CheckReal(key, given);
  }
  for (double value : list) {
    if (!InRange(key, value)) return Unexpected(key, given);
  }
  return KeyValue(std::move(list));
}

Result<KeyValue> CheckPair(const Key& key, const KeyValue& given) {
  const auto* list = std::get_if<std::vector<int64_t>>(&given);
  const bool good =
      list != nullptr && (list->empty() || (list->size() == 2 && InRange(key, (*list)[0]) &&
                                            InRange(key, (*list)[1]) && (*list)[0] <= (*list)[1]));
  return good ? Result<KeyValue>(given) : Unexpected(key, given);
}

bool IsChoice(const Key& key, const std::string& name) {
  return std::find(key.choices.begin(), key.choices.end(), name) != key.choices.end();
}

Result<KeyValue> CheckChoice(const Key& key, const KeyValue& given) {
  const std::string* name = std::get_if<std::string>(&given);
  if (name == nullptr) return Unexpected(key, given);
  if (IsChoice(key, *name)) return given;
  return Unexpected(key, given, "; the nearest is \"" + NearestName(*name, key.choices) + "\"");
}

Result<KeyValue> CheckChoices(const Key& key, const KeyValue& given) {
  const auto* list = std::get_if<std::vector<std::string>>(&given);
  if (list == nullptr) return Unexpected(key, given);
  for (const std::string& name : *list) {
    if (!IsChoice(key, name)) {
      return Unexpected(key, name, "; the nearest is \"" + NearestName(name, key.choices) + "\"");
    }
  }
  return given;
}

Result<KeyValue> CheckTexts(const Key& key, const KeyValue& given) {
  const auto* none = std::get_if<std::vector<int64_t>>(&given);  // [] has no type of its own
  if (none != nullptr && none->empty()) return KeyValue(std::vector<std::string>());
  const auto* list = std::get_if<std::vector<std::string>>(&given);
  if (list == nullptr) return Unexpected(key, given);
  for (const std::string& text : *list) {
    if (HasControlCharacters(text)) return Unexpected(key, text);
    RT_RETURN_IF_ERROR(key.check_text(text));
  }
  return given;
}

std::string Joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string RealRange(const Key& key) {
  const std::string low = (key.real_min_open ? " > " : " >= ") + RealText(key.real_min);
  return low + " and" + (key.real_max_open ? " < " : " <= ") + RealText(key.real_max);
}

}  // namespace

const std::vector<Key>& AllKeys() {
  static const std::vector<Key> keys = BuildKeys();
  return keys;
}

const Key* FindKey(std::string_view name) {
  for (const Key& key : AllKeys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

std::string SectionOf(std::string_view name) {
  const size_t dot = name.find('.');
  return dot == std::string_view::npos ? "" : std::string(name.substr(0, dot));
}

Recipe DefaultRecipe() {
  Recipe recipe;
  recipe.precision = PrecisionPreset("fp32").value();
  return recipe;
}

std::string ExpectedOf(const Key& key) {
  const std::string integers =
      std::to_string(key.integer_min) + " .. " + std::to_string(key.integer_max);
  switch (key.kind) {
    case KeyKind::kBool:
      return "true or false";
    case KeyKind::kInteger:
      return "an integer in " + integers;
    case KeyKind::kReal:
      return "a number" + RealRange(key);
    case KeyKind::kText:
      return "text without control characters";
    case KeyKind::kChoice:
      return "one of " + Joined(key.choices);
    case KeyKind::kChoices:
      return "a list of " + Joined(key.choices);
    case KeyKind::kRealOrReals:
      return "a number or a list of numbers" + RealRange(key);
    case KeyKind::kIntegerPair:
      return "[first, last] or [], integers in " + integers;
    case KeyKind::kTexts:
      return "a list of \"" + key.form + "\"";
  }
  RT_CHECK(!"a kind of key");
  return "";
}

std::string QuotedText(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      static constexpr char kDigits[] = "0123456789ABCDEF";
      out += std::string("\\u00") + kDigits[byte >> 4] + kDigits[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string ValueText(const KeyValue& value) {
  struct Printer {
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(int64_t v) const { return std::to_string(v); }
    std::string operator()(double v) const { return RealText(v); }
    std::string operator()(const std::string& v) const { return QuotedText(v); }
    std::string operator()(const std::vector<int64_t>& v) const {
      return ListText(v, [](int64_t item) { return std::to_string(item); });
    }
    std::string operator()(const std::vector<double>& v) const { return ListText(v, RealText); }
    std::string operator()(const std::vector<std::string>& v) const {
      return ListText(v, [](const std::string& item) { return QuotedText(item); });
    }
  };
  return std::visit(Printer(), value);
}

Result<KeyValue> CheckValue(const Key& key, const KeyValue& given) {
  switch (key.kind) {
    case KeyKind::kBool:
      if (!std::holds_alternative<bool>(given)) return Unexpected(key, given);
      return given;
    case KeyKind::kInteger: {
      const int64_t* value = std::get_if<int64_t>(&given);
      if (value == nullptr || !InRange(key, *value)) return Unexpected(key, given);
      return given;
    }
    case KeyKind::kText: {
      const std::string* text = std::get_if<std::string>(&given);
      if (text == nullptr || HasControlCharacters(*text)) return Unexpected(key, given);
      return given;
    }
    case KeyKind::kReal:
      return CheckReal(key, given);
    case KeyKind::kChoice:
      return CheckChoice(key, given);
    case KeyKind::kChoices:
      return CheckChoices(key, given);
    case KeyKind::kRealOrReals:
      return CheckReals(key, given);
    case KeyKind::kIntegerPair:
      return CheckPair(key, given);
    case KeyKind::kTexts:
      return CheckTexts(key, given);
  }
  RT_CHECK(!"a kind of key");
  return given;
}

}  // namespace retrace
