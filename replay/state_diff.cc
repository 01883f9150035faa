#include "replay/state_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "replay/timeline.h"

namespace retrace {
namespace {

std::vector<int64_t> ShapeOf(const TensorSpec& spec) {
  if (spec.vector) return {spec.cols};
  return {spec.rows, spec.cols};
}

// The whole of a tensor, from the slab of each shard.
TensorView ViewOf(const Layout& layout, int tensor,
                  const std::function<const float*(int shard)>& slab) {
  const TensorSpec& spec = layout.tensors()[tensor];
  std::vector<TensorView::Part> parts;
  for (int s = 0; s < layout.shards(); ++s) {
    const Piece* piece = layout.FindPiece(s, tensor);
    if (piece == nullptr) continue;
    parts.push_back({piece->row_first, piece->row_last, piece->col_first, piece->col_last,
                     slab(s) + piece->offset});
  }
  return TensorView(spec.rows, spec.cols, std::move(parts));
}

using Outline = RecordedState::Outline;
using EqualByTensor = std::vector<std::array<bool, kNumComponents>>;

int ComponentIndex(const std::string& name) {
  for (int c = 0; c < kNumComponents; ++c) {
    if (name == ComponentName(static_cast<Component>(c))) return c;
  }
  RT_CHECK(!"p, m or v");
  return 0;
}

bool SamePieces(const Layout& layout, int tensor, int c, const Outline& a, const Outline& b) {
  for (int s = 0; s < layout.shards(); ++s) {
    const Piece* piece = layout.FindPiece(s, tensor);
    if (piece == nullptr) continue;
    const size_t i = piece - layout.pieces(s).data();
    if (a.digests[s][i][c] != b.digests[s][i][c]) return false;
  }
  return true;
}

// The tensors that two outlines of equal layouts show to be the same.
EqualByTensor KnownEqual(const Layout& layout, const Outline& a, const Outline& b) {
  EqualByTensor equal(layout.tensors().size());
  for (size_t t = 0; t < equal.size(); ++t) {
    for (int c = 0; c < kNumComponents; ++c) {
      equal[t][c] = SamePieces(layout, static_cast<int>(t), c, a, b);
    }
  }
  return equal;
}

// Pieces of equal index are the same part of the same tensor.
bool SameLayout(const Layout& a, const Layout& b) {
  return a.shards() == b.shards() &&
         std::equal(a.tensors().begin(), a.tensors().end(), b.tensors().begin(), b.tensors().end(),
                    [](const TensorSpec& x, const TensorSpec& y) {
                      return x.name == y.name && x.rows == y.rows && x.cols == y.cols &&
                             x.split == y.split && x.kv_heads == y.kv_heads;
                    });
}

// The selected tensors as shapes alone.
std::vector<NamedTensor> EqualTensors(const Layout& layout, const Selection& selection) {
  std::vector<NamedTensor> tensors;
  for (int c = 0; c < kNumComponents; ++c) {
    for (const TensorSpec& spec : layout.tensors()) {
      if (!selection.components[c] || !selection.Has(spec.name)) continue;
      tensors.push_back({spec.name, ComponentName(static_cast<Component>(c)), ShapeOf(spec),
                         TensorView(spec.rows, spec.cols, nullptr), true});
    }
  }
  return tensors;
}

class ScalarComparison {
 public:
  void Integer(const std::string& name, int64_t a, int64_t b) {
    if (a != b) out_.push_back({name, fmt::format("{}", a), fmt::format("{}", b)});
  }

  // Told apart by bits; where they print alike, the bits are shown.
  void Real(const std::string& name, double a, double b) {
    if (std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b)) return;
    std::string text_a = fmt::format("{}", a), text_b = fmt::format("{}", b);
    if (text_a == text_b) {
      text_a += fmt::format(" (0x{:016x})", std::bit_cast<uint64_t>(a));
      text_b += fmt::format(" (0x{:016x})", std::bit_cast<uint64_t>(b));
    }
    out_.push_back({name, text_a, text_b});
  }

  void Absent(const std::string& name, bool in_a) {
    out_.push_back({name, in_a ? "present" : "-", in_a ? "-" : "present"});
  }

  std::vector<ScalarDifference> Take() { return std::move(out_); }

 private:
  std::vector<ScalarDifference> out_;
};

void CompareAdamT(const Layout& layout_a, const State& a, const Layout& layout_b, const State& b,
                  ScalarComparison* comparison) {
  for (size_t t = 0; t < layout_a.tensors().size(); ++t) {
    const std::string& name = layout_a.tensors()[t].name;
    const int other = layout_b.Find(name);
    if (other < 0) continue;  // reported as a tensor that only one of them has
    comparison->Integer("adam_t of " + name, a.counters.adam_t[t], b.counters.adam_t[other]);
  }
}

void CompareMemory(const RuleMemory& a, const RuleMemory& b, ScalarComparison* comparison) {
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    if (other == b.end()) {
      comparison->Absent("memory " + name, true);
      continue;
    }
    comparison->Integer("size of memory " + name, std::ssize(values), std::ssize(other->second));
    for (size_t i = 0; i < std::min(values.size(), other->second.size()); ++i) {
      comparison->Real(fmt::format("memory {}[{}]", name, i), values[i], other->second[i]);
    }
  }
  for (const auto& [name, values] : b) {
    if (!a.contains(name)) comparison->Absent("memory " + name, false);
  }
}

}  // namespace

std::string TensorLabel(const std::string& name, const std::string& component) {
  return component.empty() || component == "p" ? name : name + "#" + component;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string ComparedTensor::Label() const { return TensorLabel(name, component); }

std::string ComparedTensor::IndexText(int64_t element) const {
  std::vector<int64_t> index(shape.size());
  for (int64_t d = std::ssize(shape) - 1; d >= 0; --d) {
    index[d] = element % shape[d];
    element /= shape[d];
  }
  return ShapeText(index);
}

bool TensorSetDifference::identical() const {
  return differing() == 0 && only_a.empty() && only_b.empty() && shapes.empty();
}

int64_t TensorSetDifference::differing() const {
  return std::count_if(tensors.begin(), tensors.end(),
                       [](const ComparedTensor& t) { return !t.difference.identical(); });
}

const ComparedTensor* TensorSetDifference::First() const {
  for (const ComparedTensor& tensor : tensors) {
    if (!tensor.difference.identical()) return &tensor;
  }
  return nullptr;
}

namespace {

// Where one of the two is FP64, both are compared as that.
TensorDifference DiffWide(const NamedTensor& x, const NamedTensor& y) {
  std::vector<double> wide;
  const auto elements = [&](const NamedTensor& tensor) -> std::span<const double> {
    if (!tensor.doubles.empty()) return tensor.doubles;
    const std::vector<float> values = FirstValues(tensor.view, tensor.view.numel());
    wide.assign(values.begin(), values.end());
    return wide;
  };
  return DiffDoubles(elements(x), elements(y));
}

}  // namespace

TensorSetDifference DiffTensorSets(const std::vector<NamedTensor>& a,
                                   const std::vector<NamedTensor>& b, ThreadPool& pool) {
  TensorSetDifference set;
  std::map<std::pair<std::string, std::string>, const NamedTensor*> others;
  for (const NamedTensor& tensor : b) others[{tensor.component, tensor.name}] = &tensor;
  std::vector<std::pair<const NamedTensor*, const NamedTensor*>> pairs;
  for (const NamedTensor& tensor : a) {
    const auto other = others.find({tensor.component, tensor.name});
    if (other == others.end()) {
      set.only_a.push_back(TensorLabel(tensor.name, tensor.component));
      continue;
    }
    if (tensor.shape == other->second->shape) {
      pairs.emplace_back(&tensor, other->second);
    } else {
      set.shapes.push_back(fmt::format("{}: {} and {}", TensorLabel(tensor.name, tensor.component),
                                       ShapeText(tensor.shape), ShapeText(other->second->shape)));
    }
    others.erase(other);
  }
  for (const NamedTensor& tensor : b) {
    if (!others.contains({tensor.component, tensor.name})) continue;
    set.only_b.push_back(TensorLabel(tensor.name, tensor.component));
  }
  set.tensors.resize(pairs.size());
  pool.Run(std::ssize(pairs), [&](int64_t i, int) {
    const NamedTensor& x = *pairs[i].first;
    const NamedTensor& y = *pairs[i].second;
    ComparedTensor& out = set.tensors[i];
    out = {x.name, x.component, x.shape, {}};
    if (x.known_equal && y.known_equal)
      out.difference.elements = x.view.numel();
    else if (x.doubles.empty() && y.doubles.empty())
      out.difference = DiffTensors(x.view, y.view);
    else
      out.difference = DiffWide(x, y);
  });
  return set;
}

std::vector<NamedTensor> StateTensors(const Layout& layout, const State& state,
                                      const Selection& selection) {
  RT_CHECK_EQ(layout.shards(), static_cast<int>(state.shards.size()));
  std::vector<NamedTensor> tensors = EqualTensors(layout, selection);
  for (NamedTensor& tensor : tensors) {
    const int c = ComponentIndex(tensor.component);
    tensor.view = ViewOf(layout, layout.Find(tensor.name),
                         [&](int shard) { return state.shards[shard].slabs[c].data(); });
    tensor.known_equal = false;
  }
  return tensors;
}

std::vector<NamedTensor> GradientTensors(const Layout& layout,
                                         const std::vector<std::vector<float>>& gradients,
                                         const Selection& selection) {
  RT_CHECK_EQ(layout.shards(), static_cast<int>(gradients.size()));
  std::vector<NamedTensor> tensors;
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const TensorSpec& spec = layout.tensors()[t];
    if (!selection.Has(spec.name)) continue;
    tensors.push_back(
        {spec.name, "g", ShapeOf(spec),
         ViewOf(layout, static_cast<int>(t), [&](int shard) { return gradients[shard].data(); }),
         false});
  }
  return tensors;
}

std::vector<ScalarDifference> DiffScalars(const Layout& layout_a, const State& a,
                                          const Layout& layout_b, const State& b) {
  ScalarComparison comparison;
  comparison.Integer("position", a.counters.position, b.counters.position);
  comparison.Integer("schedule_index", a.counters.schedule_index, b.counters.schedule_index);
  comparison.Integer("data_cursor", a.counters.data_cursor, b.counters.data_cursor);
  CompareAdamT(layout_a, a, layout_b, b, &comparison);
  CompareMemory(a.memory, b.memory, &comparison);
  return comparison.Take();
}

StateDifference DiffStates(const Layout& layout_a, const State& a, const Layout& layout_b,
                           const State& b, const Selection& selection, ThreadPool& pool) {
  return {DiffTensorSets(StateTensors(layout_a, a, selection), StateTensors(layout_b, b, selection),
                         pool),
          DiffScalars(layout_a, a, layout_b, b)};
}

Result<const State*> RecordedState::Read() {
  if (!state_) {
    RT_ASSIGN_OR_RETURN(state_, Timeline(run_, layout_, engine_).Seek(position_));
  }
  return &*state_;
}

Result<const RecordedState::Outline*> RecordedState::ReadOutline() {
  const Outline* none = nullptr;
  if (outline_) return &*outline_;
  if (!run_.history().Find(position_)->HasKeyframe()) return none;
  RT_ASSIGN_OR_RETURN(const StepIndex index, run_.ReadIndex(position_));
  Outline outline;
  outline.scalars.counters = index.counters;
  outline.scalars.memory = index.memory;
  outline.digests.resize(layout_.shards());
  for (int s = 0; s < layout_.shards(); ++s) outline.digests[s].resize(layout_.pieces(s).size());
  for (const RankFileInfo& file : index.files) {
    for (const SlabInfo& slab : file.slabs) {
      for (int c = 0; c < kNumComponents; ++c) {
        if (slab.id.kind != WholeKind(static_cast<Component>(c))) continue;
        if (!FitsLayout(layout_, slab.id) ||
            slab.digests.size() != outline.digests[slab.id.shard].size()) {
          return DamagedError(run_.dir() + ": " + file.name + " does not fit the recipe's layout");
        }
        for (size_t i = 0; i < slab.digests.size(); ++i) {
          outline.digests[slab.id.shard][i][c] = slab.digests[i];
        }
      }
    }
  }
  const Digest got = StateDigest(index.counters, index.memory, outline.digests);
  if (got != digest()) {
    return DamagedError(fmt::format("{}@{}: the ledger has the digest {}, its keyframe has {}",
                                    run_.dir(), position_, digest().Hex(), got.Hex()));
  }
  outline_ = std::move(outline);
  return &*outline_;
}

Result<StateDifference> DiffRecorded(RecordedState& a, RecordedState& b,
                                     const Selection& selection) {
  const bool same_layout = SameLayout(a.layout(), b.layout());
  ThreadPool& pool = a.engine().pool();
  if (same_layout && a.digest() == b.digest()) {
    const std::vector<NamedTensor> tensors = EqualTensors(a.layout(), selection);
    return StateDifference{DiffTensorSets(tensors, tensors, pool), {}};
  }
  EqualByTensor equal;
  const auto known_equal = [&](const NamedTensor& tensor) {
    return !equal.empty() && equal[a.layout().Find(tensor.name)][ComponentIndex(tensor.component)];
  };
  if (same_layout) {
    RT_ASSIGN_OR_RETURN(const Outline* outline_a, a.ReadOutline());
    RT_ASSIGN_OR_RETURN(const Outline* outline_b, b.ReadOutline());
    const std::vector<NamedTensor> tensors = EqualTensors(a.layout(), selection);
    if (outline_a && outline_b) equal = KnownEqual(a.layout(), *outline_a, *outline_b);
    if (!equal.empty() && std::all_of(tensors.begin(), tensors.end(), known_equal)) {
      return StateDifference{
          DiffTensorSets(tensors, tensors, pool),
          DiffScalars(a.layout(), outline_a->scalars, b.layout(), outline_b->scalars)};
    }
  }
  RT_ASSIGN_OR_RETURN(const State* state_a, a.Read());
  RT_ASSIGN_OR_RETURN(const State* state_b, b.Read());
  std::vector<NamedTensor> set_a = StateTensors(a.layout(), *state_a, selection);
  std::vector<NamedTensor> set_b = StateTensors(b.layout(), *state_b, selection);
  for (size_t i = 0; !equal.empty() && i < set_a.size(); ++i) {
    set_a[i].known_equal = set_b[i].known_equal = known_equal(set_a[i]);
  }
  return StateDifference{DiffTensorSets(set_a, set_b, pool),
                         DiffScalars(a.layout(), *state_a, b.layout(), *state_b)};
}

}  // namespace retrace
