// StateDifference: how two states differ: every tensor's parameters and moments, counters and rule
// memories. Used by diff and tests. Values; no printing.
//
// Digests come first: states of equal digest are the same, and of keyframes the pieces of equal
// digest are. Where that answers for all that is selected, no tensor is read; else both states are.
// The states may be of different V, and even of different models: tensors are matched by name and
// compared as wholes. Functions are thread-safe; RecordedState is not.
#ifndef RETRACE_REPLAY_STATE_DIFF_H_
#define RETRACE_REPLAY_STATE_DIFF_H_

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/diff.h"
#include "core/layout.h"
#include "core/state.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"

namespace retrace {

// What is compared.
struct Selection {
  std::function<bool(std::string_view name)> tensor;  // none: all
  std::array<bool, kNumComponents> components = {true, true, true};

  bool Has(std::string_view name) const { return !tensor || tensor(name); }
};

// A tensor of a set that is compared with another.
struct NamedTensor {
  std::string name;
  std::string component;  // "p", "m", "v"; "g"; "" for a file's tensor
  std::vector<int64_t> shape;
  TensorView view;  // its last dimension are the columns
  // Known to have the same bits as its namesake; the view then has a shape and no elements.
  bool known_equal = false;
  std::span<const double> doubles = {};  // of an FP64 tensor its elements; the view then has none
};

struct ComparedTensor {
  std::string name, component;
  std::vector<int64_t> shape;
  TensorDifference difference;

  std::string Label() const;                     // "NAME#m"; a parameter is its name alone
  std::string IndexText(int64_t element) const;  // "[3, 7]"
};

struct TensorSetDifference {
  std::vector<ComparedTensor> tensors;      // all that were compared, in the order of `a`
  std::vector<std::string> only_a, only_b;  // labels
  std::vector<std::string> shapes;          // "NAME: [2, 3] and [3, 2]"

  bool identical() const;
  int64_t differing() const;            // tensors
  const ComparedTensor* First() const;  // the first that differs; nullptr: none
};

std::string TensorLabel(const std::string& name, const std::string& component);
std::string ShapeText(const std::vector<int64_t>& shape);  // "[4096, 128]"

// Tensors of the same name and component are compared. Each tensor on one thread.
TensorSetDifference DiffTensorSets(const std::vector<NamedTensor>& a,
                                   const std::vector<NamedTensor>& b, ThreadPool& pool);

// The selected tensors of a state that holds all shards: p of every tensor, then m, then v.
std::vector<NamedTensor> StateTensors(const Layout& layout, const State& state,
                                      const Selection& selection);
// Gradients of all shards, as a journal has them.
std::vector<NamedTensor> GradientTensors(const Layout& layout,
                                         const std::vector<std::vector<float>>& gradients,
                                         const Selection& selection);

// A counter or a rule's memory.
struct ScalarDifference {
  std::string name;  // "schedule_index", "adam_t of NAME", "memory norm_ema[0]"
  std::string a, b;  // "-": absent
};

struct StateDifference {
  TensorSetDifference tensors;
  std::vector<ScalarDifference> scalars;

  bool identical() const { return tensors.identical() && scalars.empty(); }
};

// Positions, counters and memories. Tensors of both layouts are matched by name.
std::vector<ScalarDifference> DiffScalars(const Layout& layout_a, const State& a,
                                          const Layout& layout_b, const State& b);

StateDifference DiffStates(const Layout& layout_a, const State& a, const Layout& layout_b,
                           const State& b, const Selection& selection, ThreadPool& pool);

// A state of a run, read when it is first needed.
class RecordedState {
 public:
  // Arguments outlive it. The run has `position`.
  RecordedState(const RunReader& run, const Layout& layout, Engine& engine, int64_t position)
      : run_(run), layout_(layout), engine_(engine), position_(position) {}

  const RunReader& run() const { return run_; }
  const Layout& layout() const { return layout_; }
  Engine& engine() const { return engine_; }
  int64_t position() const { return position_; }
  const Digest& digest() const { return run_.history().Find(position_)->digest; }
  bool was_read() const { return state_.has_value(); }

  // Whole, proven by the digest in the ledger. Errors: those of Timeline::Seek.
  Result<const State*> Read();

  // What a keyframe's index says without its slabs: digests [shard][piece][component], proven by
  // the digest in the ledger; counters and memory in a state without shards. nullptr: not a
  // keyframe.
  struct Outline {
    std::vector<ShardDigests> digests;
    State scalars;
  };
  Result<const Outline*> ReadOutline();

 private:
  const RunReader& run_;
  const Layout& layout_;
  Engine& engine_;
  const int64_t position_;
  std::optional<State> state_;
  std::optional<Outline> outline_;
};

Result<StateDifference> DiffRecorded(RecordedState& a, RecordedState& b,
                                     const Selection& selection);

}  // namespace retrace

#endif  // RETRACE_REPLAY_STATE_DIFF_H_
