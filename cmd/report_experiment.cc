// The part of report_data.h that reads an experiment's result.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "cmd/report_data.h"
#include "formats/file_ops.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kResultBytesMax = int64_t{256} << 20;

enum class Expect { kNumber, kInteger, kText, kBool, kTexts, kNumbers };

// Numbers that are not finite are "nan", "inf", "-inf".
bool IsNumber(const Json& value) {
  return value.is_number() || value == "nan" || value == "inf" || value == "-inf";
}

bool IsListOf(const Json& value, bool (*is)(const Json&)) {
  if (!value.is_array()) return false;
  for (const Json& element : value) {
    if (!is(element)) return false;
  }
  return true;
}

bool Fits(const Json& value, Expect expect) {
  switch (expect) {
    case Expect::kNumber:
      return IsNumber(value);
    case Expect::kInteger:
      return value.is_number_integer();
    case Expect::kText:
      return value.is_string();
    case Expect::kBool:
      return value.is_boolean();
    case Expect::kTexts:
      return IsListOf(value, [](const Json& e) { return e.is_string(); });
    case Expect::kNumbers:
      return IsListOf(value, IsNumber);
  }
  return false;
}

const char* Name(Expect expect) {
  switch (expect) {
    case Expect::kNumber:
      return "a number";
    case Expect::kInteger:
      return "an integer";
    case Expect::kText:
      return "text";
    case Expect::kBool:
      return "true or false";
    case Expect::kTexts:
      return "a list of texts";
    case Expect::kNumbers:
      return "a list of numbers";
  }
  return "";
}

struct Field {
  const char* name;
  Expect expect;
  bool required = true;
};

constexpr Field kHead[] = {{"file", Expect::kText},
                           {"run", Expect::kText},
                           {"first", Expect::kInteger},
                           {"horizon", Expect::kInteger},
                           {"threshold", Expect::kNumber},
                           {"control_equal", Expect::kBool},
                           {"scope", Expect::kText, false},
                           {"sigma", Expect::kNumber, false},
                           {"saturated", Expect::kBool, false},
                           {"level", Expect::kNumber, false},
                           {"least_effect", Expect::kNumber, false},
                           {"differs_at", Expect::kInteger, false}};
constexpr Field kArm[] = {
    {"name", Expect::kText},      {"hypothesis", Expect::kText}, {"changes", Expect::kTexts},
    {"verdict", Expect::kText},   {"median", Expect::kNumber},   {"delta", Expect::kNumber},
    {"p_below", Expect::kNumber}, {"p_above", Expect::kNumber},  {"p_later", Expect::kNumber}};
constexpr Field kReplica[] = {{"seed", Expect::kInteger},
                              {"jump", Expect::kNumber},
                              {"spike", Expect::kNumber},
                              {"halted", Expect::kBool},
                              {"evaluation_losses", Expect::kNumbers}};

// Copies fields that are as expected; remembers the first that is not.
class Copier {
 public:
  template <size_t n>
  Json Copy(const Json& from, const Field (&fields)[n], const std::string& where) {
    Json to = Json::object();
    if (!from.is_object()) return Bad(where, "an object", from), to;
    for (const Field& field : fields) {
      const std::string at = where.empty() ? field.name : where + "." + field.name;
      const auto value = from.find(field.name);
      if (value == from.end()) {
        if (field.required) Bad(at, Name(field.expect), Json());
      } else if (Fits(*value, field.expect)) {
        to[field.name] = *value;
      } else {
        Bad(at, Name(field.expect), *value);
      }
    }
    return to;
  }
  const Json& List(const Json& from, const char* name, const std::string& where) {
    static const Json kNone = Json::array();
    const auto value = from.is_object() ? from.find(name) : from.end();
    if (from.is_object() && value != from.end() && value->is_array()) return *value;
    Bad(where + name, "a list", from.is_object() && value != from.end() ? *value : Json());
    return kNone;
  }
  void Bad(const std::string& field, const std::string& expected, const Json& got) {
    if (!error_.empty()) return;
    const std::string text = got.is_null() ? "nothing" : got.dump().substr(0, 40);
    error_ = fmt::format("{}: expected {}, got {}", field, expected, text);
  }
  const std::string& error() const { return error_; }

 private:
  std::string error_;
};

}  // namespace

Result<std::string> ReadExperimentResult(const std::string& path) {
  if (FileOps().Size(path) > kResultBytesMax) {
    return UsageError(path + ": is too large for an experiment's result");
  }
  const Result<Bytes> bytes = FileOps().Read(path);
  if (!bytes.ok()) return UsageError(bytes.status().message());
  const Json json = Json::parse(bytes->view(), nullptr, false);
  constexpr char kHint[] = "; expected what 'retrace experiment --json' prints";
  if (json.is_discarded()) return DamagedError(path + ": is no JSON" + kHint);
  Copier copier;
  Json result = copier.Copy(json, kHead, "");
  result["arms"] = Json::array();
  if (result.value("control_equal", false)) {
    int index = 0;
    for (const Json& from : copier.List(json, "arms", "")) {
      const std::string where = fmt::format("arms[{}]", index++);
      Json arm = copier.Copy(from, kArm, where);
      arm["replicas"] = Json::array();
      int replica = 0;
      for (const Json& r : copier.List(from, "replicas", where + ".")) {
        arm["replicas"].push_back(
            copier.Copy(r, kReplica, fmt::format("{}.replicas[{}]", where, replica++)));
      }
      result["arms"].push_back(std::move(arm));
    }
  }
  if (!copier.error().empty()) return DamagedError(path + ": " + copier.error() + kHint);
  return result.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string ExperimentRun(const std::string& experiment_json) {
  return Json::parse(experiment_json).value("run", "");
}

}  // namespace retrace
