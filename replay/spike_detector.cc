#include "replay/spike_detector.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

namespace retrace {
namespace {

constexpr size_t kChanges = 64;
constexpr double kLeastRise = 0.5;  // nat

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// A fixed batch says more than the step's own, where the run has one.
double LossOf(const UpdateRecord& record) { return record.evaluation_loss.value_or(record.loss); }

}  // namespace

std::optional<Firing> SpikeDetector::Observe(const UpdateRecord& record) {
  const double loss = LossOf(record), norm = record.gradient_norm;
  const Firing conditions[] = {{"non_finite", NonFinite(record)},
                               {"loss", LossRise(loss)},
                               {"norm", NormCollapse(norm)},
                               {"update_rms", UpdateSize(record)}};
  std::optional<Firing> fired;
  for (size_t i = 0; i < std::size(conditions); ++i) {
    const bool holds = !conditions[i].reason.empty();
    if (holds && !was_[i] && !fired) fired = conditions[i];
    was_[i] = holds;
  }
  Remember(loss, norm);
  return fired;
}

std::string SpikeDetector::NonFinite(const UpdateRecord& record) const {
  if (!std::isfinite(record.loss)) return fmt::format("the loss is {}", record.loss);
  if (std::isfinite(record.gradient_norm)) return "";
  return fmt::format("the gradient norm is {}", record.gradient_norm);
}

double SpikeDetector::LossDeviation() const {
  if (changes_.empty()) return 0;
  // From their mean: a loss that alternates has its median at one of the two values.
  const double mean =
      std::accumulate(changes_.begin(), changes_.end(), 0.0) / static_cast<double>(changes_.size());
  std::vector<double> values;
  for (double change : changes_) values.push_back(std::abs(change - mean));
  return Median(std::move(values));
}

std::string SpikeDetector::LossRise(double loss) const {
  if (flight_.loss_mads == 0 || !std::isfinite(loss) || !std::isfinite(least_loss_)) return "";
  const double rise = std::max(flight_.loss_mads * LossDeviation(), kLeastRise);
  if (!(loss > least_loss_ + rise)) return "";
  return fmt::format("the loss is {:.4f}, more than {:.4f} above its minimum {:.4f}", loss, rise,
                     least_loss_);
}

std::string SpikeDetector::NormCollapse(double norm) const {
  if (flight_.norm_collapse == 0 || norms_.empty()) return "";
  const double most = *std::max_element(norms_.begin(), norms_.end());
  if (most == 0 || !(most >= flight_.norm_collapse * norm)) return "";
  return fmt::format("the gradient norm is {:.4g}, after {:.4g} within {} updates", norm, most,
                     norms_.size());
}

std::string SpikeDetector::UpdateSize(const UpdateRecord& record) const {
  if (flight_.update_rms == 0 || !record.update_rms) return "";
  if (*record.update_rms <= flight_.update_rms) return "";
  return fmt::format("the RMS of Adam's update is {:.4g}, above {:.4g}", *record.update_rms,
                     flight_.update_rms);
}

void SpikeDetector::Remember(double loss, double norm) {
  if (std::isfinite(loss)) {
    if (last_loss_) changes_.push_back(loss - *last_loss_);
    if (changes_.size() > kChanges) changes_.pop_front();
    last_loss_ = loss;
    least_loss_ = std::min(least_loss_, loss);
  }
  if (std::isfinite(norm)) norms_.push_back(norm);
  if (std::ssize(norms_) > flight_.norm_steps) norms_.pop_front();
}

}  // namespace retrace
