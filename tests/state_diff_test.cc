#include "replay/state_diff.h"

#include <gtest/gtest.h>

#include <bit>

#include "tests/small_run.h"

namespace retrace {
namespace {

// A state whose elements depend on tensor, component and place alone, so on no V.
State WholeState(const Layout& layout) {
  State state = MakeState(layout, 0, layout.shards());
  state.counters.position = state.counters.schedule_index = 7;
  state.counters.adam_t.assign(layout.tensors().size(), 7);
  state.memory["norm_ema"] = {0.5, -0.0};
  for (int s = 0; s < layout.shards(); ++s) {
    for (const Piece& piece : layout.pieces(s)) {
      for (int c = 0; c < kNumComponents; ++c) {
        float* out = state.shards[s].slabs[c].data() + piece.offset;
        for (int64_t row = piece.row_first; row < piece.row_last; ++row) {
          for (int64_t col = piece.col_first; col < piece.col_last; ++col) {
            const int64_t element = row * layout.tensors()[piece.tensor].cols + col;
            *out++ = static_cast<float>(1 + element + 1000 * (3 * piece.tensor + c));
          }
        }
      }
    }
  }
  return state;
}

// The place of an element of a whole tensor.
float* Element(const Layout& layout, State* state, int tensor, int c, int64_t row, int64_t col) {
  for (int s = 0; s < layout.shards(); ++s) {
    const Piece* piece = layout.FindPiece(s, tensor);
    if (piece == nullptr || row < piece->row_first || row >= piece->row_last ||
        col < piece->col_first || col >= piece->col_last) {
      continue;
    }
    return state->shards[s].slabs[c].data() + piece->offset +
           (row - piece->row_first) * piece->cols() + (col - piece->col_first);
  }
  return nullptr;
}

class StateDiff : public testing::Test {
 protected:
  ThreadPool pool_{2};
};

TEST_F(StateDiff, AStateIsTheSameWhateverTheVirtualShards) {
  const Layout one = SmallLayout(1), two = SmallLayout(2);
  const StateDifference d = DiffStates(one, WholeState(one), two, WholeState(two), {}, pool_);
  EXPECT_TRUE(d.identical());
  EXPECT_EQ(kNumComponents * one.tensors().size(), d.tensors.tensors.size());
}

TEST_F(StateDiff, OneFlippedBitIsNamedByTensorElementAndValues) {
  const Layout one = SmallLayout(1), two = SmallLayout(2);
  const State whole = WholeState(one);
  for (size_t t = 0; t < one.tensors().size(); ++t) {
    const TensorSpec& spec = one.tensors()[t];
    for (int c = 0; c < kNumComponents; ++c) {
      const int64_t row = spec.rows - 1, col = spec.cols / 2;
      const int bit = static_cast<int>(3 * t + c) % 32;
      State damaged = WholeState(two);
      float* element = Element(two, &damaged, static_cast<int>(t), c, row, col);
      ASSERT_NE(nullptr, element);
      const float before = *element;
      *element = std::bit_cast<float>(std::bit_cast<uint32_t>(before) ^ (1u << bit));
      const StateDifference d = DiffStates(one, whole, two, damaged, {}, pool_);
      ASSERT_FALSE(d.identical());
      EXPECT_TRUE(d.scalars.empty());
      ASSERT_EQ(1, d.tensors.differing());
      const ComparedTensor& first = *d.tensors.First();
      EXPECT_EQ(spec.name, first.name);
      EXPECT_EQ(ComponentName(static_cast<Component>(c)), first.component);
      EXPECT_EQ(1, first.difference.differing);
      ASSERT_TRUE(first.difference.first);
      EXPECT_EQ(row * spec.cols + col, first.difference.first->index);
      EXPECT_EQ(spec.vector ? ShapeText({col}) : ShapeText({row, col}),
                first.IndexText(first.difference.first->index));
      EXPECT_EQ(before, first.difference.first->a);
      EXPECT_EQ(std::bit_cast<uint32_t>(*element),
                std::bit_cast<uint32_t>(first.difference.first->b));
    }
  }
}

TEST_F(StateDiff, CountersAndMemoriesAreComparedByBits) {
  const Layout layout = SmallLayout();
  const State a = WholeState(layout);
  State b = a;
  b.counters.schedule_index = 6;
  b.counters.adam_t[1] = 0;
  b.memory["norm_ema"][1] = 0.0;
  b.memory["window"] = {1.0};
  const StateDifference d = DiffStates(layout, a, layout, b, {}, pool_);
  EXPECT_TRUE(d.tensors.identical());
  ASSERT_EQ(4u, d.scalars.size());
  EXPECT_EQ("schedule_index", d.scalars[0].name);
  EXPECT_EQ("7", d.scalars[0].a);
  EXPECT_EQ("6", d.scalars[0].b);
  EXPECT_EQ("adam_t of " + layout.tensors()[1].name, d.scalars[1].name);
  EXPECT_EQ("memory norm_ema[1]", d.scalars[2].name);
  EXPECT_EQ("-0", d.scalars[2].a);
  EXPECT_EQ("memory window", d.scalars[3].name);
  EXPECT_EQ("-", d.scalars[3].a);
}

TEST_F(StateDiff, OtherModelsAreMatchedByName) {
  ModelRecipe model = SmallModel();
  model.vocab_size = 32;
  model.layers = 2;
  model.layer_types = {LayerKind::kSliding, LayerKind::kSliding};
  const Layout a = SmallLayout(), b = Layout::Make(model, 2).value();
  const StateDifference d = DiffStates(a, WholeState(a), b, WholeState(b), {}, pool_);
  EXPECT_FALSE(d.identical());
  EXPECT_TRUE(d.tensors.only_a.empty());
  EXPECT_EQ(kNumComponents * (b.tensors().size() - a.tensors().size()), d.tensors.only_b.size());
  ASSERT_EQ(size_t{kNumComponents}, d.tensors.shapes.size());
  EXPECT_EQ("model.embed_tokens.weight: [16, 8] and [32, 8]", d.tensors.shapes[0]);
}

TEST_F(StateDiff, ASelectionLeavesTheRestOut) {
  const Layout layout = SmallLayout();
  const State a = WholeState(layout);
  State b = a;
  for (ShardState& shard : b.shards) {
    for (auto& slab : shard.slabs) slab[0] += 1.0f;
  }
  Selection selection;
  selection.components = {false, true, false};
  selection.tensor = [](std::string_view name) { return name == "model.embed_tokens.weight"; };
  const StateDifference d = DiffStates(layout, a, layout, b, selection, pool_);
  ASSERT_EQ(1u, d.tensors.tensors.size());
  EXPECT_EQ("model.embed_tokens.weight#m", d.tensors.tensors[0].Label());
  EXPECT_EQ(1, d.tensors.differing());
}

// A run of keyframes at 0 and 1 that differ in one element of m alone.
class RecordedStates : public testing::Test {
 protected:
  void SetUp() override {
    auto writer = RunWriter::Create(dir_, layout_, SmallPlan());
    ASSERT_TRUE(writer.ok());
    auto ranks = RankWriter::Open(layout_, dir_, (*writer)->attempt(), 0, 1);
    ASSERT_TRUE(ranks.ok());
    for (int64_t k : {0, 1}) {
      const State state = StateOf(k);
      std::vector<SlabSource> sources;
      for (int s = 0; s < layout_.shards(); ++s) {
        for (int c = 0; c < kNumComponents; ++c) {
          sources.push_back(
              {{s, WholeKind(static_cast<Component>(c)), {}}, state.shards[s].slabs[c].data()});
        }
      }
      (*ranks)->Snapshot(k, sources);
      Result<RankFileInfo> info = (*ranks)->Wait();
      ASSERT_TRUE(info.ok());
      StepCommit commit;
      commit.digest = StateDigest(layout_, state);
      commit.counters = state.counters;
      commit.memory = state.memory;
      commit.files = {*info};
      ASSERT_TRUE((*writer)->CommitStep(commit).ok());
    }
    ASSERT_TRUE((*writer)->Drain().ok());
  }

  State StateOf(int64_t position) {
    State state = WholeState(layout_);
    state.counters.position = position;
    if (position == 1) *Element(layout_, &state, 0, 1, 9, 3) = -5.0f;
    return state;
  }

  void RemoveSlabs() {
    for (const auto& file : std::filesystem::directory_iterator(dir_ + "/steps")) {
      if (file.path().string().find(".r0000.") != std::string::npos) {
        std::filesystem::remove(file.path());
      }
    }
  }

  const TempDir temp_;
  const std::string dir_ = temp_ / "run";
  const Layout layout_ = SmallLayout();
  Engine engine_{Isa::kScalar, 2};
};

TEST_F(RecordedStates, EqualDigestsAnswerWithoutReadingATensor) {
  RemoveSlabs();
  const RunReader run = RunReader::Open(dir_).value();
  RecordedState a(run, layout_, engine_, 1), b(run, layout_, engine_, 1);
  const Result<StateDifference> d = DiffRecorded(a, b, {});
  ASSERT_TRUE(d.ok()) << d.status().message();
  EXPECT_TRUE(d->identical());
  EXPECT_EQ(kNumComponents * layout_.tensors().size(), d->tensors.tensors.size());
  EXPECT_FALSE(a.was_read() || b.was_read());
}

TEST_F(RecordedStates, EqualPiecesOfKeyframesAreNotRead) {
  RemoveSlabs();
  const RunReader run = RunReader::Open(dir_).value();
  RecordedState a(run, layout_, engine_, 0), b(run, layout_, engine_, 1);
  Selection parameters;
  parameters.components = {true, false, true};
  const Result<StateDifference> same = DiffRecorded(a, b, parameters);
  ASSERT_TRUE(same.ok()) << same.status().message();
  EXPECT_TRUE(same->tensors.identical());
  ASSERT_EQ(1u, same->scalars.size());
  EXPECT_EQ("position", same->scalars[0].name);
  EXPECT_FALSE(a.was_read() || b.was_read());
  const Result<StateDifference> other = DiffRecorded(a, b, {});
  EXPECT_EQ(StatusCode::kDamaged, other.status().code()) << "m differs, and its slabs are gone";
}

TEST_F(RecordedStates, TheTensorWhosePiecesDifferIsReadAndCompared) {
  const RunReader run = RunReader::Open(dir_).value();
  RecordedState a(run, layout_, engine_, 0), b(run, layout_, engine_, 1);
  const Result<StateDifference> d = DiffRecorded(a, b, {});
  ASSERT_TRUE(d.ok()) << d.status().message();
  ASSERT_EQ(1, d->tensors.differing());
  const ComparedTensor& first = *d->tensors.First();
  EXPECT_EQ(layout_.tensors()[0].name + "#m", first.Label());
  EXPECT_EQ("[9, 3]", first.IndexText(first.difference.first->index));
  EXPECT_EQ(-5.0f, first.difference.first->b);
}

TEST_F(RecordedStates, ADamagedSlabIsAnErrorNotADifference) {
  for (const auto& file : std::filesystem::directory_iterator(dir_ + "/steps")) {
    if (file.path().string().find("000000001.a0001.r0000") == std::string::npos) continue;
    std::string bytes = ReadFileText(file.path());
    bytes[bytes.size() / 2] ^= 1;
    WriteFileText(file.path(), bytes);
  }
  const RunReader run = RunReader::Open(dir_).value();
  RecordedState a(run, layout_, engine_, 0), b(run, layout_, engine_, 1);
  EXPECT_EQ(StatusCode::kDamaged, DiffRecorded(a, b, {}).status().code());
}

}  // namespace
}  // namespace retrace
