// Faults of the hardware, planted: one bit of one op's output, in flight; and a recording in which it
// happened. Used by tests of trace and bisect. The program has no way to ask for one.
#ifndef RETRACE_TESTS_FAULTY_RUN_H_
#define RETRACE_TESTS_FAULTY_RUN_H_

#include <gtest/gtest.h>

#include <bit>
#include <memory>
#include <string>
#include <utility>

#include "core/recipe_toml.h"
#include "replay/solo_comm.h"
#include "replay/train.h"

namespace retrace {

// Turns over one bit of one element of an op's output, the nth time that the op is seen.
class BitFlip : public Probe {
 public:
  BitFlip(std::string op, int64_t element, int bit, int nth = 1)
      : op_(std::move(op)), element_(element), bit_(bit), nth_(nth) {}

  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override {
    if (!Hits(name, rows * cols)) return;
    float& x = const_cast<float&>(data[element_]);
    x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) ^ (uint32_t{1} << bit_));
  }
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override {
    if (!Hits(name, rows * cols)) return;
    double& x = const_cast<double&>(data[element_]);
    x = std::bit_cast<double>(std::bit_cast<uint64_t>(x) ^ (uint64_t{1} << (bit_ + 29)));
  }
  bool flipped() const { return seen_ >= nth_; }

 private:
  bool Hits(const std::string& name, int64_t numel) {
    return name == op_ && element_ < numel && ++seen_ == nth_;
  }

  const std::string op_;
  const int64_t element_;
  const int bit_, nth_;
  int seen_ = 0;
};

// Updates 1..last of a recipe, on one rank, with `fault` seeing every op.
inline void RecordFaulty(const Recipe& recipe, const std::string& dir, int64_t last, Probe* fault,
                         const BranchKeep& kept = {}) {
  SoloComm comm;
  const std::unique_ptr<Job> job =
      Job::Make(recipe, comm, {.tp = 1, .dp = 1, .threads = 1}).value();
  ASSERT_TRUE(job->StartFresh().ok());
  RunPlan plan;
  plan.recipe_text = PrintRecipe(recipe);
  plan.device = "cpu";
  const std::unique_ptr<RunWriter> writer = RunWriter::Create(dir, job->layout(), plan).value();
  job->set_probe(fault);
  const Status recorded = RecordBranch(*job, writer.get(), dir, last, kept, nullptr, nullptr);
  ASSERT_TRUE(recorded.ok()) << recorded.message();
}

}  // namespace retrace

#endif  // RETRACE_TESTS_FAULTY_RUN_H_
