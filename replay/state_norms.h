// StateNorms: how each tensor moved in an update, from what a run keeps: its keyframes and
// journals, no forward pass. Used by report and stats. Values; WalkNorms uses the engine's threads,
// each tensor on one of them, so the sums depend on nothing but the states.
#ifndef RETRACE_REPLAY_STATE_NORMS_H_
#define RETRACE_REPLAY_STATE_NORMS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/update_range.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"
#include "replay/log_histogram.h"

namespace retrace {

// Of one tensor, or of several added up, in update k. Sums over elements, FP64. What needs the
// gradient is NaN where update k has no journal; what needs that of update k - 1, where that has
// none.
struct TensorMotion {
  double elements = 0;
  double parameter2 = 0;      // squares of p of RUN@(k-1), after surgery if there was any
  double change2 = 0;         // squares of p of RUN@k - p of RUN@(k-1)
  double first2 = 0;          // squares of m of RUN@k
  double second = 0;          // v of RUN@k
  double previous2 = 0;       // squares of m of RUN@(k-1)
  double gradient2 = 0;       // squares of g, before clipping
  double along = 0;           // m of RUN@(k-1) times g
  double same_sign_m = 0;     // elements where those two have the same sign
  double signed_m = 0;        // elements where neither is zero
  double below_eps = 0;       // elements with sqrt(v / bias correction) < eps
  double gradient_below = 0;  // elements with |clipped g| < eps
  double before2 = 0;         // squares of g of update k - 1
  double turned = 0;          // that times g
  double same_sign_g = 0;     // elements where those two have the same sign
  double signed_g = 0;        // elements where neither is zero
  LogHistogram ratios;        // of (clipped g)^2 / v^, where v^ > 0; empty unless asked for

  TensorMotion& operator+=(const TensorMotion& other);

  double UpdateRms(double lr) const;  // root mean square of the change, in learning rates
  double RelativeUpdate() const;      // ||change|| / ||p||
  double RootV() const;               // root of the mean of v
  double CosineWithM() const;         // of g and m of RUN@(k-1)
  double CosineWithLast() const;      // of g and g of update k - 1
  double SignsWithM() const;          // share of equal signs, of elements where neither is zero
  double SignsWithLast() const;
};

// One row of a tensor.
struct RowMotion {
  int64_t row = 0;
  double parameter2 = 0, change2 = 0, gradient2 = 0;  // as in TensorMotion
};

struct UpdateMotion {
  int64_t update = 0;
  std::vector<TensorMotion> tensors;  // canonical order
  std::vector<RowMotion> rows;        // of MotionOptions::rows_of
};

struct MotionOptions {
  bool ratios = false;
  int rows_of = -1;  // index of a tensor
};

// The longest range of updates within first..last, ending as late as it can, that the run's store
// can rebuild one after another.
UpdateRange KeptUpdates(const RunHistory& history, int64_t first, int64_t last);

// Of updates first..last, all kept. The last state is proven by its digest. `took` gets each update's
// motion in order. Errors: those of Timeline::Seek.
Status WalkNorms(const RunReader& run, const Layout& layout, Engine& engine,
                 const UpdateRange& range, const MotionOptions& options,
                 const std::function<void(UpdateMotion)>& took);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STATE_NORMS_H_
