// trace, the diff of traces, and the bisect of two runs, as their user runs them.
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

// ---- diff of traces
// -----------------------------------------------------------------------------

class TraceDiffs : public Traces {
 protected:
  // Of update 4: as recorded, from a run with a flipped bit in it, and from a branch.
  void SetUp() override {
    if (std::filesystem::exists(Path("t.jsonl"))) return;
    Trace(run_ + "@3", Path("t.jsonl"));
    Trace(run_ + "@3", Path("t.safetensors"), {"--tensors"});
    ASSERT_EQ(0, RunProgram({"replay", run_, "--steps", "4..4", "--do", "softcap:4", "--out",
                             Path("capped"), "--quiet"}).code);
    Trace(Path("capped") + "@3", Path("capped.safetensors"), {"--tensors"});
  }
};

TEST_F(TraceDiffs, TheFirstOpThatDiffersIsNamedWithElementAndValues) {
  EXPECT_EQ(0, RunProgram({"diff", Path("t.jsonl"), Path("t.safetensors")}).code);
  const Finished done =
      RunProgram({"diff", Path("t.safetensors"), Path("capped.safetensors"), "--json"});
  EXPECT_EQ(1, done.code) << done.err;
  const Json json = ParseJson(done);
  EXPECT_EQ("bits", json["by"]);
  EXPECT_EQ("mb0/logits/shard0", json["first"]["op"]);
  EXPECT_EQ("[0, 0]", json["first"]["first"]["at"]);
  EXPECT_NE(json["first"]["first"]["a"], json["first"]["first"]["b"]);
  const Finished text = RunProgram({"diff", Path("t.jsonl"), Path("capped.safetensors")});
  EXPECT_EQ(1, text.code);
  EXPECT_TRUE(Contains(text.out, "differs: mb0/logits/shard0 (the ")) << text.out;
  EXPECT_TRUE(Contains(text.out, "--tensors --only mb0/logits/shard0")) << text.out;
  EXPECT_EQ(0, RunProgram({"diff", Path("t.jsonl"), Path("capped.safetensors"), "--only",
                           "mb0/layer*/q_proj/*"}).code);
  EXPECT_EQ("", RunProgram({"diff", Path("t.jsonl"), Path("capped.safetensors"), "--quiet"}).out);
}

TEST_F(TraceDiffs, TheFirstOpBeyondRoundingIsWhereTheRecipesDiffer) {
  const Finished done = RunProgram({"diff", Path("t.safetensors"), Path("capped.safetensors"), "--by",
                                    "rounding", "--json"});
  EXPECT_EQ(1, done.code) << done.err;
  const Json json = ParseJson(done);
  EXPECT_EQ("mb0/logits", json["first"]["op"]);
  EXPECT_GT(json["first"]["relative_l2"].get<double>(), json["first"]["bound"].get<double>());
  // What follows is explained by it, but for the gradients of the cap itself.
  EXPECT_LT(json["beyond_rounding"].get<int>(), 9) << done.out;
  EXPECT_EQ(0, RunProgram({"diff", Path("t.safetensors"), Path("t.safetensors"), "--by", "rounding"})
                   .code);
}

TEST_F(TraceDiffs, WhatIsThereAndIsNoTraceIsNotOverwritten) {
  std::ofstream(Path("notes.txt")) << "notes";
  EXPECT_TRUE(Contains(Refused({"trace", run_ + "@3", "-o", Path("notes.txt")}, 2), "is no trace"));
  EXPECT_EQ("notes", ReadFileText(Path("notes.txt")));
  EXPECT_TRUE(Contains(Refused({"trace", run_ + "@3", "-o", "/dev/null"}, 2), "is no trace"));
  EXPECT_TRUE(Contains(Refused({"trace", run_ + "@3", "-o", "-"}, 2), "a file's name"));
}

TEST_F(TraceDiffs, ADamagedTraceIsDamageNotUsage) {
  const std::string text = ReadFileText(Path("t.safetensors"));
  std::ofstream(Path("half.safetensors")) << text.substr(0, text.size() / 2);
  EXPECT_TRUE(Contains(Refused({"diff", Path("t.safetensors"), Path("half.safetensors")}, 3),
                       "half.safetensors"));
}

TEST_F(TraceDiffs, WhatIsNoTraceIsNotComparedWithOne) {
  EXPECT_TRUE(Contains(Refused({"diff", Path("t.jsonl"), run_ + "@3"}, 2), "expected two traces"));
  EXPECT_TRUE(Contains(Refused({"diff", run_ + "@2", run_ + "@3", "--by", "rounding"}, 2), "--by"));
  EXPECT_TRUE(Contains(Refused({"diff", Path("t.jsonl"), Path("t.jsonl"), "--by", "rounding"}, 4),
                       "digests alone"));
  EXPECT_TRUE(Contains(
      Refused({"diff", Path("t.jsonl"), Path("t.jsonl"), "--only", "nothing/*"}, 2), "in common"));
  std::ofstream(Path("cut.jsonl")) << ReadFileText(Path("t.jsonl")).substr(0, 5000);
  EXPECT_TRUE(Contains(Refused({"diff", Path("t.jsonl"), Path("cut.jsonl")}, 3), "cut.jsonl"));
}

// ---- bisect of two runs
// -------------------------------------------------------------------------

TEST_F(Traces, TwoRunsPartWhereTheirRecipesDoWhateverRanksLookForIt) {
  ASSERT_EQ(0, RunProgram({"replay", run_, "--steps", "3..5", "--do", "lr:scale=0.5@4..5", "--out",
                           Path("slow"), "--quiet"}).code);
  for (const char* tp : {"1", "2"}) {
    const Finished done = RunProgram({"bisect", run_, Path("slow"), "--tp", tp, "--json"});
    EXPECT_EQ(1, done.code) << done.err;
    const Json json = ParseJson(done);
    EXPECT_EQ(4, json["first_differing_position"]);
    EXPECT_EQ("optimizer/rows", json["op"]);
    EXPECT_EQ("optimizer", json["phase"]);
    EXPECT_EQ("[0, 2]", json["element"]["at"]);  // the learning rate
    EXPECT_EQ("identical", json["sides"]["a"]["replay"]);
    EXPECT_EQ("identical", json["sides"]["b"]["replay"]);
    ASSERT_FALSE(json["recipe"].empty());
    EXPECT_EQ("schedule.peak", json["recipe"][0]["key"]);
  }
  const Finished text = RunProgram({"bisect", run_, Path("slow")});
  EXPECT_TRUE(Contains(text.out, "the states part in update 4")) << text.out;
  EXPECT_TRUE(Contains(text.out, "under lr:scale=0.5")) << text.out;
  EXPECT_EQ(0, RunProgram({"bisect", run_, run_}).code);
}

TEST_F(Traces, ARecordingThatIsNotItsReplayIsSaidToBeAndSearched) {
  BitFlip flip("mb0/model.layers.2.mlp.up_proj.weight.grad/shard5", 3, 22, 4);
  RecordFaulty(LoadRecipe(run_ + "/recipe.toml").value(), Path("flipped"), 5, &flip);
  const Finished done = RunProgram({"bisect", run_, Path("flipped"), "--json"});
  EXPECT_EQ(1, done.code) << done.err;
  const Json json = ParseJson(done);
  EXPECT_EQ(4, json["update"]);
  EXPECT_TRUE(json["op"].is_null());
  EXPECT_EQ("identical", json["sides"]["a"]["replay"]);
  const Json& side = json["sides"]["b"];
  EXPECT_EQ("differs", side["replay"]);
  EXPECT_EQ("backward", side["phase"]);
  EXPECT_EQ(Json({"model.layers.2.mlp.up_proj.weight"}), side["tensors"]);
  const Finished text = RunProgram({"bisect", run_, Path("flipped")});
  EXPECT_TRUE(Contains(text.out, "B: replay of update 4 is not what")) << text.out;
}

TEST_F(Traces, BisectRefusesWhatItCanNotCompare) {
  EXPECT_TRUE(Contains(Refused({"bisect", run_}, 2), "another run"));
  EXPECT_TRUE(Contains(Refused({"bisect", run_, Path("nowhere")}, 2), "nowhere"));
  EXPECT_EQ(2, RunProgram({"bisect", run_, run_, "--spike", "--do", "clip:none"}).code);
  EXPECT_EQ(2, RunProgram({"bisect", run_, run_, "--budget", "5"}).code);
}

// ---- the same update by transformers
// ------------------------------------------------------------

class TracesOfTransformers : public TraceDiffs {
 protected:
  void SetUp() override {
    std::string why;
    if (!HasPackages(PeerPython(), "torch safetensors transformers", &why)) GTEST_SKIP() << why;
    TraceDiffs::SetUp();
    if (!std::filesystem::exists(Path("hf"))) Export(run_ + "@3", Path("hf"));
  }
  // The report of the diff with what transformers compute.
  Json Compare(const std::vector<std::string>& flags, int code,
               const std::vector<std::string>& how = {}) {
    std::vector<std::string> words = {SourceDir() + "/scripts/dump_hf_trace.py", Path("hf"),
                                      Path("t.safetensors"), "--out", Path("hf.safetensors")};
    words.insert(words.end(), flags.begin(), flags.end());
    const Finished dumped = RunPython(PeerPython(), words);
    EXPECT_EQ(0, dumped.code) << dumped.err;
    std::vector<std::string> diff = {"diff", Path("t.safetensors"), Path("hf.safetensors"), "--json"};
    diff.insert(diff.end(), how.begin(), how.end());
    const Finished done = RunProgram(diff);
    EXPECT_EQ(code, done.code) << done.out << done.err;
    return ParseJson(done);
  }
};

TEST_F(TracesOfTransformers, TheyComputeTheSameWithinRounding) {
  const Json fp32 = Compare({}, 0);
  EXPECT_EQ("rounding", fp32["by"]);
  EXPECT_EQ(0x1p-24, fp32["unit_roundoff"]);
  EXPECT_EQ(772, fp32["judged"]);  // every op that transformers show, in four micro-batches
  EXPECT_TRUE(fp32["only_b"].empty());
  const Json bf16 = Compare({"--dtype", "bfloat16"}, 0);
  EXPECT_EQ(0x1p-9, bf16["unit_roundoff"]);
}

TEST_F(TracesOfTransformers, APlantedMistakeIsNamedByItsOp) {
  for (const auto& [fault, op] :
       {std::pair("embedding-scale=5.7", "mb0/embedding"),  // sqrt(32) = 5.66
        {"window-off-by-one", "mb0/layer0/attention"},
        {"norm-one-plus-weight", "mb0/layer0/input_norm"},
        {"norm-one-plus-weight=layers.2.post_attention", "mb0/layer2/post_attention_norm"},
        {"qk-norm-unreduced", "mb0/model.layers.0.self_attn.k_norm.weight.grad"}}) {
    const Json json = Compare({"--fault", fault}, 1);
    EXPECT_EQ(op, json["first"]["op"]) << fault;
  }
}

TEST_F(TracesOfTransformers, TheTruthSaysThatTheMistakeIsTheirs) {
  ASSERT_EQ(0, RunProgram({"replay", run_, "--steps", "4..4", "--do", "precision:fp64", "--out",
                           Path("fp64"), "--quiet"}).code);
  Trace(Path("fp64") + "@3", Path("truth.safetensors"), {"--tensors"});
  const std::vector<std::string> truth = {"--truth", Path("truth.safetensors")};
  EXPECT_EQ(true, Compare({}, 0, truth)["same"]);
  const Json json = Compare({"--fault", "window-off-by-one"}, 1, truth);
  EXPECT_EQ("mb0/layer0/attention", json["first"]["op"]);
  EXPECT_EQ("B", json["first"]["beyond_side"]);
}

TEST_F(TracesOfTransformers, AnUnknownFaultIsRefused) {
  const Finished done =
      RunPython(PeerPython(), {SourceDir() + "/scripts/dump_hf_trace.py", Path("hf"),
                               Path("t.safetensors"), "--out", Path("x"), "--fault", "no-such"});
  EXPECT_NE(0, done.code);
  EXPECT_TRUE(Contains(done.err, "no-such")) << done.err;
}

}  // namespace
}  // namespace retrace
