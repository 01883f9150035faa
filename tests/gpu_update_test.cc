// Whole updates on a GPU give the states and records of the CPU. Skipped, with the reason, where
// there is no GPU. (label: gpu)
#include <gtest/gtest.h>

#include "replay/device_plugin.h"
#include "tests/device_chain.h"

namespace retrace {
namespace {

class GpuUpdate : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const Status status = OpenDevice("cuda", 0).status();
    if (!status.ok()) GTEST_SKIP() << status.message();
  }
};

TEST_P(GpuUpdate, GivesTheStatesOfTheCpu) {
  const std::vector<std::string> overrides = DeviceRecipes()[GetParam()];
  SCOPED_TRACE(overrides[0] + " " + overrides[1]);
  const Result<Recipe> recipe = DeviceRecipe(overrides);
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  const auto expected = DeviceChain(*recipe, {}, 4);
  const auto got = DeviceChain(*recipe, {.device = "cuda"}, 4);
  ASSERT_TRUE(expected.ok()) << expected.status().message();
  ASSERT_TRUE(got.ok()) << got.status().message();
  EXPECT_EQ(*expected, *got);
}

INSTANTIATE_TEST_SUITE_P(Recipes, GpuUpdate,
                         testing::Range(0, static_cast<int>(DeviceRecipes().size())));

}  // namespace
}  // namespace retrace
