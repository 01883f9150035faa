#include "surgery/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/check.h"

namespace retrace {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Twice the midrank of each value (whole numbers, so that sums are exact), in order of input.
std::vector<int64_t> DoubledMidranks(const std::vector<double>& values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  std::vector<int64_t> ranks(values.size());
  for (size_t first = 0; first < order.size();) {
    size_t last = first;
    while (last + 1 < order.size() && values[order[last + 1]] == values[order[first]]) ++last;
    for (size_t i = first; i <= last; ++i) {
      ranks[order[i]] = static_cast<int64_t>(first + last) + 2;  // ranks count from 1
    }
    first = last + 1;
  }
  return ranks;
}

double Quantile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(at);
  const double part = at - static_cast<double>(below);
  if (part == 0 || sorted[below + 1] == sorted[below]) return sorted[below];
  return sorted[below] + part * (sorted[below + 1] - sorted[below]);
}

}  // namespace

double Median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  return Quantile(values, 0.5);
}

double QuartileRange(std::vector<double> values) {
  if (values.size() < 2) return 0;
  std::sort(values.begin(), values.end());
  const double low = Quantile(values, 0.25), high = Quantile(values, 0.75);
  return low == high ? 0 : high - low;
}

double ProbabilityBelow(const std::vector<double>& arm, const std::vector<double>& control) {
  const int64_t drawn = std::ssize(arm);
  RT_CHECK(drawn > 0 && !control.empty());
  RT_CHECK(drawn + std::ssize(control) <= 2 * kReplicasMax);
  std::vector<double> all = arm;
  all.insert(all.end(), control.begin(), control.end());
  const std::vector<int64_t> ranks = DoubledMidranks(all);
  const int64_t observed = std::accumulate(ranks.begin(), ranks.begin() + drawn, int64_t{0});
  // ways[n][s]: subsets of n values whose doubled midranks sum to s <= observed.
  const size_t width = static_cast<size_t>(observed) + 1;
  std::vector<std::vector<double>> ways(drawn + 1, std::vector<double>(width, 0.0));
  ways[0][0] = 1;
  for (const int64_t rank : ranks) {
    for (int64_t n = drawn; n > 0; --n) {
      for (int64_t s = observed; s >= rank; --s) ways[n][s] += ways[n - 1][s - rank];
    }
  }
  double every = 1;  // binomial(all, drawn)
  for (int64_t i = 1; i <= drawn; ++i) {
    every = every * static_cast<double>(std::ssize(all) - drawn + i) / static_cast<double>(i);
  }
  const double below = std::accumulate(ways[drawn].begin(), ways[drawn].end(), 0.0);
  return std::min(1.0, below / every);
}

std::vector<double> HolmAdjusted(const std::vector<double>& p, int64_t family) {
  RT_CHECK(family >= std::ssize(p));
  std::vector<size_t> order(p.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return p[a] < p[b]; });
  std::vector<double> adjusted(p.size());
  double largest = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    const double factor = static_cast<double>(family - static_cast<int64_t>(i));
    largest = std::max(largest, std::min(1.0, factor * p[order[i]]));
    adjusted[order[i]] = largest;
  }
  return adjusted;
}

Jump JumpOf(const std::vector<double>& losses, double threshold) {
  Jump jump;
  double minimum = kInfinity;
  for (size_t i = 0; i < losses.size(); ++i) {
    const double loss = std::isfinite(losses[i]) ? losses[i] : kInfinity;
    const double rise = i == 0 || minimum == kInfinity ? 0 : loss - minimum;
    jump.nats = std::max(jump.nats, i == 0 && loss == kInfinity ? kInfinity : rise);
    if (jump.first_above < 0 && jump.nats > threshold) jump.first_above = static_cast<int64_t>(i);
    minimum = std::min(minimum, loss);
  }
  return jump;
}

}  // namespace retrace
