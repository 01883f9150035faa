#include "replay/record.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

Json Number(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

Json Numbers(const std::vector<double>& values) {
  Json list = Json::array();
  for (double value : values) list.push_back(Number(value));
  return list;
}

Json NormsJson(const TensorNorms& norms) {
  Json odd = Json::array();
  for (const TensorNorms::Odd& o : norms.odd) {
    odd.push_back({o.tensor, o.of, o.zero, o.subnormal, o.infinite, o.nan});
  }
  return {{"p", Numbers(norms.p)},
          {"change", Numbers(norms.change)},
          {"m", Numbers(norms.m)},
          {"v", Numbers(norms.v)},
          {"odd", odd}};
}

// Reads the fields of a record, remembering the first that is wrong.
class Fields {
 public:
  explicit Fields(const Json& json) : json_(json) {}

  double Number(const char* name) { return NumberOf(Get(name), name); }
  double NumberOf(const Json& value, const char* name) {
    if (value.is_number()) return value.get<double>();
    if (value == "nan") return std::nan("");
    if (value == "inf") return INFINITY;
    if (value == "-inf") return -INFINITY;
    return Bad(name, "a number"), 0.0;
  }
  int64_t Integer(const char* name) {
    const Json& value = Get(name);
    if (value.is_number_integer()) return value.get<int64_t>();
    return Bad(name, "an integer"), 0;
  }
  std::vector<double> Numbers(const char* name) {
    std::vector<double> values;
    const Json& list = Get(name);
    if (!list.is_array()) Bad(name, "a list");
    for (const Json& value : list) values.push_back(NumberOf(value, name));
    return values;
  }
  std::vector<int64_t> Integers(const char* name) {
    std::vector<int64_t> values;
    const Json& list = Get(name);
    if (!list.is_array()) return Bad(name, "a list"), values;
    for (const Json& value : list) {
      if (value.is_number_integer()) values.push_back(value.get<int64_t>());
      else Bad(name, "integers");
    }
    return values;
  }
  std::string Text(const char* name) {
    const Json& value = Get(name);
    if (value.is_string()) return value.get<std::string>();
    return Bad(name, "text"), "";
  }
  bool Has(const char* name) const { return json_.contains(name); }
  const Json& Get(const char* name) {
    static const Json kNothing;
    if (!json_.is_object() || !json_.contains(name)) return kNothing;
    return json_[name];
  }
  void Bad(const char* name, const char* expected) {
    if (status_.ok()) {
      status_ = DamagedError(fmt::format("record: field '{}': expected {}, got {}", name, expected,
                                         Get(name).dump()));
    }
  }
  Status status() const { return status_; }

 private:
  const Json& json_;
  Status status_;
};

}  // namespace

bool UpdateRecord::Same(const UpdateRecord& other) const {
  UpdateRecord a = *this, b = other;
  a.timing = b.timing = {};
  if (!a.norms || !b.norms) a.norms = b.norms = std::nullopt;
  return RecordJson(a) == RecordJson(b);
}

std::string RecordJson(const UpdateRecord& r) {
  Json json;
  json["update"] = r.update;
  json["loss"] = Number(r.loss);
  if (r.evaluation_loss) json["evaluation_loss"] = Number(*r.evaluation_loss);
  json["gradient_norm"] = Number(r.gradient_norm);
  json["clip"] = Number(r.clip);
  json["lr"] = Number(r.lr);
  if (r.update_rms) json["update_rms"] = Number(*r.update_rms);
  json["action"] = r.action;
  json["first_sample"] = r.first_sample;
  json["samples"] = r.samples;
  json["tokens"] = r.tokens.Hex();
  json["tensor_norms"] = Numbers(r.tensor_norms);
  if (r.norms) json["norms"] = NormsJson(*r.norms);
  json["level"] = r.level;
  if (!r.sample_list.empty()) json["sample_list"] = r.sample_list;
  if (!r.tensor_clips.empty()) json["tensor_clips"] = Numbers(r.tensor_clips);
  if (!r.tensor_update_clips.empty()) {
    json["tensor_update_clips"] = Numbers(r.tensor_update_clips);
  }
  json["timing"] = {{"update_seconds", r.timing.update_seconds},
                    {"stall_seconds", r.timing.stall_seconds}};
  return json.dump();
}

namespace {

TensorNorms::Odd ParseOdd(Fields& fields, const Json& row) {
  const bool fits = row.is_array() && row.size() == 6 && row[0].is_number_unsigned() &&
                    row[1].is_string() &&
                    std::all_of(row.begin() + 2, row.end(),
                                [](const Json& n) { return n.is_number_unsigned(); });
  if (!fits) return fields.Bad("odd", "lists of a tensor, what and four counts"), TensorNorms::Odd();
  return {row[0].get<int64_t>(), row[1].get<std::string>(), row[2].get<int64_t>(),
          row[3].get<int64_t>(), row[4].get<int64_t>(),     row[5].get<int64_t>()};
}

// Four norms a tensor. Errors: kDamaged, naming the field.
Result<TensorNorms> ParseNorms(const Json& json, size_t tensors) {
  Fields fields(json);
  TensorNorms norms{fields.Numbers("p"), fields.Numbers("change"), fields.Numbers("m"),
                    fields.Numbers("v"), {}};
  for (const char* name : {"p", "change", "m", "v"}) {
    if (fields.Get(name).size() != tensors) fields.Bad(name, "a number for each of tensor_norms");
  }
  const Json& odd = fields.Get("odd");
  if (!odd.is_array()) fields.Bad("odd", "a list");
  for (const Json& row : odd) {
    norms.odd.push_back(ParseOdd(fields, row));
    if (norms.odd.back().tensor >= std::ssize(norms.p)) fields.Bad("odd", "tensors of the model");
  }
  RT_RETURN_IF_ERROR(fields.status());
  return norms;
}

}  // namespace

Result<UpdateRecord> ParseRecord(std::string_view text) {
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  Fields fields(json);
  UpdateRecord r;
  r.update = fields.Integer("update");
  r.loss = fields.Number("loss");
  if (fields.Has("evaluation_loss")) r.evaluation_loss = fields.Number("evaluation_loss");
  r.gradient_norm = fields.Number("gradient_norm");
  r.clip = fields.Number("clip");
  r.lr = fields.Number("lr");
  if (fields.Has("update_rms")) r.update_rms = fields.Number("update_rms");
  r.action = fields.Text("action");
  r.first_sample = fields.Integer("first_sample");
  r.samples = fields.Integer("samples");
  const Result<Digest> tokens = ParseDigest(fields.Text("tokens"));
  if (tokens.ok()) r.tokens = *tokens;
  else fields.Bad("tokens", "a digest");
  r.tensor_norms = fields.Numbers("tensor_norms");
  if (fields.Has("norms")) {
    Result<TensorNorms> norms = ParseNorms(fields.Get("norms"), r.tensor_norms.size());
    if (!norms.ok()) return norms.status().Within("norms");
    r.norms = std::move(norms).value();
  }
  r.level = fields.Text("level");
  if (fields.Has("tensor_clips")) r.tensor_clips = fields.Numbers("tensor_clips");
  if (fields.Has("tensor_update_clips")) {
    r.tensor_update_clips = fields.Numbers("tensor_update_clips");
  }
  if (fields.Has("sample_list")) r.sample_list = fields.Integers("sample_list");
  const Json& timing = fields.Get("timing");
  if (timing.is_object()) {
    r.timing.update_seconds = timing.value("update_seconds", 0.0);
    r.timing.stall_seconds = timing.value("stall_seconds", 0.0);
  }
  RT_RETURN_IF_ERROR(fields.status());
  return r;
}

}  // namespace retrace
