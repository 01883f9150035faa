// Every truncation and flipped bits of every byte of a small run's files: detected, located, and
// never a crash or a wrong state.
#include <gtest/gtest.h>

#include <algorithm>

#include "formats/run_check.h"
#include "formats/step_file.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

constexpr int64_t kLast = 2;  // a keyframe; a journal; all kinds at once

class Damage : public testing::Test {
 protected:
  void SetUp() override {
    const Status status = GoOn(run_, kLast);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  // Puts `text` in place of the file, calls check, and puts the file right again.
  template <class Check>
  void With(const std::string& path, const std::string& good, const std::string& text,
            const Check& check) {
    WriteFileText(path, text);
    check();
    WriteFileText(path, good);
  }

  // check(at) with one bit of every byte flipped, a different one each time.
  template <class Check>
  void ForEachFlip(const std::string& path, const Check& check) {
    const std::string good = ReadFileText(path);
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto put = [&](size_t at, char byte) {
      file.seekp(static_cast<std::streamoff>(at)).put(byte).flush();
    };
    for (size_t at = 0; at < good.size() && !HasFatalFailure(); ++at) {
      put(at, static_cast<char>(good[at] ^ (1 << (at % 8))));
      check(at);
      put(at, good[at]);
    }
  }

  template <class Check>
  void ForEachTruncation(const std::string& path, const Check& check) {
    const std::string good = ReadFileText(path);
    for (size_t size = good.size(); size-- > 0 && !HasFatalFailure();) {
      std::filesystem::resize_file(path, size);
      check(size);
    }
    WriteFileText(path, good);
  }

  TempDir temp_;
  const std::string run_ = temp_ / "run";
  const std::string ledger_ = run_ + "/" + kLedgerName;
  const Layout layout_ = SmallLayout();
};

void ExpectDamaged(const Status& status, const std::string& place) {
  ASSERT_EQ(StatusCode::kDamaged, status.code()) << status.message();
  ASSERT_NE(std::string::npos, status.message().find(place)) << place << ": " << status.message();
}

TEST_F(Damage, OfFrozenFilesIsFound) {
  for (const char* name : {kRecipeName, kManifestName}) {
    const auto check = [&](size_t) { ExpectDamaged(RunReader::Open(run_).status(), name); };
    ForEachFlip(run_ + "/" + name, check);
    ForEachTruncation(run_ + "/" + name, check);
  }
}

TEST_F(Damage, OfAnyBitOfTheLedgerNamesTheLine) {
  const std::string good = ReadFileText(ledger_);
  for (size_t at = 0; at < good.size(); ++at) {
    const auto line = 1 + std::count(good.begin(), good.begin() + at, '\n');
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = good;
      text[at] ^= static_cast<char>(1 << bit);
      With(ledger_, good, text, [&] {
        ExpectDamaged(RunReader::Open(run_).status(), "line " + std::to_string(line) + ":");
      });
    }
    if (HasFatalFailure()) return;
  }
}

TEST_F(Damage, OfTheLedgersLengthLeavesAPrefix) {
  const RunHistory whole = RunReader::Open(run_).value().history();
  ForEachTruncation(ledger_, [&](size_t size) {
    const Result<RunReader> reader = RunReader::Open(run_);
    if (!reader.ok()) return ExpectDamaged(reader.status(), kLedgerName);
    const RunHistory& history = reader->history();
    ASSERT_LE(history.positions.size(), whole.positions.size());
    for (size_t i = 0; i < history.positions.size(); ++i) {
      ASSERT_EQ(whole.positions[i].digest, history.positions[i].digest) << size;
    }
  });
}

TEST_F(Damage, ALineThatIsLostOrMovedIsFound) {
  const std::string good = ReadFileText(ledger_);
  const size_t first = good.find('\n') + 1, second = good.find('\n', first) + 1;
  const size_t third = good.find('\n', second) + 1;
  const std::string lost = good.substr(0, second) + good.substr(third);
  With(ledger_, good, lost, [&] { ExpectDamaged(RunReader::Open(run_).status(), "line 3:"); });
  const std::string moved = good.substr(0, first) + good.substr(second, third - second) +
                            good.substr(first, second - first) + good.substr(third);
  With(ledger_, good, moved, [&] { ExpectDamaged(RunReader::Open(run_).status(), "line 2:"); });
}

// Under a right digest, so by someone who knows the format: depth costs stack.
TEST_F(Damage, ARecordThatIsNestedTooDeeplyIsRefused) {
  const std::string good = ReadFileText(ledger_);
  const Digest previous = ReadLedger(FileOps(), ledger_).value().digests.back();
  const auto with = [&](const std::string& value) {
    StateLine line;
    line.counters = StateAt(layout_, kLast + 1).counters;
    line.record = "{\"x\":" + value + "}";
    Digest digest;
    const std::string text = LedgerLineText(line, previous, &digest).value();
    Status status;
    With(ledger_, good, good + text, [&] { status = RunReader::Open(run_).status(); });
    return status;
  };
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  for (const std::string& fine : {nested(60), "\"" + nested(1000) + "\\\"[" + "\""}) {
    EXPECT_TRUE(with(fine).ok()) << with(fine).message();
  }
  const Status status = with(nested(70));
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_NE(std::string::npos, status.message().find("nested too deeply")) << status.message();
}

TEST_F(Damage, OfAMasterIsFound) {
  const RunReader reader = RunReader::Open(run_).value();
  for (int64_t k = 0; k <= kLast; ++k) {
    const std::string name = reader.history().Find(k)->master->name;
    const auto check = [&](size_t) { ExpectDamaged(reader.ReadIndex(k).status(), name); };
    ForEachFlip(run_ + "/steps/" + name, check);
    ForEachTruncation(run_ + "/steps/" + name, check);
  }
}

std::vector<std::vector<float>> TargetsOf(const Layout& layout, const RankFileInfo& file,
                                          std::vector<SlabTarget>* targets) {
  std::vector<std::vector<float>> values;
  for (const SlabInfo& slab : file.slabs) {
    values.emplace_back(SlabNumel(layout, slab.id));
    targets->push_back({slab.id, values.back().data()});
  }
  return values;
}

// The slab whose chunk holds byte `at`; nullptr: none.
const SlabInfo* SlabAt(const RankFileInfo& file, size_t at) {
  for (const SlabInfo& slab : file.slabs) {
    for (const ChunkPlace& place : slab.chunks) {
      if (at >= place.offset && at < place.offset + place.size) return &slab;
    }
  }
  return nullptr;
}

TEST_F(Damage, OfARankFileIsFoundAndNamesTheTensors) {
  const RunReader reader = RunReader::Open(run_).value();
  for (int64_t k = 0; k <= kLast; ++k) {
    const StepIndex index = reader.ReadIndex(k).value();
    for (const RankFileInfo& file : index.files) {
      std::vector<SlabTarget> targets;
      const auto values = TargetsOf(layout_, file, &targets);
      size_t in_chunks = 0, named = 0;
      const auto read = [&] {
        return ReadRankFile(FileOps(), run_ + "/steps", file, layout_, targets, 1);
      };
      ASSERT_TRUE(read().ok());
      ForEachFlip(run_ + "/steps/" + file.name, [&](size_t at) {
        const Status status = read();
        ExpectDamaged(status, file.name);
        const SlabInfo* slab = SlabAt(file, at);
        const bool names = status.message().find("damaged: ") != std::string::npos;
        if (slab == nullptr) {
          EXPECT_FALSE(names) << at << ": " << status.message();
        } else {
          ++in_chunks;
          const std::string kind = std::string("#") + SlabKindName(slab->id.kind) + " (shard " +
                                   std::to_string(slab->id.shard) + ")";
          named += status.message().find(kind) != std::string::npos;
        }
      });
      // A few bits of a compressed chunk mean nothing to its decoder.
      EXPECT_GT(named, in_chunks * 9 / 10) << file.name;
      ForEachTruncation(run_ + "/steps/" + file.name,
                        [&](size_t) { ExpectDamaged(read(), file.name); });
    }
  }
}

TEST_F(Damage, OfAStepIsLocatedByTheQuickCheckOfSizesAndTheDeepOneOfBits) {
  constexpr int64_t kStep = 1;
  RunCheck check = RunCheck::Open(run_, 1).value();
  const RunReader reader = RunReader::Open(run_).value();
  std::vector<std::string> names = {reader.history().Find(kStep)->master->name};
  const StepIndex index = reader.ReadIndex(kStep).value();
  for (const RankFileInfo& file : index.files) names.push_back(file.name);
  for (const std::string& name : names) {
    const auto expect = [&](CheckDepth depth) {
      std::vector<retrace::Damage> damage;
      const Status status = check.CheckStep(&layout_, kStep, depth, &damage);
      ASSERT_TRUE(status.ok()) << status.message();
      ASSERT_EQ(1u, damage.size());
      EXPECT_EQ(kStep, damage[0].position);
      EXPECT_NE(std::string::npos, damage[0].message.find("/" + name + ":")) << damage[0].message;
    };
    ForEachTruncation(run_ + "/steps/" + name, [&](size_t) { expect(CheckDepth::kQuick); });
    ForEachFlip(run_ + "/steps/" + name, [&](size_t) { expect(CheckDepth::kDeep); });
  }
  std::vector<retrace::Damage> none;
  ASSERT_TRUE(check.CheckStep(&layout_, kStep, CheckDepth::kDeep, &none).ok());
  EXPECT_TRUE(none.empty());
}

TEST_F(Damage, ANeighbourThatIsTheSameBitForBitIsRemarked) {
  RunCheck check = RunCheck::Open(run_, 1).value();
  const RunReader reader = RunReader::Open(run_).value();
  StepIndex one = reader.ReadIndex(1).value(), two = reader.ReadIndex(2).value();
  EXPECT_EQ("", check.CompareWithLast(one));
  EXPECT_EQ("", check.CompareWithLast(two));
  StepIndex copy = one;
  copy.position = 2;
  EXPECT_EQ("", check.CompareWithLast(one));
  EXPECT_NE(std::string::npos, check.CompareWithLast(copy).find("the same gradient"));
  StepIndex keyframe = reader.ReadIndex(0).value(), later = keyframe;
  later.position = 1;
  EXPECT_EQ("", check.CompareWithLast(keyframe));
  EXPECT_NE(std::string::npos, check.CompareWithLast(later).find("the same parameters"));
}

TEST_F(Damage, AMissingStepFileIsDamageToo) {
  const RunReader reader = RunReader::Open(run_).value();
  const StepIndex index = reader.ReadIndex(2).value();
  std::filesystem::remove(run_ + "/steps/" + index.files[1].name);
  Journal journal;
  ExpectDamaged(reader.ReadJournal(layout_, 2, 0, 2, &journal), index.files[1].name);
  EXPECT_TRUE(reader.ReadJournal(layout_, 2, 0, 1, &journal).ok());  // shard 0 is in the other file
}

TEST_F(Damage, FilesOfAnotherStepUnderThisNameAreRefused) {
  const RunReader reader = RunReader::Open(run_).value();
  const std::string steps = run_ + "/steps/";
  const std::string mine = steps + reader.ReadIndex(2)->files[0].name;
  WriteFileText(mine, ReadFileText(steps + reader.ReadIndex(0)->files[0].name));
  State state;
  ExpectDamaged(reader.ReadKeyframe(layout_, 2, 0, 2, &state), mine);
}

}  // namespace
}  // namespace retrace
