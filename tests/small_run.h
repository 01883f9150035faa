// A small run for the store's tests: a layout of two virtual shards, states and gradients that
// depend on the position alone, and two ranks that keep them.
#ifndef RETRACE_TESTS_SMALL_RUN_H_
#define RETRACE_TESTS_SMALL_RUN_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/rank_writer.h"
#include "formats/run_dir.h"

namespace retrace {

// A directory that vanishes with the test.
class TempDir {
 public:
  TempDir() {
    // In memory where there is such a place: these tests try hundreds of crash points.
    const bool shm = ::access("/dev/shm", W_OK) == 0;
    std::string path = (shm ? std::filesystem::path("/dev/shm")
                            : std::filesystem::temp_directory_path()) / "retrace-XXXXXX";
    EXPECT_NE(nullptr, ::mkdtemp(path.data()));
    path_ = path;
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string ReadFileText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void WriteFileText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline ModelRecipe SmallModel() {
  ModelRecipe model;
  model.vocab_size = 16;
  model.hidden_size = 8;
  model.intermediate_size = 8;
  model.layers = 1;
  model.query_heads = 2;
  model.kv_heads = 1;
  model.global_kv_heads = 1;
  model.head_dim = 4;
  model.global_head_dim = 4;
  model.layer_types = {LayerKind::kSliding};
  model.pre_norm = model.post_norm = false;
  return model;
}

inline Layout SmallLayout(int64_t virtual_shards = 2) {
  return Layout::Make(SmallModel(), virtual_shards).value();
}

// A value that no other element, component or position has.
inline float Value(int64_t position, int component, int shard, int64_t element) {
  return static_cast<float>(position * 4 + component) + 0.25f * static_cast<float>(shard) +
         static_cast<float>(element % 997) * 1e-4f;
}

inline State StateAt(const Layout& layout, int64_t position) {
  State state = MakeState(layout, 0, layout.shards());
  state.counters.position = position;
  state.counters.schedule_index = position;
  state.counters.data_cursor = 4 * position;
  state.counters.adam_t.assign(layout.tensors().size(), position);
  state.memory["norm_ema"] = {0.1 * static_cast<double>(position), -0.0};
  for (int s = 0; s < layout.shards(); ++s) {
    for (int c = 0; c < kNumComponents; ++c) {
      auto& slab = state.shards[s].slabs[c];
      for (size_t i = 0; i < slab.size(); ++i) slab[i] = Value(position, c, s, i);
    }
  }
  return state;
}

inline std::vector<std::vector<float>> GradientsOf(const Layout& layout, int64_t position) {
  std::vector<std::vector<float>> gradients(layout.shards());
  for (int s = 0; s < layout.shards(); ++s) {
    gradients[s].resize(layout.slab_numel(s));
    for (size_t i = 0; i < gradients[s].size(); ++i) gradients[s][i] = Value(position, 3, s, i);
  }
  return gradients;
}

inline OptimizerBlock OptimizerOf(const Layout& layout, int64_t position) {
  OptimizerBlock block;
  block.rows.resize(layout.tensors().size());
  block.row_clips.resize(layout.tensors().size());
  for (size_t t = 0; t < block.rows.size(); ++t) {
    block.rows[t] = {.action = t == 2 ? TensorAction::kFrozen : TensorAction::kUpdate,
                     .t = position, .lr = 0.1f * static_cast<float>(position), .beta1 = 0.9f,
                     .eps = 1e-8f, .clip = 1.0f / 3.0f};
  }
  block.row_clips[1] = {1.0f, 0.5f, -0.0f};
  return block;
}

// What a step keeps. Partial: p of tensor 0, wherever its pieces are.
struct Kept {
  bool keyframe = false, journal = false, partial = false;
};

// The policy of the small run: keyframes at 0, 2, 4, journals 1.., a partial keyframe at 2; nothing
// but a ledger line at 3.
inline Kept KeptAt(int64_t position) {
  if (position == 3) return {};
  return {.keyframe = position % 2 == 0, .journal = position > 0, .partial = position == 2};
}

inline int PieceOfTensor0(const Layout& layout, int shard) {
  return layout.FindPiece(shard, 0) == nullptr ? -1 : 0;
}

inline std::vector<SlabSource> SourcesOf(const Layout& layout, const State& state,
                                         const std::vector<std::vector<float>>& gradients,
                                         Kept keep, int first_shard, int shard_count) {
  std::vector<SlabSource> sources;
  for (int s = first_shard; s < first_shard + shard_count; ++s) {
    if (keep.journal) sources.push_back({{s, SlabKind::kG, {}}, gradients[s].data()});
    for (int c = 0; keep.keyframe && c < kNumComponents; ++c) {
      sources.push_back({{s, WholeKind(static_cast<Component>(c)), {}},
                         state.shards[s].slabs[c].data()});
    }
    if (keep.partial && PieceOfTensor0(layout, s) >= 0) {
      sources.push_back({{s, SlabKind::kPartialP, {0}},
                         state.shards[s].slab(Component::kParameter).data()});
    }
  }
  return sources;
}

inline StepCommit CommitOf(const Layout& layout, int64_t position) {
  const State state = StateAt(layout, position);
  StepCommit commit;
  commit.digest = StateDigest(layout, state);
  commit.counters = state.counters;
  commit.memory = state.memory;
  commit.record = position == 0 ? "{}" : "{\"loss\":" + std::to_string(10 - position) + "}";
  if (KeptAt(position).journal) commit.optimizer = OptimizerOf(layout, position);
  return commit;
}

inline RunPlan SmallPlan() {
  RunPlan plan;
  plan.recipe_text = "name = \"small\"\n";
  plan.device = "cpu";
  plan.isa = "scalar";
  plan.libraries = "none";
  return plan;
}

// A job of two ranks, one shard each, in one process.
class SmallJob {
 public:
  // Creates the run where `dir` has none, else goes on.
  static Result<SmallJob> Start(const std::string& dir, FileOps ops = FileOps()) {
    SmallJob job;
    const bool there = ops.Exists(dir + "/" + kLedgerName);
    RT_ASSIGN_OR_RETURN(job.writer, there ? RunWriter::Open(dir, job.layout, ops)
                                          : RunWriter::Create(dir, job.layout, SmallPlan(), ops));
    for (int rank = 0; rank < job.layout.shards(); ++rank) {
      RT_ASSIGN_OR_RETURN(auto rank_writer, RankWriter::Open(job.layout, dir,
                                                             job.writer->attempt(), rank, 1, ops));
      job.ranks.push_back(std::move(rank_writer));
    }
    return job;
  }

  // One rank after another, so that the order of file operations is always the same.
  Status Commit(int64_t position) {
    StepCommit commit = CommitOf(layout, position);
    RT_RETURN_IF_ERROR(Snapshot(position, &commit.files));
    return writer->CommitStep(commit);
  }

  Status Snapshot(int64_t position, std::vector<RankFileInfo>* files) {
    const State state = StateAt(layout, position);
    const auto gradients = GradientsOf(layout, position);
    for (size_t r = 0; r < ranks.size(); ++r) {
      const auto sources =
          SourcesOf(layout, state, gradients, KeptAt(position), static_cast<int>(r), 1);
      if (sources.empty()) continue;
      ranks[r]->Snapshot(position, sources);
      RT_ASSIGN_OR_RETURN(RankFileInfo info, ranks[r]->Wait());
      files->push_back(std::move(info));
    }
    return {};
  }

  Layout layout = SmallLayout();
  std::unique_ptr<RunWriter> writer;
  std::vector<std::unique_ptr<RankWriter>> ranks;
};

inline constexpr int64_t kSmallLast = 4;

// Goes from wherever the run is to position `last`.
inline Status GoOn(const std::string& dir, int64_t last = kSmallLast, FileOps ops = FileOps()) {
  RT_ASSIGN_OR_RETURN(SmallJob job, SmallJob::Start(dir, ops));
  for (int64_t k = job.writer->history().last_position() + 1; k <= last; ++k) {
    RT_RETURN_IF_ERROR(job.Commit(k));
  }
  return job.writer->Drain();
}

// Reads all that position k keeps and compares it with what was written.
inline Status CheckPosition(const RunReader& reader, const Layout& layout, int64_t k) {
  const State expected = StateAt(layout, k);
  const PositionEntry* entry = reader.history().Find(k);
  EXPECT_NE(nullptr, entry);
  EXPECT_EQ(StateDigest(layout, expected), entry->digest);
  EXPECT_EQ(expected.counters, entry->counters);
  if (entry->HasKeyframe()) {
    State state;
    RT_RETURN_IF_ERROR(reader.ReadKeyframe(layout, k, 0, layout.shards(), &state));
    EXPECT_EQ(entry->digest, StateDigest(layout, state));
  }
  if (entry->HasJournal()) {
    Journal journal;
    RT_RETURN_IF_ERROR(reader.ReadJournal(layout, k, 0, layout.shards(), &journal));
    EXPECT_EQ(GradientsOf(layout, k), journal.gradients);
    EXPECT_EQ(OptimizerOf(layout, k), journal.optimizer);
    EXPECT_EQ(expected.counters, journal.counters);
    EXPECT_EQ(expected.memory, journal.memory);
  }
  if (entry->HasPartial()) {
    State state = StateAt(layout, k - 1);
    RT_ASSIGN_OR_RETURN(const std::vector<SlabId> ids, reader.ReadPartial(layout, k, &state));
    EXPECT_FALSE(ids.empty());
    for (const SlabId& id : ids) {
      const Piece& piece = layout.pieces(id.shard)[0];
      for (int64_t i = 0; i < piece.numel(); ++i) {
        EXPECT_EQ(Value(k, 0, id.shard, piece.offset + i),
                  state.shards[id.shard].slab(Component::kParameter)[piece.offset + i]);
      }
    }
  }
  return {};
}

// Reads the whole run. -> its last position, or the first error.
inline Result<int64_t> CheckRun(const std::string& dir) {
  RT_ASSIGN_OR_RETURN(const RunReader reader, RunReader::Open(dir));
  const Layout layout = SmallLayout();
  for (int64_t k = 0; k <= reader.history().last_position(); ++k) {
    RT_RETURN_IF_ERROR(CheckPosition(reader, layout, k));
  }
  return reader.history().last_position();
}

}  // namespace retrace

#endif  // RETRACE_TESTS_SMALL_RUN_H_
