// FreezeRule as text: GLOB,norm=counted|left-out,moments=move|stay. Used by the recipe's key
// optimizer.freeze and by the intervention `freeze`. Pure.
#ifndef RETRACE_CORE_FREEZE_RULE_H_
#define RETRACE_CORE_FREEZE_RULE_H_

#include <string>
#include <string_view>

#include "core/recipe.h"
#include "core/status.h"

namespace retrace {

std::string FreezeRuleText(const FreezeRule& rule);

// Errors: kUsage, "expected ..., got ...".
Result<FreezeRule> ParseFreezeRule(std::string_view text);

}  // namespace retrace

#endif  // RETRACE_CORE_FREEZE_RULE_H_
