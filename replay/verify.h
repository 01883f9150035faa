// Verify: is all that a run keeps as it was written, and does every kept state follow from the one
// before it? Used by `retrace verify`. (That the updates can be lived again is another question:
// ReplayAsRecorded in surgery/branch.h.)
//
// Proven are: every ledger line and the chain of their digests, the frozen recipe and manifest,
// size and digest of every file, the digest of every tensor; that each keyframe has its position's
// digest, and that each journal leads from RUN@(k-1) to RUN@k. Damage is a result: all of it is
// listed.
#ifndef RETRACE_REPLAY_VERIFY_H_
#define RETRACE_REPLAY_VERIFY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/status.h"
#include "formats/run_check.h"
#include "kernels/isa.h"

namespace retrace {

struct VerifyOptions {
  int threads = 1;
  Isa isa = BestIsa();
  // After each kept position: how many of how many.
  std::function<void(int64_t done, int64_t total)> progress;
};

struct VerifyReport {
  int64_t first_position = 0, last_position = -1;
  int64_t ledger_lines = 0;  // as written
  int64_t keyframes = 0;     // read, with their position's digest
  int64_t journals = 0;      // read
  int64_t walked = 0;        // of them, those that lead from a proven state to RUN@k
  std::vector<Damage> damage;
  std::vector<std::string> remarks;  // no damage, but worth knowing

  bool fine() const { return damage.empty(); }
};

// Errors: kUsage where `dir` holds no run; kUnsupported for a newer format; kFailed where the disk
// does not read.
Result<VerifyReport> VerifyRun(const std::string& dir, const VerifyOptions& options);

}  // namespace retrace

#endif  // RETRACE_REPLAY_VERIFY_H_
