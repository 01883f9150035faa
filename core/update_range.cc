#include "core/update_range.h"

#include <charconv>
#include <string_view>
#include <system_error>

namespace retrace {
namespace {

// Takes a number from the front of *text, or nothing.
bool TakeNumber(std::string_view* text, int64_t* number) {
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *number);
  if (error != std::errc()) return false;
  text->remove_prefix(end - text->data());
  return true;
}

}  // namespace

Result<UpdateRange> ParseUpdateRange(const std::string& text, const char* flag) {
  constexpr int64_t kMost = int64_t{1} << 40;  // as many as a recipe may have
  UpdateRange range;
  std::string_view rest = text;
  const bool parsed = TakeNumber(&rest, &range.first) && rest.starts_with("..");
  if (parsed) rest.remove_prefix(2);
  if (parsed && TakeNumber(&rest, &range.last) && rest.empty() && range.first >= 1 &&
      range.last >= range.first && range.last <= kMost) {
    return range;
  }
  return UsageError(std::string(flag) + ": expected A..B with 1 <= A <= B, got '" + text + "'");
}

}  // namespace retrace
