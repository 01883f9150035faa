// The independent reader (tests/read_run.py) over a run with everything that the format has and the
// recipes of examples/ do not ask for: partial keyframes, factors per row and on the update, frozen
// and skipped tensors, rule memories, shards in files of several ranks. Skipped without its Python.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "replay/update.h"
#include "tests/places.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

// What each position keeps; 2 and 5 have been changed before their update.
Kept KeepOf(int64_t k) {
  return {.keyframe = k % 4 == 0, .journal = k > 0, .partial = k == 2 || k == 5};
}

OptimizerBlock BlockOf(const Layout& layout, int64_t k) {
  OptimizerBlock block;
  block.row_clips.resize(layout.tensors().size());
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    const float b1 = 0.9f, b2 = 0.95f;
    block.rows.push_back({.action = static_cast<TensorAction>(t % 5 == 3   ? 1
                                                              : t % 5 == 4 ? 2
                                                                           : 0),
                          .t = k,
                          .lr = 0.01f * static_cast<float>(k),
                          .beta1 = b1,
                          .one_minus_beta1 = 1 - b1,
                          .beta2 = b2,
                          .one_minus_beta2 = 1 - b2,
                          .bias_correction1 = 1 - std::pow(b1, static_cast<float>(k)),
                          .bias_correction2 = 1 - std::pow(b2, static_cast<float>(k)),
                          .eps = 1e-8f,
                          .weight_decay = t % 2 == 0 ? 0.1f : 0.0f,
                          .clip = 1.0f / 3.0f,
                          .update_clip = t % 3 == 1 ? 0.7f : 1.0f});
    for (int64_t r = 0; t % 2 == 0 && r < layout.tensors()[t].rows; ++r) {
      block.row_clips[t].push_back(1.0f / static_cast<float>(r + k));
    }
  }
  return block;
}

// RUN@(k-1) -> RUN@k. Surgery scales p of tensor 0, which is in force before the update.
void Advance(Engine& engine, const Layout& layout, int64_t k, State* state) {
  state->counters = StateAt(layout, k).counters;
  state->memory = StateAt(layout, k).memory;
  const auto gradients = GradientsOf(layout, k);
  for (int s = 0; s < layout.shards(); ++s) {
    ApplyBlock(engine, layout, BlockOf(layout, k), layout.pieces(s), gradients[s].data(),
               &state->shards[s]);
  }
}

void Operate(const Layout& layout, State* state) {
  for (int s = 0; s < layout.shards(); ++s) {
    const Piece* piece = layout.FindPiece(s, 0);
    if (piece == nullptr) continue;
    float* p = state->shards[s].slab(Component::kParameter).data() + piece->offset;
    for (int64_t i = 0; i < piece->numel(); ++i) p[i] *= -0.3f;
  }
}

void WriteRun(const std::string& dir, int64_t last) {
  auto job = SmallJob::Start(dir);
  ASSERT_TRUE(job.ok()) << job.status().message();
  const Layout& layout = job->layout;
  Engine engine(Isa::kScalar, 1);
  State state = StateAt(layout, 0);
  for (int64_t k = 0; k <= last; ++k) {
    const Kept keep = KeepOf(k);
    State before = state;
    if (keep.partial) Operate(layout, &before);
    state = before;
    if (k > 0) Advance(engine, layout, k, &state);
    const auto gradients = GradientsOf(layout, k);
    StepCommit commit;
    commit.digest = StateDigest(layout, state);
    commit.counters = state.counters;
    commit.memory = state.memory;
    commit.record = "{}";
    if (keep.journal) commit.optimizer = BlockOf(layout, k);
    for (int rank = 0; rank < layout.shards(); ++rank) {
      auto sources = SourcesOf(layout, state, gradients,
                               {.keyframe = keep.keyframe, .journal = keep.journal}, rank, 1);
      const auto changed = SourcesOf(layout, before, gradients, {.partial = keep.partial}, rank, 1);
      sources.insert(sources.end(), changed.begin(), changed.end());
      job->ranks[rank]->Snapshot(k, sources);
      auto info = job->ranks[rank]->Wait();
      ASSERT_TRUE(info.ok()) << info.status().message();
      commit.files.push_back(std::move(*info));
    }
    const Status committed = job->writer->CommitStep(commit);
    ASSERT_TRUE(committed.ok()) << committed.message();
  }
  ASSERT_TRUE(job->writer->Drain().ok());
}

TEST(IndependentReaderOfTheFormat, WalksPartialKeyframesAndEveryKindOfOptimizerRow) {
  const std::string python = TestPython();
  if (std::system((python + " -c 'import h5py, hdf5plugin, numpy, xxhash' 2>/dev/null").c_str())) {
    GTEST_SKIP() << python << " with scripts/test_requirements.txt is not there: run "
                 << "scripts/setup.sh --for-tests";
  }
  const TempDir temp;
  WriteRun(temp / "run", 6);
  if (HasFatalFailure()) return;
  const std::string log = temp / "log";
  const int status = std::system((python + " " + SourceDir() + "/tests/read_run.py " +
                                  (temp / "run") + " >" + log + " 2>&1")
                                     .c_str());
  EXPECT_EQ(0, status) << ReadFileText(log);
  EXPECT_NE(
      std::string::npos,
      ReadFileText(log).find("5 by journal, 1 by keyframe, 1 by keyframe+journal; mismatches: 0"))
      << ReadFileText(log);
}

}  // namespace
}  // namespace retrace
