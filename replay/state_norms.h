// StateNorms: how each tensor moved in an update, from what a run keeps: its keyframes and
// journals, no forward pass. Used by report. Values; WalkNorms uses the engine's threads, each
// tensor on one of them, so the sums depend on nothing but the states.
#ifndef RETRACE_REPLAY_STATE_NORMS_H_
#define RETRACE_REPLAY_STATE_NORMS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "core/layout.h"
#include "core/update_range.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"

namespace retrace {

// Of one tensor, update k. FP64 sums over its elements. What needs the gradient or the optimizer
// block is NaN where update k has no journal.
struct TensorMotion {
  double parameter = 0;  // ||w|| of RUN@(k-1), after surgery if there was any
  double change = 0;     // ||w of RUN@k - w of RUN@(k-1)||
  double first = 0;      // ||m|| of RUN@k
  double second = 0;     // sum of v of RUN@k
  double previous = 0;   // ||m|| of RUN@(k-1)
  double along = 0;      // sum of m of RUN@(k-1) times g
  double gradient = 0;   // ||g|| before clipping
  double below_eps = 0;  // elements with sqrt(v / bias correction) < eps
};

struct UpdateMotion {
  int64_t update = 0;
  std::vector<TensorMotion> tensors;  // canonical order
};

// The longest range of updates within first..last, ending as late as it can, that the run's store
// can rebuild one after another.
UpdateRange KeptUpdates(const RunHistory& history, int64_t first, int64_t last);

// Of updates first..last, all kept. The last state is proven by its digest. `progress` is called
// after each update. Errors: those of Timeline::Seek.
Result<std::vector<UpdateMotion>> WalkNorms(const RunReader& run, const Layout& layout,
                                            Engine& engine, const UpdateRange& range,
                                            const std::function<void(int64_t update)>& progress);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STATE_NORMS_H_
