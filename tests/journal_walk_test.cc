// A walk that decodes and applies journals chunk by chunk gives the states, and the errors, of one
// that reads every tensor and applies it whole.
#include "replay/journal_walk.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <random>

#include "kernels/isa.h"
#include "replay/timeline.h"
#include "replay/update.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

constexpr int64_t kLast = 5, kPartialAt = 3;

// The embedding is longer than a chunk, so a tensor spans two and the next ones begin within one.
Layout WalkLayout() {
  ModelRecipe model = SmallModel();
  model.vocab_size = 20000;
  model.hidden_size = 32;
  return Layout::Make(model, 2).value();
}

std::vector<std::vector<float>> GradientOf(const Layout& layout, int64_t update) {
  std::mt19937 bits(static_cast<uint32_t>(update));
  std::vector<std::vector<float>> gradient(layout.shards());
  for (int s = 0; s < layout.shards(); ++s) {
    gradient[s].resize(layout.slab_numel(s));
    for (float& g : gradient[s]) g = static_cast<float>(static_cast<int32_t>(bits())) * 1e-11f;
  }
  return gradient;
}

// Every action, per-row clips of the embedding (the longest tensor), t of tensors apart.
OptimizerBlock BlockOf(const Layout& layout, int64_t update) {
  OptimizerBlock block;
  block.row_clips.resize(layout.tensors().size());
  for (size_t t = 0; t < layout.tensors().size(); ++t) {
    OptimizerRow row{.t = update + static_cast<int64_t>(t)};
    row.action = static_cast<TensorAction>(t == 0 ? 0 : (t + update) % 3);
    row.lr = 0.01f, row.beta1 = 0.9f, row.one_minus_beta1 = 0.1f;
    row.beta2 = 0.95f, row.one_minus_beta2 = 0.05f;
    row.bias_correction1 = 0.5f, row.bias_correction2 = 0.25f;
    row.eps = 1e-8f, row.weight_decay = t % 2 == 0 ? 0.1f : 0.0f, row.clip = 0.75f;
    block.rows.push_back(row);
    const TensorSpec& spec = layout.tensors()[t];
    if (spec.name != "model.embed_tokens.weight" || update % 2 == 0) continue;
    for (int64_t r = 0; r < spec.rows; ++r) {
      block.row_clips[t].push_back(1.0f / static_cast<float>(1 + r % 7));
    }
  }
  return block;
}

// The reference: whole gradients, applied whole.
void Apply(Engine& engine, const Layout& layout, int64_t update, State* state) {
  const OptimizerBlock block = BlockOf(layout, update);
  const std::vector<std::vector<float>> gradient = GradientOf(layout, update);
  for (int s = 0; s < layout.shards(); ++s) {
    ApplyBlock(engine, layout, block, layout.pieces(s), gradient[s].data(), &state->shards[s]);
  }
  state->counters.position = update;
  state->counters.schedule_index += 2;
  state->counters.data_cursor += 4;
  for (size_t t = 0; t < block.rows.size(); ++t) state->counters.adam_t[t] = block.rows[t].t;
  state->memory["norm_ema"] = {0.5 * static_cast<double>(update)};
}

// What a rank says of a file that it wrote.
using Lie = std::function<void(int64_t update, RankFileInfo*)>;

class JournalWalkTest : public testing::Test {
 protected:
  // A keyframe at 0 and journals; at kPartialAt surgery on tensor 0's parameters.
  void Record(int ranks, const Lie& lie = nullptr) {
    dir_ = temp_ / ("run" + std::to_string(ranks));
    auto writer = RunWriter::Create(dir_, layout_, SmallPlan()).value();
    std::vector<std::unique_ptr<RankWriter>> writers;
    for (int r = 0; r < ranks; ++r) {
      writers.push_back(RankWriter::Open(layout_, dir_, 1, r, 1).value());
    }
    State state = MakeState(layout_, 0, layout_.shards());
    for (int s = 0; s < layout_.shards(); ++s) state.shards[s].slabs[0] = GradientOf(layout_, 99)[s];
    states_ = {state};
    for (int64_t k = 0; k <= kLast; ++k) {
      if (k == kPartialAt) {
        for (ShardState& shard : state.shards) {
          for (int64_t i = 0; i < layout_.pieces(0)[0].numel(); ++i) shard.slabs[0][i] *= -2.0f;
        }
      }
      const State edited = state;  // what a partial keyframe keeps: before the update
      if (k > 0) Apply(engine_, layout_, k, &state);
      if (k > 0) states_.push_back(state);
      StepCommit commit = CommitOf(k, state);
      for (int r = 0; r < ranks; ++r) {
        const int count = layout_.shards() / ranks;
        writers[r]->Snapshot(k, SourcesOf(layout_, edited, GradientOf(layout_, k),
                                          {k == 0, k > 0, k == kPartialAt}, r * count, count));
        commit.files.push_back(writers[r]->Wait().value());
        if (lie) lie(k, &commit.files.back());
      }
      const Status status = writer->CommitStep(commit);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_TRUE(writer->Drain().ok());
  }

  StepCommit CommitOf(int64_t k, const State& state) const {
    StepCommit commit;
    commit.digest = StateDigest(layout_, state);
    commit.counters = state.counters;
    commit.memory = state.memory;
    if (k > 0) commit.optimizer = BlockOf(layout_, k);
    return commit;
  }

  std::string Step(const std::string& name) const { return dir_ + "/steps/" + name; }
  RunReader Open() const { return RunReader::Open(dir_, 2).value(); }

  // What reading every tensor says of an update: of its surgery first, as it comes first.
  Status Slow(const RunReader& run, int64_t update) const {
    State state = MakeState(layout_, 0, layout_.shards());
    const PositionEntry* entry = run.history().Find(update);
    if (entry->HasPartial()) {
      RT_RETURN_IF_ERROR(run.ReadPartial(layout_, update, &state).status());
    }
    Journal journal;
    return run.ReadJournal(layout_, update, 0, layout_.shards(), &journal);
  }

  // The walk to `update` fails with exactly that; before it nothing is wrong.
  void ExpectReported(int64_t update, const std::string& part) {
    const RunReader run = Open();
    const Timeline timeline(run, layout_, engine_);
    const Status slow = Slow(run, update);
    ASSERT_EQ(StatusCode::kDamaged, slow.code());
    ASSERT_NE(std::string::npos, slow.message().find(part)) << slow.message();
    for (int64_t k = update; k <= kLast; ++k) {
      const Status status = timeline.Seek(k).status();
      ASSERT_EQ(StatusCode::kDamaged, status.code()) << k;
      ASSERT_EQ(slow.message(), status.message()) << k;
    }
    const Result<State> before = timeline.Seek(update - 1);
    ASSERT_TRUE(before.ok()) << before.status().message();
    ExpectSame(states_[update - 1], *before, 0);
  }

  void ExpectSame(const State& expected, const State& got, int first_shard) const {
    EXPECT_EQ(expected.counters, got.counters);
    EXPECT_EQ(expected.memory, got.memory);
    for (size_t s = 0; s < got.shards.size(); ++s) {
      for (int c = 0; c < kNumComponents; ++c) {
        EXPECT_EQ(expected.shards[first_shard + s].slabs[c], got.shards[s].slabs[c])
            << "shard " << first_shard + s << " component " << c;
      }
    }
  }

  TempDir temp_;
  const Layout layout_ = WalkLayout();
  Engine engine_{BestIsa(), 2};
  std::string dir_;
  std::vector<State> states_;  // of every position, by the reference
};

TEST_F(JournalWalkTest, GivesEveryStateThatWholeTensorsGiveOnAnyRanksThreadsAndInstructions) {
  ASSERT_GT(layout_.slab_numel(0), static_cast<int64_t>(kChunkElements));
  for (const int ranks : {1, 2}) {
    Record(ranks);
    const RunReader run = Open();
    for (const int threads : {1, 2, 5}) {
      Engine engine(threads == 1 ? Isa::kScalar : BestIsa(), threads);
      const Timeline timeline(run, layout_, engine);
      for (int64_t k = 0; k <= kLast; ++k) {
        const Result<State> state = timeline.Seek(k);
        ASSERT_TRUE(state.ok()) << state.status().message();
        ExpectSame(states_[k], *state, 0);
      }
    }
  }
}

TEST_F(JournalWalkTest, GivesAPartOfTheShards) {
  for (const int ranks : {1, 2}) {
    Record(ranks);
    const RunReader run = Open();
    const Timeline timeline(run, layout_, engine_);
    for (int shard = 0; shard < layout_.shards(); ++shard) {
      const Result<State> state = timeline.Seek(kLast, shard, 1);
      ASSERT_TRUE(state.ok()) << state.status().message();
      ASSERT_EQ(1u, state->shards.size());
      ExpectSame(states_[kLast], *state, shard);
    }
  }
}

TEST_F(JournalWalkTest, StepByStepGivesWhatOneWalkGives) {
  Record(2);
  const RunReader run = Open();
  const Timeline timeline(run, layout_, engine_);
  State state = timeline.Seek(0).value();
  for (int64_t k = 1; k <= kLast; ++k) {
    const Status status = timeline.Walk(&state);
    ASSERT_TRUE(status.ok()) << status.message();
    ExpectSame(states_[k], state, 0);
  }
}

TEST_F(JournalWalkTest, AFlippedBitInARankFileIsReportedAsTheWholeTensorsWouldReportIt) {
  Record(2);
  for (const int64_t update : {int64_t{1}, kPartialAt - 1, kPartialAt, kLast}) {
    for (int rank = 0; rank < 2; ++rank) {
      const std::string name = RankFileName(update, 1, rank), good = ReadFileText(Step(name));
      for (size_t at = 0; at < good.size(); at += good.size() / 4) {
        std::string text = good;
        text[at] = static_cast<char>(text[at] ^ (1 << at % 8));
        WriteFileText(Step(name), text);
        ExpectReported(update, name);
        WriteFileText(Step(name), good);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(JournalWalkTest, AFileThatIsShortOrMissingAndADamagedMasterAreReportedAlike) {
  Record(1);
  for (const std::string& name : {RankFileName(2, 1, 0), MasterFileName(2, 1)}) {
    const std::string good = ReadFileText(Step(name));
    WriteFileText(Step(name), good.substr(0, good.size() - 1));
    ExpectReported(2, name);
    std::filesystem::remove(Step(name));
    ExpectReported(2, name);
    std::string text = good;
    text[good.size() / 3] ^= 4;
    WriteFileText(Step(name), text);
    ExpectReported(2, name);
    WriteFileText(Step(name), good);
  }
}

// A writer that is wrong about what it wrote: every byte is as it says, and no digest of a file helps.
TEST_F(JournalWalkTest, ProvenBytesThatAreNoChunkAreReported) {
  Record(2, [](int64_t update, RankFileInfo* info) {
    if (update == 4 && info->rank == 1) info->slabs[0].chunks[1].offset += 1;
  });
  ExpectReported(4, "its bytes are as written, but do not decode to what was stored; damaged: ");
}

TEST_F(JournalWalkTest, ProvenBytesThatAreAnothersChunkAreReportedAndNoStateComesOut) {
  Record(2, [](int64_t update, RankFileInfo* info) {
    if (update == 2) std::swap(info->slabs[0].chunks[0], info->slabs[0].chunks[1]);
  });
  ExpectReported(2, "its bytes are as written, but do not decode to what was stored; damaged: ");
}

TEST_F(JournalWalkTest, AJournalThatLeadsElsewhereGivesNoState) {
  Record(1);
  const std::string path = dir_ + "/" + kLedgerName;
  const LedgerContents ledger = ReadLedger(FileOps(), path).value();
  std::string text;
  Digest previous;
  for (LedgerLine line : ledger.lines) {
    StateLine* state = std::get_if<StateLine>(&line);
    if (state != nullptr && state->position() == 4) state->digest.bytes[3] ^= 1;
    Digest digest;
    text += LedgerLineText(line, previous, &digest).value();
    previous = digest;
  }
  WriteFileText(path, text);
  const RunReader run = Open();
  const Status status = Timeline(run, layout_, engine_).Seek(4).status();
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_NE(std::string::npos, status.message().find("the walk from keyframe 0 gave digest"))
      << status.message();
}

}  // namespace
}  // namespace retrace
