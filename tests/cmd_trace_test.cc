// trace, and the diff of traces, as their user runs them.
#include <gtest/gtest.h>

#include <fstream>

#include "core/recipe_toml.h"
#include "formats/trace_file.h"
#include "tests/faulty_run.h"
#include "tests/recorded_run.h"

namespace retrace {
namespace {

class Traces : public RecordedRun {
 protected:
  static void Trace(const std::string& state, const std::string& out,
                    std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"trace", state, "--out", out, "--quiet"};
    words.insert(words.end(), more.begin(), more.end());
    const Finished done = RunProgram(words);
    ASSERT_EQ(0, done.code) << done.err;
  }
};

TEST_F(Traces, ATraceIsOfTheUpdateThatStartsAtTheStateAndComparedWithTheLedger) {
  const Json json = ParseJson(RunProgram({"trace", run_ + "@3", "-o", Path("a.jsonl"), "--json"}));
  EXPECT_EQ(4, json["update"]);
  EXPECT_EQ("identical", json["recorded"]);
  EXPECT_EQ(0, json["tensors"]);
  const RunReader reader = RunReader::Open(run_).value();
  EXPECT_EQ(ParseRecord(reader.history().Find(4)->record)->loss, json["loss"]);
  const TraceFile trace = TraceFile::Open(Path("a.jsonl")).value();
  EXPECT_EQ(4, trace.header().update);
  EXPECT_EQ(json["ops"], trace.ops().size());
  ASSERT_NE(nullptr, trace.Find("mb3/layer3/attention.grad/shard7"));
  EXPECT_FALSE(trace.has_tensors());
  // Behind the last update there is nothing to compare with.
  const Json last = ParseJson(RunProgram({"trace", run_ + "@6", "-o", Path("l.jsonl"), "--json"}));
  EXPECT_EQ("no", last["recorded"]);
}

TEST_F(Traces, AFileHasTheSameBytesWhateverRanksAndThreadsMadeIt) {
  Trace(run_ + "@4", Path("one.jsonl"), {"--threads", "1"});
  Trace(run_ + "@4", Path("two.jsonl"), {"--tp", "2", "--dp", "2"});
  EXPECT_TRUE(ReadFileText(Path("one.jsonl")) == ReadFileText(Path("two.jsonl")));
  Trace(run_ + "@4", Path("one.safetensors"), {"--tensors", "--threads", "1"});
  Trace(run_ + "@4", Path("two.safetensors"), {"--tensors", "--tp", "4"});
  EXPECT_TRUE(ReadFileText(Path("one.safetensors")) == ReadFileText(Path("two.safetensors")));
}

TEST_F(Traces, TensorsAreOfTheOpsThatAreAskedForAndAllHaveDigests) {
  Trace(run_ + "@4", Path("some.safetensors"), {"--tensors", "--only", "mb0/layer1/q_*"});
  Trace(run_ + "@4", Path("all.jsonl"));
  const TraceFile some = TraceFile::Open(Path("some.safetensors")).value();
  const TraceFile all = TraceFile::Open(Path("all.jsonl")).value();
  ASSERT_EQ(all.ops().size(), some.ops().size());
  int64_t kept = 0;
  for (size_t i = 0; i < all.ops().size(); ++i) {
    EXPECT_EQ(all.ops()[i].name, some.ops()[i].name);
    EXPECT_EQ(all.ops()[i].digest, some.ops()[i].digest);
    kept += some.HasTensor(some.ops()[i].name);
  }
  EXPECT_EQ(4 * 8, kept);  // q_proj, q_rope, and their gradients, of eight shards
  const TraceOp* op = some.Find("mb0/layer1/q_rope.grad/shard6");
  ASSERT_NE(nullptr, op);
  EXPECT_EQ(24, op->rows);
  EXPECT_EQ(16, op->cols);
  EXPECT_EQ(24u * 16, some.Read(*op)->size());
  std::string why;
  if (!HasPackages(PeerPython(), "torch safetensors", &why)) return;
  const Finished done = RunPython(
      PeerPython(), {"-c", "import sys; from safetensors.torch import load_file\n"
                           "print(len(load_file(sys.argv[1])))", Path("some.safetensors")});
  EXPECT_EQ("32\n", done.out) << done.err;
}

TEST_F(Traces, ABranchIsTracedWithWhatIsInForceInIt) {
  ASSERT_EQ(0, RunProgram({"replay", run_, "--steps", "3..5", "--do", "scale:0.5@4", "--out",
                           Path("branch"), "--quiet"}).code);
  const Json json =
      ParseJson(RunProgram({"trace", Path("branch") + "@3", "-o", Path("b.jsonl"), "--json"}));
  EXPECT_EQ("identical", json["recorded"]);
  Trace(run_ + "@3", Path("p.jsonl"));
  const TraceFile branch = TraceFile::Open(Path("b.jsonl")).value();
  const TraceFile parent = TraceFile::Open(Path("p.jsonl")).value();
  EXPECT_NE(branch.header().state, parent.header().state);  // after the edit
}

TEST_F(Traces, AnUpdateThatIsNotTheRecordedOneIsTold) {
  BitFlip flip("mb0/layer1/geglu/shard0", 3, 22, 4);
  RecordFaulty(LoadRecipe(run_ + "/recipe.toml").value(), Path("faulty"), 5, &flip);
  ASSERT_TRUE(flip.flipped());
  const Finished done =
      RunProgram({"trace", Path("faulty") + "@3", "-o", Path("f.jsonl"), "--json"});
  EXPECT_EQ(1, done.code) << done.err;
  EXPECT_EQ("differs", ParseJson(done)["recorded"]);
  EXPECT_TRUE(TraceFile::Open(Path("f.jsonl")).ok());
  EXPECT_EQ(0, RunProgram({"trace", Path("faulty") + "@2", "-o", Path("g.jsonl")}).code);
}

TEST_F(Traces, WhatCanNotBeTracedIsSaid) {
  const auto refused = [&](std::vector<std::string> more, const std::string& state) {
    more.insert(more.begin(), {"trace", state});
    return Refused(more, 2);
  };
  EXPECT_TRUE(Contains(refused({"-o", Path("x")}, run_), "RUN@k"));
  EXPECT_TRUE(Contains(refused({"-o", Path("x")}, run_ + "@9"), "0..6"));
  EXPECT_TRUE(Contains(refused({"-o", Path("")}, run_ + "@3"), "is a directory"));
  EXPECT_TRUE(Contains(refused({"-o", Path("no/x")}, run_ + "@3"), "no directory"));
  EXPECT_TRUE(Contains(refused({"-o", Path("x"), "--only", "mb0/*"}, run_ + "@3"), "--tensors"));
  EXPECT_TRUE(Contains(refused({"-o", Path("x"), "--tensors", "--only", "mb9/*"}, run_ + "@3"),
                       "matches none"));
  EXPECT_FALSE(std::filesystem::exists(Path("x")));
}

}  // namespace
}  // namespace retrace
