// The self-test finds what it is there to find: a wrong kernel, whichever it is, and an update that
// depends on how it is carried. (That all is well on this machine is one of its cases.)
#include "replay/selftest.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace retrace {
namespace {

std::vector<SelftestRow> Differing(const std::vector<SelftestRow>& rows) {
  std::vector<SelftestRow> differing;
  for (const SelftestRow& row : rows) {
    if (row.outcome == SelftestOutcome::kDiffers) differing.push_back(row);
  }
  return differing;
}

std::string Text(const std::vector<SelftestRow>& rows) {
  std::string text;
  for (const SelftestRow& row : rows) {
    text +=
        row.section + ": " + row.what + ": " + OutcomeName(row.outcome) + " " + row.detail + "\n";
  }
  return text;
}

TEST(Selftest, EverythingIsIdenticalHere) {
  std::set<std::string> sections;
  int64_t told = 0;
  SelftestOptions options;
  options.row = [&](const SelftestRow&) { ++told; };
  const std::vector<SelftestRow> rows = RunSelftest(options);
  EXPECT_TRUE(Differing(rows).empty()) << Text(Differing(rows));
  EXPECT_EQ(told, std::ssize(rows));
  for (const SelftestRow& row : rows) {
    sections.insert(row.section);
    if (row.outcome == SelftestOutcome::kAbsent) continue;
    EXPECT_GT(row.checks, 0) << row.what;
    EXPECT_FALSE(row.why.empty()) << row.what;
  }
  for (const char* section :
       {"this machine", "avx2 and scalar", "avx512 and scalar", "threads", "updates"}) {
    EXPECT_TRUE(sections.contains(section)) << section;
  }
}

bool HasVectors() { return BestIsa() != Isa::kScalar; }

// Kernels that are wrong on the best instruction set alone; what runs them is a plain function, so
// faults are planted by static state.
OpTable<float> g_planted;

const OpTable<float>& PlantedOps(Isa isa) { return isa == BestIsa() ? g_planted : Ops<float>(isa); }

void ForgetfulAdd(const AddArgs<float>& args, int64_t first, int64_t last) {
  Ops<float>(Isa::kScalar).add(args, first, last);
  if (last - first > 16)
    args.dst[first + 16] = std::bit_cast<float>(std::bit_cast<uint32_t>(args.dst[first + 16]) ^ 1u);
}

TEST(Selftest, OneWrongBitOfOneOpIsFoundAndTheOpIsNamed) {
  if (!HasVectors()) GTEST_SKIP() << "this processor has scalar code alone";
  g_planted = Ops<float>(BestIsa());
  g_planted.add = ForgetfulAdd;
  SelftestOptions options;
  options.kernels.ops = PlantedOps;
  const std::vector<SelftestRow> differing = Differing(SelftestIsa(BestIsa(), options));
  ASSERT_EQ(1u, differing.size()) << Text(differing);
  EXPECT_EQ("op add", differing[0].what);
  EXPECT_NE(std::string::npos, differing[0].detail.find("element 16: expected")) << Text(differing);
}

// The table as an array of function pointers: whichever op does nothing, exactly its row differs.
TEST(Selftest, EveryOpOfTheTableIsWatched) {
  if (!HasVectors()) GTEST_SKIP() << "this processor has scalar code alone";
  constexpr size_t kOps = sizeof(OpTable<float>) / sizeof(void*);
  std::set<std::string> named;
  for (size_t op = 0; op < kOps; ++op) {
    auto pointers = std::bit_cast<std::array<void*, kOps>>(Ops<float>(BestIsa()));
    pointers[op] = reinterpret_cast<void*>(+[](const void*, int64_t, int64_t) {});
    g_planted = std::bit_cast<OpTable<float>>(pointers);
    SelftestOptions options;
    options.kernels.ops = PlantedOps;
    const std::vector<SelftestRow> differing = Differing(SelftestOps(BestIsa(), options));
    ASSERT_EQ(1u, differing.size()) << "op " << op << "\n" << Text(differing);
    named.insert(differing[0].what);
  }
  EXPECT_EQ(kOps, named.size());
}

TEST(Selftest, WrongProductsAndAWrongOptimizerAreFound) {
  if (!HasVectors()) GTEST_SKIP() << "this processor has scalar code alone";
  SelftestOptions options;
  options.kernels.gemm = [](Isa isa, const GemmArgs<float>& args, GemmScratch& scratch) {
    GemmArgs<float> shorter = args;  // forgets the last product of long chains
    if (isa != Isa::kScalar && args.k > 256) --shorter.k;
    GemmSerial(isa, shorter, scratch);
  };
  options.kernels.gemm64 = [](Isa isa, const GemmArgs<double>& args, GemmScratch& scratch) {
    GemmSerial(isa, args, scratch);
    if (isa != Isa::kScalar && args.m == 63) args.c[args.m * args.n - 1] += 1e-9;
  };
  options.kernels.adamw = [](Isa isa, const OptimizerRow& row, float clip, const float* g, float* p,
                             float* m, float* v, int64_t n) {
    OptimizerRow other = row;
    if (isa != Isa::kScalar) other.eps = std::bit_cast<float>(std::bit_cast<uint32_t>(row.eps) + 1);
    AdamW(isa, other, clip, g, p, m, v, n);
  };
  options.kernels.sum_squares = [](Isa isa, const float* x, int64_t n) {
    return SumSquaresBlock(isa, x, isa != Isa::kScalar && n == 17 ? 16 : n);
  };
  std::set<std::string> named;
  for (const SelftestRow& row : Differing(SelftestIsa(BestIsa(), options))) named.insert(row.what);
  const std::set<std::string> expected = {"matrix products, FP32", "matrix products, FP64", "AdamW",
                                          "sum of squares"};
  EXPECT_EQ(expected, named);
}

// Adds one unit in the last place to one element of one op of the second update.
class Meddler : public Probe {
 public:
  void Op(const std::string& name, const float* data, int64_t, int64_t) override {
    if (name == "mb2/layer1/down_proj" && ++seen_ == 2) {
      float& x = const_cast<float&>(data[7]);
      x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) + 1);
    }
  }
  void Op(const std::string&, const double*, int64_t, int64_t) override {}

 private:
  int seen_ = 0;
};

TEST(Selftest, LevelNativeIsTheSameAgainAndAnUpdateThatIsNotIsFound) {
  const std::vector<SelftestRow> rows = SelftestNative({});
  ASSERT_FALSE(rows.empty());
  if (rows[0].outcome == SelftestOutcome::kAbsent) GTEST_SKIP() << rows[0].detail;
  EXPECT_TRUE(Differing(rows).empty()) << Text(rows);
  std::set<std::string> named;
  for (const SelftestRow& row : rows) named.insert(row.what);
  for (const char* what : {"op rms_norm", "op softmax", "op softmax_backward", "op geglu",
                           "op geglu_backward", "op softcap", "op softcap_backward", "op sum_exp",
                           "matrix products, FP32"}) {
    EXPECT_TRUE(named.contains(what)) << what << "\n" << Text(rows);
  }
  std::vector<std::unique_ptr<Meddler>> meddlers;
  SelftestOptions options;
  options.probe = [&](const JobOptions& job) -> Probe* {
    if (job.threads != 3 || job.tp != 1) return nullptr;
    return meddlers.emplace_back(std::make_unique<Meddler>()).get();
  };
  const std::vector<SelftestRow> differing = Differing(SelftestNative(options));
  ASSERT_EQ(1u, differing.size()) << Text(differing);
  EXPECT_NE(std::string::npos, differing[0].what.find("whole updates")) << Text(differing);
  EXPECT_NE(std::string::npos, differing[0].detail.find("3 threads, tp 1")) << Text(differing);
}

TEST(Selftest, AnUpdateThatDependsOnItsThreadsIsFoundWithItsPosition) {
  std::vector<std::unique_ptr<Meddler>> meddlers;
  SelftestOptions options;
  options.probe = [&](const JobOptions& job) -> Probe* {
    if (job.threads != 3 || job.tp != 1 || job.isa != Isa::kScalar) return nullptr;
    return meddlers.emplace_back(std::make_unique<Meddler>()).get();
  };
  const std::vector<SelftestRow> differing = Differing(SelftestUpdates(options));
  ASSERT_EQ(1u, differing.size()) << Text(differing);
  EXPECT_EQ("updates", differing[0].section);
  EXPECT_NE(std::string::npos, differing[0].what.find("scalar, 1 ranks"));
  EXPECT_NE(std::string::npos, differing[0].detail.find("3 threads")) << Text(differing);
  EXPECT_NE(std::string::npos, differing[0].detail.find("position 2:")) << Text(differing);
}

}  // namespace
}  // namespace retrace
