// A small run whose loss falls, and branches of it in which something is planted that makes it spike.
// Used by tests of the searches for a point of no return and for a cause.
#ifndef RETRACE_TESTS_SPIKING_RUN_H_
#define RETRACE_TESTS_SPIKING_RUN_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "surgery/branch.h"
#include "surgery/prevention.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {

inline constexpr int64_t kUpdates = 8;

inline std::vector<std::string> CalmOverrides() {
  return {"data.path=" + TestData("dataset/tiny"),
          "model.layers=2",
          "model.layer_scalar=1.0",
          "data.sequence_length=6",
          "data.micro_batch_size=1",
          "data.micro_batches=2",
          "data.evaluation_samples=2",
          "topology.lanes=1",
          "topology.virtual_shards=1",
          "steps=" + std::to_string(kUpdates),
          "schedule.warmup_steps=0",
          "store.window=[0,8]",
          "schedule.peak=0.03"};
}

inline Recipe CalmRecipe() {
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", CalmOverrides()).value();
}

// calm: the loss falls, by and large.
class SpikingRuns : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // In memory where there is such a place: many replicas are made durable.
    if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 0);
    runs_ = new TempFolder;
    SoloComm comm;
    TrainOptions options;
    options.run_dir = *runs_ / "calm";
    ASSERT_EQ("", Train(CalmRecipe(), comm, {}, options).status().message());
  }
  static void TearDownTestSuite() { delete runs_; }

  // A branch of calm from update `first` on.
  static void MakeRun(const std::string& name, int64_t first,
                      const std::vector<std::string>& interventions) {
    const RunReader calm = RunReader::Open(*runs_ / "calm").value();
    SoloComm comm;
    const std::unique_ptr<Job> job = Job::Make(CalmRecipe(), comm, {}).value();
    BranchPlan plan;
    plan.first = first;
    plan.last = kUpdates;
    for (const std::string& text : interventions) {
      plan.interventions.push_back(ParseIntervention(text).value());
    }
    plan.out = *runs_ / name;
    ASSERT_EQ("", MakeBranch(calm, *job, plan, nullptr).message());
  }

  // Updates first..kUpdates, six replicas a question.
  PreventionOptions OptionsFrom(int64_t first, const std::string& predicate) const {
    PreventionOptions options;
    options.range = {first, kUpdates};
    options.predicate = SpikePredicate::Parse(predicate).value();
    options.rule = {.least = 6, .most = 6};
    options.sigma = 0x1p-16;
    options.out = out_ / "out";
    return options;
  }

  static inline TempFolder* runs_ = nullptr;
  TempFolder out_;
};

}  // namespace retrace

#endif  // RETRACE_TESTS_SPIKING_RUN_H_
