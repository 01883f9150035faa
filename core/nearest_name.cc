#include "core/nearest_name.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "core/check.h"

namespace retrace {
namespace {

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (a[i] == b[j] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

// The distance, and to decide between equals that without the rule for sections.
std::pair<size_t, size_t> Distance(std::string_view word, std::string_view name) {
  const size_t whole = EditDistance(word, name);
  const size_t word_dot = word.find('.'), name_dot = name.find('.');
  if (name_dot == std::string_view::npos) return {whole, whole};
  const std::string_view word_tail =
      word_dot == std::string_view::npos ? word : word.substr(word_dot + 1);
  return {std::min(whole, 1 + EditDistance(word_tail, name.substr(name_dot + 1))), whole};
}

}  // namespace

std::string NearestName(std::string_view word, const std::vector<std::string>& names) {
  RT_CHECK(!names.empty());
  word = word.substr(0, 100);  // longer than any name; bounds the time on hostile input
  const std::string* best = nullptr;
  std::pair<size_t, size_t> best_distance;
  for (const std::string& name : names) {
    const auto distance = Distance(word, name);
    if (best == nullptr || distance < best_distance) {
      best = &name;
      best_distance = distance;
    }
  }
  return *best;
}

}  // namespace retrace
