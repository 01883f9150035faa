// LogHistogram: quantiles of very many positive numbers of any size. Used by state_norms.cc and
// stats. A value; merging is exact, so quantiles of groups come from those of their tensors.
//
// Numbers are counted by exponent and the first five bits of their mantissa: a quantile is right to
// 1.6 %.
#ifndef RETRACE_REPLAY_LOG_HISTOGRAM_H_
#define RETRACE_REPLAY_LOG_HISTOGRAM_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace retrace {

class LogHistogram {
 public:
  // x >= 0; NaN is passed over.
  void Add(float x) {
    if (!(x >= 0)) return;
    if (counts_.empty()) counts_.resize(kBuckets);
    ++counts_[std::bit_cast<uint32_t>(x) >> kDropped & (kBuckets - 1)];
    ++count_;
  }

  LogHistogram& operator+=(const LogHistogram& other) {
    if (counts_.empty()) counts_ = other.counts_;
    else for (std::size_t i = 0; i < other.counts_.size(); ++i) counts_[i] += other.counts_[i];
    count_ += other.count_;
    return *this;
  }

  // The least number that at least the share q of all does not exceed; NaN where there are none.
  double Quantile(double q) const {
    const double wanted = q * static_cast<double>(count_);
    int64_t seen = 0;
    for (uint32_t i = 0; i < counts_.size(); ++i) {
      seen += counts_[i];
      if (seen > 0 && static_cast<double>(seen) >= wanted) return Middle(i);
    }
    return std::numeric_limits<double>::quiet_NaN();
  }

  int64_t count() const { return count_; }

 private:
  static constexpr int kDropped = 18;             // bits of the mantissa
  static constexpr uint32_t kBuckets = 1u << 13;  // the sign is not counted

  static double Middle(uint32_t bucket) {
    const uint32_t bits = bucket << kDropped;
    if (bucket == 0 || bits >= 0x7f800000u) return std::bit_cast<float>(bits);  // zero, infinity
    return std::bit_cast<float>(bits | 1u << (kDropped - 1));
  }

  std::vector<int64_t> counts_;  // empty: none yet
  int64_t count_ = 0;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_LOG_HISTOGRAM_H_
