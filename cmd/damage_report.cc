#include "cmd/damage_report.h"

#include <nlohmann/json.hpp>

namespace retrace {

std::string DamageText(const OutputFlags& flags, const std::vector<Damage>& damage,
                       const std::vector<std::string>& remarks) {
  std::string text;
  for (const Damage& one : damage) {
    text += Tinted(flags, Tint::kRed, "damaged") + "  " + one.message + "\n";
    for (const std::string& tensor : one.tensors) text += "         tensor " + tensor + "\n";
  }
  for (const std::string& remark : remarks) {
    if (flags.quiet) break;
    text += Tinted(flags, Tint::kYellow, "note") + "     " + remark + "\n";
  }
  return text;
}

std::string DamageJson(const std::vector<Damage>& damage) {
  using Json = nlohmann::ordered_json;
  Json list = Json::array();
  for (const Damage& one : damage) {
    list.push_back({{"message", one.message}, {"tensors", one.tensors}});
    if (one.position >= 0) list.back()["position"] = one.position;
  }
  return list.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace retrace
