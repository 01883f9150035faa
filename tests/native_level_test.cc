// Level native: the same bits again, after kills, on ranks and threads of any number; as close to the
// truth as the portable level; and nothing that changes its bits goes unnoticed.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "core/version.h"
#include "replay/local_ranks.h"
#include "replay/machine.h"
#include "replay/torch_plugin.h"
#include "replay/train.h"
#include "tests/parity_case.h"
#include "tests/places.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

class Native : public testing::Test {
 protected:
  void SetUp() override {
    setenv("RETRACE_PLUGIN_DIR", BinaryDir().c_str(), 1);
    if (!FindTorchPlugin().ok()) GTEST_SKIP() << FindTorchPlugin().status().message();
  }
  void TearDown() override { unsetenv("RETRACE_PLUGIN_DIR"); }

  static Recipe TinyAt(const std::string& level, std::vector<std::string> more = {}) {
    more.push_back("data.path=" + TestData("dataset/tiny"));
    more.push_back("numerics.level=" + level);
    more.push_back("steps=6");
    return LoadRecipe(SourceDir() + "/examples/tiny.toml", more).value();
  }
  static Status Record(const Recipe& recipe, const std::string& dir, const JobOptions& job = {},
                       bool resume = false, int64_t exit_at = -1) {
    TrainOptions options;
    options.run_dir = dir;
    options.resume = resume;
    options.updated = [&](const UpdateRecord& record, const Digest&) {
      if (record.update == exit_at) _exit(9);  // as a kill would have it
    };
    return RunLocalRanks(job.tp * job.dp, {}, [&](Comm& comm) -> Status {
      return Train(recipe, comm, job, options).status();
    });
  }
  static std::vector<std::string> Digests(const std::string& dir) {
    std::vector<std::string> digests;
    const RunReader run = RunReader::Open(dir).value();
    for (const PositionEntry& entry : run.history().positions) digests.push_back(entry.digest.Hex());
    return digests;
  }
  static void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

  TempDir temp_;
};

TEST_F(Native, TwoRunsAKilledOneAndOnesOnOtherRanksAndThreadsHaveTheSameDigests) {
  for (const char* preset : {"fp32", "bf16", "fp64"}) {
    const std::string name = std::string("precision.preset=") + preset;
    const Recipe recipe = TinyAt("native", {name});
    const std::string dir = temp_ / preset;
    ExpectOk(Record(recipe, dir));
    const std::vector<std::string> expected = Digests(dir);
    ASSERT_EQ(7u, expected.size());
    ExpectOk(Record(recipe, dir + "-again"));
    EXPECT_EQ(expected, Digests(dir + "-again")) << preset;
    ExpectOk(Record(recipe, dir + "-ranks", {.tp = 2, .dp = 2, .threads = 3}));
    EXPECT_EQ(expected, Digests(dir + "-ranks")) << preset;
    ExpectOk(Record(recipe, dir + "-scalar", {.threads = 2, .isa = Isa::kScalar}));
    EXPECT_EQ(expected, Digests(dir + "-scalar")) << preset;
    const pid_t child = fork();
    if (child == 0) _exit(Record(recipe, dir + "-killed", {}, false, 4).ok() ? 0 : 1);
    int ended = 0;
    waitpid(child, &ended, 0);
    ASSERT_EQ(9, WEXITSTATUS(ended));
    ExpectOk(Record(recipe, dir + "-killed", {}, true));
    EXPECT_EQ(expected, Digests(dir + "-killed")) << preset;
    ExpectOk(Record(TinyAt("portable", {name}), dir + "-portable"));
    // Under fp64 the levels differ in bits that the gradient loses when it is rounded to FP32.
    if (std::string(preset) == "fp64") continue;
    EXPECT_NE(expected, Digests(dir + "-portable")) << preset << ": the level does nothing";
  }
}

TEST_F(Native, ARunNamesItsLevelAndGoesOnUnderItsOwnIdAlone) {
  ExpectOk(Record(TinyAt("native"), temp_ / "run"));
  const RunReader run = RunReader::Open(temp_ / "run").value();
  const Machine machine = RecordedMachine(run);
  EXPECT_EQ("native", machine.level);
  EXPECT_TRUE(machine.device.starts_with("cpu, ")) << machine.device;
  EXPECT_NE(std::string::npos, machine.libraries.find("LibTorch 2.")) << machine.libraries;
  EXPECT_NE(std::string::npos, machine.libraries.find("MKL 2")) << machine.libraries;
  EXPECT_FALSE(machine.driver.empty());
  EXPECT_TRUE(machine.numerics.starts_with(std::string(kNumericsId) + " native (cpu, "));
  EXPECT_NE(std::string::npos, machine.numerics.find("1 thread)")) << machine.numerics;
  EXPECT_EQ("native", ParseRecord(run.history().positions.back().record)->level);
  const Layout layout = Layout::Make(TinyAt("native").model, 8).value();
  EXPECT_EQ(StatusCode::kUnsupported,
            RunWriter::Open(temp_ / "run", layout).status().code());  // of the portable id
}

TEST_F(Native, ParityVectorsAreAsCloseToTheTruthAsThoseOfTheReference) {
  const NativeKernels* native = OpenNativeLevel(1)->kernels;
  for (const std::string& directory : ParityDirectories()) {
    ParityCase c(directory);
    const SafetensorsFile truth = SafetensorsFile::Open(directory + "/expected_fp64.safetensors").value();
    const SafetensorsFile weights = SafetensorsFile::Open(directory + "/model.safetensors").value();
    c.recipe.precision = PrecisionPreset("fp32").value();
    LoneTransformer<float> run(c.recipe, 1, BestIsa(), 2, native);
    run.LoadWeights(weights);
    const int64_t tokens = c.batch.tokens();
    ASSERT_TRUE(run.transformer.Forward(c.batch, run.weight_slabs(), "mb0").ok());
    // The bound of the portable level: three times the reference's own distance in FP32.
    EXPECT_LE(Relative(run.WholeLogits(tokens), truth.ReadDouble("logits").value()),
              3 * double(c.report["rel_logits_fp32_vs_fp64"]))
        << directory;
    ASSERT_TRUE(run.transformer
                    .Backward(c.batch, run.weight_slabs(), 1.0f / static_cast<float>(tokens),
                              run.gradient_slabs())
                    .ok());
    const double worst = c.report["worst_grad_rel_fp32_vs_fp64"][0];
    for (size_t t = 0; t < run.layout.tensors().size(); ++t) {
      const std::string& name = run.layout.tensors()[t].name;
      EXPECT_LE(Relative(run.WholeGradient(static_cast<int>(t)),
                         truth.ReadDouble("grad." + name).value()),
                3 * worst)
          << directory << " " << name;
    }
    c.recipe.precision = PrecisionPreset("fp64").value();
    LoneTransformer<double> exact(c.recipe, 1, BestIsa(), 2, native);
    exact.LoadWeights(weights);
    ASSERT_TRUE(exact.transformer.Forward(c.batch, exact.weight_slabs(), "mb0").ok());
    EXPECT_LE(Relative(exact.WholeLogits(tokens), truth.ReadDouble("logits").value()), 1e-12)
        << directory;
  }
}

TEST_F(Native, WhatWouldChangeItsBitsIsRefusedByName) {
  ASSERT_TRUE(OpenNativeLevel(1).ok());
  for (const auto& [name, value] : std::map<std::string, std::string>{
           {"MKL_CBWR", "COMPATIBLE"}, {"ATEN_CPU_CAPABILITY", "default"},
           {"ONEDNN_DEFAULT_FPMATH_MODE", "BF16"}, {"CUBLAS_WORKSPACE_CONFIG", ":0:0"}}) {
    const char* before = getenv(name.c_str());
    const std::string kept = before ? before : "";
    setenv(name.c_str(), value.c_str(), 1);
    const Result<NativeLevel> level = OpenNativeLevel(1);
    EXPECT_EQ(StatusCode::kUnsupported, level.status().code()) << name;
    EXPECT_NE(std::string::npos, level.status().message().find(name)) << level.status().message();
    if (before) setenv(name.c_str(), kept.c_str(), 1);
    else unsetenv(name.c_str());
  }
  const Result<NativeLevel> threads = OpenNativeLevel(2);
  EXPECT_EQ(StatusCode::kUnsupported, threads.status().code());
  EXPECT_TRUE(OpenNativeLevel(1).ok());
}

TEST(Expectation, SaysInOneLineWhatAReplayElsewhereMayExpect) {
  const Machine here = ThisMachine({}, Isa::kScalar, "");
  EXPECT_EQ("", Expectation(here, here));
  Machine there = here;
  there.device = "cpu, another";
  EXPECT_EQ("recorded on cpu, another, here is " + here.device +
                ": level portable promises the same bits",
            Expectation(there, here));
  there.numerics = "retrace-numerics-0";
  EXPECT_NE(std::string::npos, Expectation(there, here).find("expect the bits to part"));
  NumericsRecipe numerics;
  numerics.level = NumericsLevel::kNative;
  const Machine native = ThisMachine(numerics, Isa::kScalar, "LibTorch 1");
  EXPECT_EQ("", Expectation(native, native));
  EXPECT_NE(std::string::npos,
            Expectation(native, ThisMachine(numerics, Isa::kScalar, "LibTorch 2"))
                .find("nothing is promised"));
  EXPECT_NE(std::string::npos, Expectation(here, native).find("here at level native"));
}

}  // namespace
}  // namespace retrace
