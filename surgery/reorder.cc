// reorder: the samples of a range of updates in another order.
#include <algorithm>
#include <numeric>

#include "core/philox.h"
#include "core/random_streams.h"
#include "surgery/registry.h"

namespace retrace {
namespace {

constexpr int64_t kMost = int64_t{1} << 24;  // samples that one order covers

// Place i gets sample order[i]: the indices sorted by a random number of each, ties by index.
std::vector<int64_t> OrderOf(uint64_t seed, int64_t count) {
  const RandomStream random =
      MakeRandomStream(seed, static_cast<uint32_t>(RandomPurpose::kSampleOrder), 0);
  std::vector<std::pair<uint32_t, int64_t>> keys(count);
  for (int64_t i = 0; i < count; ++i) keys[i] = {RandomU32(random, i), i};
  std::sort(keys.begin(), keys.end());
  std::vector<int64_t> order(count);
  for (int64_t i = 0; i < count; ++i) order[i] = keys[i].second;
  return order;
}

Status Edit(const Arguments& arguments, const DatedUpdate& dated, UpdateDirective* directive) {
  RT_ASSIGN_OR_RETURN(const uint64_t seed, WholeArgument(arguments, "seed"));
  if (dated.last - dated.first >= kMost / dated.samples) {
    return UsageError("expected dates of at most 2^24 samples in all");
  }
  const int64_t done = (dated.update - dated.first) * dated.samples;
  const std::vector<int64_t> order = OrderOf(seed, (dated.last - dated.first + 1) * dated.samples);
  for (int64_t i = 0; i < dated.samples; ++i) {
    directive->samples[i] = dated.cursor - done + order[done + i];
  }
  return {};
}

Status Check(const Arguments& arguments) { return WholeArgument(arguments, "seed").status(); }

}  // namespace

const InterventionKind kReorder = {
    .name = "reorder",
    .summary = "Consume the samples of the dates in another order, across their updates",
    .touches = "update: its samples",
    .formula = "samples of updates k..l permuted by the seed (clause 14)",
    .example = "reorder:seed=7@6..9",
    .reference =
        "docs/architecture.md, \"Surgery\"; Dodge et al. 2020, arXiv 2002.06305 (seeds of the data "
        "order)",
    .parameters = {{"seed", "of the order, a whole number", ""}},
    .check = Check,
    .edit_update = Edit};

}  // namespace retrace
