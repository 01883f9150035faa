// When the flight recorder fires: every trigger with a planted cause, and no trigger without one.
#include "replay/spike_detector.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace retrace {
namespace {

UpdateRecord Record(int64_t update, double loss, double norm = 1.0) {
  UpdateRecord record;
  record.update = update;
  record.loss = loss;
  record.gradient_norm = norm;
  return record;
}

// The updates (from 1) at which it fires, and the last trigger.
std::vector<int64_t> Fires(SpikeDetector* detector, const std::vector<UpdateRecord>& records,
                           std::string* trigger = nullptr) {
  std::vector<int64_t> updates;
  for (const UpdateRecord& record : records) {
    if (const auto firing = detector->Observe(record)) {
      updates.push_back(record.update);
      EXPECT_FALSE(firing->reason.empty());
      if (trigger != nullptr) *trigger = firing->trigger;
    }
  }
  return updates;
}

std::vector<UpdateRecord> Losses(const std::vector<double>& losses) {
  std::vector<UpdateRecord> records;
  for (double loss : losses) records.push_back(Record(std::ssize(records) + 1, loss));
  return records;
}

using Updates = std::vector<int64_t>;

TEST(SpikeDetector, FiresAtTheSecondUpdateAlready) {
  SpikeDetector detector({});
  std::string trigger;
  EXPECT_EQ((Updates{2}), Fires(&detector, Losses({8.0, 8.6}), &trigger));
  EXPECT_EQ("loss", trigger);
}

TEST(SpikeDetector, ARiseOfHalfANatOrLessIsNone) {
  SpikeDetector detector({});
  EXPECT_EQ(Updates{}, Fires(&detector, Losses({8.0, 8.5, 7.0, 7.5})));
}

TEST(SpikeDetector, ALossThatStaysHighIsOneEventAndTheNextSpikeAnother) {
  FlightRecipe flight;
  flight.loss_mads = 1;
  SpikeDetector detector(flight);
  EXPECT_EQ((Updates{4, 8}), Fires(&detector, Losses({8, 7.5, 7, 8, 8.2, 8.1, 7.1, 8.5})));
}

TEST(SpikeDetector, ANoisyLossNeedsALargerRise) {
  // Changes are +-0.45, so MAD is 0.45: a rise of 1.2 above the minimum is less than 6 of them.
  std::vector<double> losses;
  for (int i = 0; i < 40; ++i) losses.push_back(8.0 + i % 2 * 0.45);
  losses.push_back(9.2);
  SpikeDetector noisy({});
  EXPECT_EQ(Updates{}, Fires(&noisy, Losses(losses)));
  losses.push_back(20.0);
  SpikeDetector again({});
  EXPECT_EQ((Updates{42}), Fires(&again, Losses(losses)));
}

TEST(SpikeDetector, TheEvaluationLossIsPreferred) {
  std::vector<UpdateRecord> records = Losses({8, 12, 7});
  for (UpdateRecord& record : records) record.evaluation_loss = 8.0;
  SpikeDetector detector({});
  EXPECT_EQ(Updates{}, Fires(&detector, records));
}

TEST(SpikeDetector, ACollapsingNormFiresOnlyWithinItsUpdates) {
  FlightRecipe flight;
  flight.norm_collapse = 100, flight.norm_steps = 2;
  SpikeDetector fast(flight), slow(flight);
  std::string trigger;
  EXPECT_EQ((Updates{3}),
            Fires(&fast, {Record(1, 5, 700), Record(2, 5, 650), Record(3, 5, 6)}, &trigger));
  EXPECT_EQ("norm", trigger);
  EXPECT_EQ(Updates{}, Fires(&slow, {Record(1, 5, 700), Record(2, 5, 50), Record(3, 5, 20),
                                     Record(4, 5, 5), Record(5, 5, 1)}));
}

TEST(SpikeDetector, ValuesThatAreNotFiniteFireAndAreNotLearnt) {
  SpikeDetector detector({});
  std::string trigger;
  const double nan = std::nan("");
  EXPECT_EQ((Updates{2}), Fires(&detector, {Record(1, 8), Record(2, nan, nan)}, &trigger));
  EXPECT_EQ("non_finite", trigger);
  EXPECT_EQ((Updates{4}), Fires(&detector, {Record(3, 8.2), Record(4, 9)}));  // above 8.0
  EXPECT_EQ((Updates{5}), Fires(&detector, {Record(5, 8, INFINITY)}));
}

TEST(SpikeDetector, ALargeUpdateFires) {
  FlightRecipe flight;
  flight.update_rms = 1.5;
  std::vector<UpdateRecord> records = Losses({8, 8, 8});
  records[0].update_rms = 1.0, records[1].update_rms = 1.5, records[2].update_rms = 1.6;
  SpikeDetector detector(flight), off({});
  std::string trigger;
  EXPECT_EQ((Updates{3}), Fires(&detector, records, &trigger));
  EXPECT_EQ("update_rms", trigger);
  EXPECT_EQ(Updates{}, Fires(&off, records));
}

TEST(SpikeDetector, ConditionsThatAreOffNeverFire) {
  FlightRecipe flight;
  flight.loss_mads = 0, flight.norm_collapse = 0;
  SpikeDetector detector(flight);
  EXPECT_EQ(Updates{}, Fires(&detector, {Record(1, 5, 700), Record(2, 50, 0.1)}));
}

TEST(SpikeDetector, ItsStateFollowsFromTheRecordsAlone) {
  std::vector<UpdateRecord> records;
  for (int64_t k = 1; k <= 200; ++k) {
    const double x = static_cast<double>(k);
    records.push_back(Record(k, 8 + 2 * std::sin(x * 0.7) * std::cos(x * 0.13), 1 + k % 37 * 20.0));
  }
  SpikeDetector whole({});
  const Updates all = Fires(&whole, records);
  ASSERT_GT(all.size(), 2u);
  for (size_t cut : {1, 17, 64, 65, 150}) {
    SpikeDetector resumed({});
    Updates pieces = Fires(&resumed, {records.begin(), records.begin() + cut});
    const Updates rest = Fires(&resumed, {records.begin() + cut, records.end()});
    pieces.insert(pieces.end(), rest.begin(), rest.end());
    EXPECT_EQ(all, pieces) << cut;
  }
}

}  // namespace
}  // namespace retrace
