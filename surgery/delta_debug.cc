#include "surgery/delta_debug.h"

#include <algorithm>
#include <numeric>

namespace retrace {
namespace {

using Part = std::vector<int>;

// Member i of `count` even, neighbouring parts.
Part Slice(const Part& whole, int count, int i) {
  const auto at = [&](int j) {
    return whole.begin() + static_cast<std::ptrdiff_t>(whole.size() * j / count);
  };
  return Part(at(i), at(i + 1));
}

Part Without(const Part& whole, const Part& part) {
  Part rest;
  std::set_difference(whole.begin(), whole.end(), part.begin(), part.end(),
                      std::back_inserter(rest));
  return rest;
}

}  // namespace

Result<SmallestPart> FindSmallestPart(int size, const AskPart& ask,
                                      const std::function<void(const Part&)>& smaller) {
  SmallestPart found;
  Part& best = found.members;
  best.resize(size);
  std::iota(best.begin(), best.end(), 0);
  for (int count = 2; std::ssize(best) >= 2;) {
    count = std::min<int>(count, static_cast<int>(best.size()));
    std::vector<std::pair<Part, int>> tries;  // a part, and into how many to divide it next
    for (int i = 0; i < count; ++i) tries.emplace_back(Slice(best, count, i), 2);
    for (int i = 0; i < count && count > 2; ++i) {
      tries.emplace_back(Without(best, Slice(best, count, i)), std::max(count - 1, 2));
    }
    bool shrunk = false;
    for (const auto& [part, next] : tries) {
      RT_ASSIGN_OR_RETURN(const std::optional<bool> does, ask(part));
      if (!does) return found;
      if (!*does) continue;
      best = part;
      count = next;
      shrunk = true;
      if (smaller) smaller(best);
      break;
    }
    if (shrunk) continue;
    if (count >= std::ssize(best)) break;
    count *= 2;
  }
  found.complete = true;
  return found;
}

}  // namespace retrace
