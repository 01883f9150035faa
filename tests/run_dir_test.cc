#include "formats/run_dir.h"

#include <gtest/gtest.h>

#include "tests/small_run.h"

namespace retrace {
namespace {

TEST(RunDir, WhatIsWrittenIsReadBackBitForBit) {
  const TempDir temp;
  const Status status = GoOn(temp / "run");
  ASSERT_TRUE(status.ok()) << status.message();
  const Result<int64_t> last = CheckRun(temp / "run");
  ASSERT_TRUE(last.ok()) << last.status().message();
  EXPECT_EQ(kSmallLast, *last);
}

}  // namespace
}  // namespace retrace
