// drop-samples: single samples, passed over.
#include <algorithm>
#include <charconv>
#include <string_view>

#include "surgery/registry.h"

namespace retrace {
namespace {

struct Range {
  int64_t first = 0, last = 0;
};

bool ReadIndex(std::string_view text, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= 0 &&
         *value < int64_t{1} << 40;
}

// "3+7+10..12", by their first sample
Result<std::vector<Range>> RangesOf(const Arguments& arguments) {
  std::vector<Range> ranges;
  const std::string text = arguments.at("samples") + "+";
  for (size_t begin = 0, plus; (plus = text.find('+', begin)) != std::string::npos;
       begin = plus + 1) {
    const std::string_view part = std::string_view(text).substr(begin, plus - begin);
    const size_t dots = part.find("..");
    Range range;
    const bool good = ReadIndex(part.substr(0, dots), &range.first) &&
                      ReadIndex(dots == part.npos ? part : part.substr(dots + 2), &range.last);
    if (!good || range.first > range.last) {
      return UsageError("samples: expected indices A or A..B joined by +, got '" +
                        arguments.at("samples") + "'");
    }
    ranges.push_back(range);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  return ranges;
}

// What is left moves up; the samples behind the batch fill it, so the cursor goes further, unless an
// intervention before this one holds it.
Status Edit(const Arguments& arguments, const DatedUpdate& dated, UpdateDirective* directive) {
  RT_ASSIGN_OR_RETURN(const std::vector<Range> ranges, RangesOf(arguments));
  const auto dropped = [&](int64_t sample) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const Range& range) {
      return sample >= range.first && sample <= range.last;
    });
  };
  std::vector<int64_t>& samples = directive->samples;
  const size_t wanted = samples.size();
  const bool held = directive->cursor <= dated.cursor;
  int64_t behind =
      held ? *std::max_element(samples.begin(), samples.end()) + 1 : directive->cursor;
  std::erase_if(samples, dropped);
  while (samples.size() < wanted) {
    for (const Range& range : ranges) {  // past whole ranges, which may be long
      if (behind >= range.first && behind <= range.last) behind = range.last + 1;
    }
    samples.push_back(behind++);
  }
  if (!held) directive->cursor = behind;
  return {};
}

Status Check(const Arguments& arguments) { return RangesOf(arguments).status(); }

}  // namespace

const InterventionKind kDropSamples = {
    .name = "drop-samples",
    .summary = "Pass over single samples; those behind them move up",
    .touches = "update: its samples, and the data cursor",
    .formula = "samples without those named, filled up from behind the batch",
    .example = "drop-samples:8+11..13@2..6",
    .reference =
        "Chowdhery et al. 2022, arXiv 2204.02311, section 5.1; docs/architecture.md, \"Surgery\"",
    .parameters = {{"samples", "indices A or A..B of the training split, joined by +", ""}},
    .check = Check,
    .edit_update = Edit};

}  // namespace retrace
