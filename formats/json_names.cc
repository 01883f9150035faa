#include "formats/json_names.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace retrace {

std::optional<std::string> RepeatedName(std::string_view json_text) {
  using Json = nlohmann::json;
  std::vector<std::set<std::string>> open;  // names of the objects around the parser's place
  std::optional<std::string> twice;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key) {
      const std::string& name = parsed.get_ref<const std::string&>();
      if (!open.back().insert(name).second) twice = name;
    }
    return true;
  };
  const Json json = Json::parse(json_text, watch, /*allow_exceptions=*/false);
  return json.is_discarded() ? std::nullopt : twice;
}

}  // namespace retrace
