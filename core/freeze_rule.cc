#include "core/freeze_rule.h"

namespace retrace {

std::string FreezeRuleText(const FreezeRule& rule) {
  return rule.only + ",norm=" + (rule.counted ? "counted" : "left-out") +
         ",moments=" + (rule.moments_move ? "move" : "stay");
}

// Every text that FreezeRuleText can give, and no other.
Result<FreezeRule> ParseFreezeRule(std::string_view text) {
  FreezeRule rule;
  rule.only = text.substr(0, text.find(','));
  for (const bool counted : {true, false}) {
    for (const bool moments_move : {true, false}) {
      rule.counted = counted;
      rule.moments_move = moments_move;
      if (!rule.only.empty() && FreezeRuleText(rule) == text) return rule;
    }
  }
  return UsageError("expected GLOB,norm=counted|left-out,moments=move|stay, got '" +
                    std::string(text.substr(0, 120)) + "'");
}

}  // namespace retrace
