// Blame: which part of one update moved the loss. Used by `retrace blame`. Forward passes only, of
// a fixed batch, at parameters between RUN@(k-1) and RUN@k.
//
// The update blamed is the optimizer's: from the state just before update k, after the surgery that
// is dated there, to RUN@k. Parameters between the two are before + share * (after - before), the
// difference in FP64 and rounded once, so that shares 0 and 1 are the two states to the bit, and the
// losses there those of the records, where the run has them; a loss that is not the record's is an
// error. The pass is that of the recipe in force at update k.
//
// Losses of parts do not add up: "alone" is what one group's change does to the state before,
// "without" what the update does when that group's change is left out. Where parts are independent the two
// agree, and the sum of all alone is the whole; the report has the remainder.
#ifndef RETRACE_SURGERY_BLAME_H_
#define RETRACE_SURGERY_BLAME_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "formats/run_dir.h"
#include "replay/job.h"
#include "surgery/tensor_tree.h"

namespace retrace {

// The batch that losses are of.
enum class BlameBatch {
  kUpdate,      // that of update k, which its gradient is of
  kNext,        // that of update k+1
  kEvaluation,  // the recipe's fixed evaluation batch
};

// The cross-entropy of each token, in nats, and the batch's mean as records have it.
struct TokenLosses {
  int64_t length = 0;          // of a sequence
  std::vector<double> tokens;  // [sequences, length]
  double mean = 0;

  int64_t sequences() const { return std::ssize(tokens) / length; }
  std::vector<double> BySequence() const;  // means
  std::vector<double> ByPosition() const;
};

// One part of the update.
struct BlameGroup {
  std::string name, glob;  // glob "": all that --only leaves out
  int64_t tensors = 0, elements = 0;
  double change = 0;   // norm of its change of the parameters
  double alone = 0;    // loss after its change alone
  double without = 0;  // loss after all but its change
};

// The loss along the update: L(share) at before + share * (after - before). Second difference
// (L(h) - 2 L(0) + L(-h)) / h^2 = d' H d, with d the update and H the Hessian at the state before.
struct UpdateCurvature {
  double step = 0;               // h
  double slope = 0;              // dL/dshare at 0, central
  double second = 0;             // by steps of h
  double second_wide = 0;        // by steps of 2h: how far apart the two are tells the error
  double change2 = 0;            // |d|^2
  double preconditioned2 = 0;    // d' P d
  double lr = 0, beta1 = 0;

  double Plain() const { return second / change2; }                    // d'Hd / d'd
  double Preconditioned() const { return second / preconditioned2; }   // d'Hd / d'Pd
  double GradientEdge() const { return 2 / lr; }
  double MomentumEdge() const { return (2 + 2 * beta1) / ((1 - beta1) * lr); }
};
// P = diag((sqrt(v^) + eps) / update_clip), what AdamW divides by. A quadratic with Hessian H makes
// preconditioned descent without momentum unstable where the largest eigenvalue of P^-1 H is above
// 2/lr, and with momentum beta1 above (2 + 2 beta1) / ((1 - beta1) lr) (Cohen et al. 2022, arXiv
// 2207.14484). Preconditioned() is a Rayleigh quotient of that matrix, so at most that eigenvalue.

struct BlameReport {
  int64_t update = 0;
  int64_t tokens = 0;  // of the batch
  TokenLosses before, after;
  bool before_recorded = false, after_recorded = false;  // equal to what a record says
  std::vector<BlameGroup> groups;                        // in the order of the model
  std::vector<std::pair<double, double>> along;          // share, loss
  UpdateCurvature curvature;

  double Change() const { return after.mean - before.mean; }
  double SumAlone() const;
  double Remainder() const { return Change() - SumAlone(); }
};

struct BlameOptions {
  BlameBatch on = BlameBatch::kEvaluation;
  TreeLevel level = TreeLevel::kLayer;
  std::string only;  // glob; what it leaves out is one group. "": all
  std::vector<double> shares = {0, 0.25, 0.5, 1, 2};
  double step = 0x1p-5;  // of the curvature's differences
  // Forward passes of the batch, after each.
  std::function<void(int64_t done, int64_t all)> progress;
};

// The batch that is meant where none is named: the evaluation batch, or that of the update.
BlameBatch DefaultBatch(const Recipe& recipe);

// The job has one rank. Errors: kUsage where the run has no such update, or it was not applied, or no
// such batch; kFailed where a loss is not the record's; those of the store.
Result<BlameReport> Blame(const RunReader& run, Job& job, int64_t update,
                          const BlameOptions& options);

// Forward passes that Blame would make. Errors: kUsage for a glob that matches no tensor.
Result<int64_t> BlamePasses(const Layout& layout, const BlameOptions& options);

}  // namespace retrace

#endif  // RETRACE_SURGERY_BLAME_H_
