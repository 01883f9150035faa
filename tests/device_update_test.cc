// Whole updates on a device: the CUDA kernels under the emulator, driven as a GPU would be, give the
// states and records of the CPU.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/language.h"
#include "replay/device_plugin.h"
#include "tests/device_chain.h"

namespace retrace {
namespace {

std::unique_ptr<Device> Emulated() {
  std::string error;
  return cuda::OpenCudaDevice(0, &error);
}

// Faults of the emulator, in the process of a rank.
Status NoFaults() {
  const std::vector<std::string> faults = cuda::emulator::TakeFaults();
  return faults.empty() ? Status() : FailedError(faults[0]);
}

std::vector<std::string> ChainOf(const Recipe& recipe, const JobOptions& options, int updates) {
  const Result<std::vector<std::string>> chain = DeviceChain(recipe, options, updates, NoFaults);
  EXPECT_TRUE(chain.ok()) << chain.status().message();
  return chain.ok() ? *chain : std::vector<std::string>();
}

class DeviceUpdate : public testing::TestWithParam<int> {};

TEST_P(DeviceUpdate, EmulatedKernelsGiveTheStatesOfTheCpu) {
  const std::vector<std::string> overrides = DeviceRecipes()[GetParam()];
  SCOPED_TRACE(overrides[0] + " " + overrides[1]);
  const Result<Recipe> recipe = DeviceRecipe(overrides);
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  const std::unique_ptr<Device> device = Emulated();
  const std::vector<std::string> expected = ChainOf(*recipe, {}, 1);
  ASSERT_EQ(2u, expected.size());
  EXPECT_EQ(expected, ChainOf(*recipe, {.given_device = device.get()}, 1));
}

INSTANTIATE_TEST_SUITE_P(Recipes, DeviceUpdate,
                         testing::Range(0, static_cast<int>(DeviceRecipes().size())));

TEST(DeviceUpdateOnRanks, GivesTheSameStates) {
  // Two updates: the second starts from buffers that the first has used.
  const Result<Recipe> recipe = DeviceRecipe({"precision.preset=bf16"});
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  const std::unique_ptr<Device> device = Emulated();
  const std::vector<std::string> expected = ChainOf(*recipe, {}, 2);
  EXPECT_EQ(expected, ChainOf(*recipe, {.tp = 2, .given_device = device.get()}, 2));
}

// A device that is wrong in one op, once, is seen in the digest.
class OneWrongBit : public Device {
 public:
  explicit OneWrongBit(Device* right) : right_(right), ops_(right->ops(0.0f)) {
    g_right = ops_.add_scale;
    ops_.add_scale = [](const AddScaleArgs<float>& args, int64_t first, int64_t last) {
      g_right(args, first, last);
      if (g_calls++ == 0) args.y[first] = std::nextafter(args.y[first], 1e30f);
    };
    g_calls = 0;
  }

  std::string name() const override { return "one wrong bit"; }
  void* Allocate(size_t size_bytes) override { return right_->Allocate(size_bytes); }
  void Free(void* data) override { right_->Free(data); }
  Status Wait() override { return right_->Wait(); }
  const OpTable<float>& ops(float) override { return ops_; }
  const OpTable<double>& ops(double) override { return right_->ops(0.0); }
  void Multiply(std::span<const GemmArgs<float>> products) override { right_->Multiply(products); }
  void Multiply(std::span<const GemmArgs<double>> products) override { right_->Multiply(products); }
  void AttentionForward(BlockwiseAttention<float> a) override { right_->AttentionForward(a); }
  void AttentionForward(BlockwiseAttention<double> a) override { right_->AttentionForward(a); }
  void AttentionBackward(BlockwiseAttention<float> a) override { right_->AttentionBackward(a); }
  void AttentionBackward(BlockwiseAttention<double> a) override { right_->AttentionBackward(a); }
  void AddGroups(const HeadGroups<float>& a) override { right_->AddGroups(a); }
  void AddGroups(const HeadGroups<double>& a) override { right_->AddGroups(a); }
  void AdamW(const DeviceAdamWArgs& a) override { right_->AdamW(a); }
  void SumSquares(const float* x, int64_t n, double* sums) override {
    right_->SumSquares(x, n, sums);
  }
  void SumUpdateSquares(const DeviceUpdateSquaresArgs& a) override { right_->SumUpdateSquares(a); }

 private:
  static inline void (*g_right)(const AddScaleArgs<float>&, int64_t, int64_t) = nullptr;
  static inline int g_calls = 0;
  Device* right_;
  OpTable<float> ops_;
};

TEST(DeviceUpdateFaults, OneWrongBitOfADeviceIsSeenInTheStates) {
  const Result<Recipe> recipe = DeviceRecipe({"precision.preset=fp32"});
  ASSERT_TRUE(recipe.ok());
  const std::unique_ptr<Device> device = Emulated();
  OneWrongBit wrong(device.get());
  const std::vector<std::string> expected = ChainOf(*recipe, {}, 1);
  const std::vector<std::string> got = ChainOf(*recipe, {.given_device = &wrong}, 1);
  ASSERT_EQ(2u, got.size());
  EXPECT_EQ(expected[0], got[0]);
  EXPECT_NE(expected[1], got[1]);
}

// A device that fails ends the update with what it says, and the state stays.
class FailingDevice : public OneWrongBit {
 public:
  using OneWrongBit::OneWrongBit;
  Status Wait() override { return FailedError("cuda:0: an illegal memory access was encountered"); }
};

TEST(DeviceUpdateFaults, AnErrorOfTheDeviceEndsTheUpdate) {
  const Result<Recipe> recipe = DeviceRecipe({"precision.preset=fp32"});
  ASSERT_TRUE(recipe.ok());
  const std::unique_ptr<Device> device = Emulated();
  FailingDevice failing(device.get());
  const auto chain = DeviceChain(*recipe, {.given_device = &failing}, 1);
  ASSERT_FALSE(chain.ok());
  EXPECT_EQ(StatusCode::kFailed, chain.status().code());
  EXPECT_NE(std::string::npos, chain.status().message().find("illegal memory access"));
}

TEST(DeviceNames, AreCpuAndNumberedCuda) {
  EXPECT_EQ(-1, DeviceOrdinal("cpu", 3).value());
  EXPECT_EQ(0, DeviceOrdinal("cuda", 0).value());
  EXPECT_EQ(3, DeviceOrdinal("cuda:1", 2).value());
  for (const char* wrong : {"", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda:99999"}) {
    EXPECT_EQ(StatusCode::kUsage, DeviceOrdinal(wrong, 0).status().code()) << wrong;
  }
}

TEST(DeviceNames, AMissingPluginIsSaidWithTheWayToGetIt) {
  setenv("RETRACE_PLUGIN_DIR", "/nonexistent", 1);
  const Status status = OpenDevice("cuda", 0).status();
  unsetenv("RETRACE_PLUGIN_DIR");
  EXPECT_EQ(StatusCode::kUnsupported, status.code());
  EXPECT_NE(std::string::npos, status.message().find("libretrace_cuda.so")) << status.message();
  EXPECT_NE(std::string::npos, status.message().find("scripts/setup.sh")) << status.message();
}

}  // namespace
}  // namespace retrace
