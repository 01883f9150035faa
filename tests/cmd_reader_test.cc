// The independent reader (tests/read_run.py) over runs that the program made: it finds every state
// from the bytes on disk alone, and planted faults. Skipped where its Python is not there.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/digest.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

void FlipBit(const std::string& path, size_t offset) {
  std::string bytes = ReadFileText(path);
  ASSERT_LT(offset, bytes.size());
  bytes[offset] = static_cast<char>(bytes[offset] ^ 4);
  std::ofstream(path, std::ios::binary) << bytes;
}

class IndependentReader : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    const Finished made = RunProgram(
        {"train", SourceDir() + "/examples/tiny.toml", "-o", Original(),
         "--set", "data.path=" + TestData("dataset/tiny"), "--threads", "1", "--quiet"});
    ASSERT_EQ(0, made.code) << made.err;
  }
  static void TearDownTestSuite() { delete folder_; }

  void SetUp() override {
    const Finished found = Python({"-c", "import h5py, hdf5plugin, numpy, xxhash"});
    if (found.code != 0) {
      GTEST_SKIP() << TestPython()
                   << " with scripts/test_requirements.txt is not there: run "
                   << "scripts/setup.sh --for-tests. " << found.err;
    }
  }

  static std::string Original() { return *folder_ / "run"; }

  static Finished Python(std::vector<std::string> words) {
    const TempFolder folder;
    words.insert(words.begin(), TestPython());
    return Process(words, folder / "log").Wait();
  }
  static Finished Read(const std::string& run, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {SourceDir() + "/tests/read_run.py", run});
    return Python(more);
  }

  // A copy of the run to plant a fault in.
  static std::string Copy(const std::string& name) {
    const std::string copy = *folder_ / name;
    std::filesystem::copy(Original(), copy, std::filesystem::copy_options::recursive);
    return copy;
  }

  // Faults are looked for where they are; what comes before is found equal.
  static void ExpectFault(const Finished& read, const std::string& what) {
    EXPECT_EQ(1, read.code) << read.out << read.err;
    EXPECT_NE(std::string::npos, read.out.find(what)) << read.out << read.err;
  }

  static TempFolder* folder_;
};
TempFolder* IndependentReader::folder_ = nullptr;

TEST_F(IndependentReader, RebuildsEveryStateOfARun) {
  const Finished read = Read(Original());
  EXPECT_EQ(0, read.code) << read.out << read.err;
  EXPECT_NE(std::string::npos, read.out.find("8 by journal, 3 by keyframe; mismatches: 0"))
      << read.out;
  const Finished part = Read(Original(), {"--positions", "6..7"});
  EXPECT_EQ(0, part.code) << part.out << part.err;
  EXPECT_NE(std::string::npos, part.out.find("states rebuilt: 2 by journal;")) << part.out;
}

TEST_F(IndependentReader, RebuildsABranchWhoseStateWasChangedMidRun) {
  const std::string branch = *folder_ / "branch";
  const Finished made =
      RunProgram({"replay", Original(), "--steps", "4..9", "--do", "clip:none@5..7", "--do",
                  "reset-moments:v,t=keep@6", "--do", "reset-moments:both,t=reset,only=*.mlp.*@7",
                  "--tp", "2", "--out", branch, "--quiet", "--threads", "1"});
  ASSERT_EQ(0, made.code) << made.err;
  const Finished read = Read(branch);
  EXPECT_EQ(0, read.code) << read.out << read.err;
  EXPECT_NE(std::string::npos, read.out.find("mismatches: 0")) << read.out;
  for (int k = 3; k <= 9; ++k) {  // no position is passed over
    EXPECT_EQ(std::string::npos, read.out.find(std::to_string(k) + "  none")) << read.out;
  }
}

TEST_F(IndependentReader, FindsAFlippedBitOfARankFile) {
  const std::string run = Copy("rank-file"), name = "000000006.a0001.r0000.h5";
  FlipBit(run + "/steps/" + name, std::filesystem::file_size(run + "/steps/" + name) / 2);
  const Finished read = Read(run);
  ExpectFault(read, "6  MISMATCH         " + name + ": digest");
  EXPECT_NE(std::string::npos, read.out.find("mismatches: 1")) << read.out;
}

TEST_F(IndependentReader, FindsAFlippedBitOfTheLedger) {
  const std::string run = Copy("ledger");
  const std::string ledger = ReadFileText(run + "/ledger.jsonl");
  FlipBit(run + "/ledger.jsonl", ledger.find("\"k\":3,") + 4);
  ExpectFault(Read(run), "ledger line 6: its digest does not fit its bytes");
}

TEST_F(IndependentReader, FindsAStateThatTheFilesDoNotGiveThoughAllFilesAreWhole) {
  const std::string run = Copy("forged");
  std::istringstream lines(ReadFileText(run + "/ledger.jsonl"));
  std::string forged, previous(32, '0');
  for (std::string line; std::getline(lines, line);) {
    auto json = nlohmann::ordered_json::parse(line);
    json.erase("digest");
    json["previous"] = previous;
    if (json.value("k", 0) == 7) {
      std::string state = json["state"];
      state[0] = state[0] == '0' ? '1' : '0';
      json["state"] = state;
    }
    std::string body = json.dump();
    body.pop_back();
    previous = DigestOf(body).Hex();
    forged += body + ",\"digest\":\"" + previous + "\"}\n";
  }
  std::ofstream(run + "/ledger.jsonl", std::ios::binary) << forged;
  const Finished read = Read(run);
  ExpectFault(read, "7  MISMATCH         state, from the journal");
  EXPECT_NE(std::string::npos, read.out.find("mismatches: 1")) << read.out;
}

}  // namespace
}  // namespace retrace
