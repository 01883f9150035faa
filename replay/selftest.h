// Selftest: does this machine keep the promise of NUMERICS.md? Used by `retrace selftest`.
//
// Compares bits, never within a tolerance: every kernel on every instruction set of this processor
// with the scalar code, which is the clauses in code; random numbers and FP64 functions with what
// other machines gave; and whole updates of a small built-in recipe for instruction sets, threads
// and ranks, with each other and with what other machines gave. Level native is compared with itself: again, under load,
// from other addresses, on other ranks. Needs no file. Starts processes
// (ranks): the caller is single-threaded.
#ifndef RETRACE_REPLAY_SELFTEST_H_
#define RETRACE_REPLAY_SELFTEST_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/gemm.h"
#include "kernels/isa.h"
#include "kernels/ops.h"
#include "replay/job.h"
#include "replay/probe.h"

namespace retrace {

enum class SelftestOutcome {
  kIdentical,
  kDiffers,
  kAbsent,  // this processor has no such instructions, or there is no plug-in of level native
};
const char* OutcomeName(SelftestOutcome outcome);  // "identical", "differs", "absent"

struct SelftestRow {
  std::string section;  // "avx2 and scalar"
  std::string what;     // "op softmax"
  std::string why;      // what makes it so: the clause
  int64_t checks = 0;   // comparisons made
  SelftestOutcome outcome = SelftestOutcome::kIdentical;
  std::string detail;  // of the first difference, or why it is absent
};

// What is compared. A test plants a wrong kernel here.
struct SelftestKernels {
  const OpTable<float>& (*ops)(Isa) = Ops<float>;
  void (*gemm)(Isa, const GemmArgs<float>&, GemmScratch&) = GemmSerial<float>;
  void (*gemm64)(Isa, const GemmArgs<double>&, GemmScratch&) = GemmSerial<double>;
  decltype(&AdamW) adamw = AdamW;
  decltype(&SumSquaresBlock) sum_squares = SumSquaresBlock;
};

struct SelftestOptions {
  bool full = false;  // more values, more policies: minutes instead of seconds
  SelftestKernels kernels;
  // The probe of the updates that are carried so, or nullptr. A test plants a fault through it.
  std::function<Probe*(const JobOptions&)> probe;
  std::function<void(const SelftestRow&)> row;  // each row as soon as it is known
};

std::vector<SelftestRow> RunSelftest(const SelftestOptions& options);

// Its parts: the kernels of one instruction set, of them the ops alone, the updates, and level native.
std::vector<SelftestRow> SelftestIsa(Isa isa, const SelftestOptions& options);
std::vector<SelftestRow> SelftestOps(Isa isa, const SelftestOptions& options);
std::vector<SelftestRow> SelftestUpdates(const SelftestOptions& options);
std::vector<SelftestRow> SelftestNative(const SelftestOptions& options);

// The recipe of the updates, with some of its keys overridden.
Result<Recipe> SelftestRecipe(const std::vector<std::string>& overrides);

}  // namespace retrace

#endif  // RETRACE_REPLAY_SELFTEST_H_
