// The commands as a user meets them, through the built program: exit codes, messages, JSON,
// completions, the manual.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

const std::string kProgram = ProgramPath();
const std::string kSource = SourceDir();

// Runs a shell command.
Finished Shell(const std::string& command) {
  const TempFolder logs;
  return Process({"/bin/bash", "-c", command}, logs / "log").Wait();
}

Finished Retrace(const std::string& arguments) { return Shell(kProgram + " " + arguments); }

void WriteFileText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Json ParseJson(const Finished& ran) {
  const Json json = Json::parse(ran.out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << ran.out << ran.err;
  return json;
}

// ---- recipe, interventions ---------------------------------------------------------------------

TEST(RecipeCommand, CheckSaysThatAGoodRecipeIsOne) {
  const Finished ran =
      Retrace("recipe check " + kSource + "/examples/tiny.toml --set optimizer.clip=0");
  EXPECT_EQ(0, ran.code) << ran.err;
  EXPECT_TRUE(Contains(ran.out, "a recipe, 'tiny', 10 updates")) << ran.out;
  const Finished json = Retrace("recipe check --json " + kSource + "/examples/tiny.toml");
  EXPECT_EQ("tiny", ParseJson(json)["name"]);
}

TEST(RecipeCommand, AnUnknownKeyNamesItsLineAndTheNearestKey) {
  const TempFolder temp;
  const std::string file = temp / "bad.toml";
  WriteFileText(file, "name = \"x\"\nsteps = 3\n[model]\nvocab_sze = 16\n");
  const Finished ran = Retrace("recipe check " + file);
  EXPECT_EQ(2, ran.code);
  EXPECT_TRUE(Contains(ran.err, file + ":4:")) << ran.err;
  EXPECT_TRUE(Contains(ran.err, "vocab_sze")) << ran.err;
  EXPECT_TRUE(Contains(ran.err, "model.vocab_size")) << ran.err;
  EXPECT_TRUE(ran.out.empty());
}

TEST(RecipeCommand, PrintIsCanonicalAndReadsBackToItself) {
  const TempFolder temp;
  const Finished first = Retrace("recipe print " + kSource + "/examples/tiny.toml");
  ASSERT_EQ(0, first.code) << first.err;
  WriteFileText(temp / "printed.toml", first.out);
  EXPECT_EQ(first.out, Retrace("recipe print " + (temp / "printed.toml")).out);
  const Json keys = ParseJson(Retrace("recipe print --json " + kSource + "/examples/tiny.toml"));
  EXPECT_EQ(512, keys["model.vocab_size"]);
  EXPECT_EQ("tiny", keys["name"]);
  EXPECT_EQ(4u, keys["model.layer_types"].size());
}

TEST(PlanCommand, PlanOfTheLargeModelAllocatesNothingOfIt) {
  const std::string recipe = kSource + "/examples/gemma4_31b.toml";
  const Finished ran = Retrace("plan " + recipe + " --tp 4 --json");
  ASSERT_EQ(0, ran.code) << ran.err;
  const Json plan = ParseJson(ran);
  EXPECT_EQ(30697345280, plan["parameters"].get<int64_t>());
  EXPECT_EQ(4u, plan["ranks"].size());
  const Finished text = Retrace("plan " + recipe + " --tp 2");
  EXPECT_TRUE(Contains(text.out, "30,697,345,280")) << text.out;
  EXPECT_TRUE(Contains(text.out, "estimate")) << text.out;
  EXPECT_EQ(2, Retrace("plan " + recipe + " --tp 3").code);
}

TEST(PlanCommand, OnGpusItSaysWhetherItFitsAndWhatWould) {
  const std::string recipe = kSource + "/examples/gemma4_31b.toml";
  const Finished small = Retrace("plan " + recipe + " --gpus 16 --tp 4 --dp 4 --gpu-memory 80G");
  EXPECT_EQ(1, small.code) << small.err;
  EXPECT_TRUE(Contains(small.out, "does not fit: ")) << small.out;
  EXPECT_TRUE(Contains(small.out, "--gpus 16 --tp 16 --dp 1 --set topology.virtual_shards=16 --set "
                                  "topology.lanes=1"))
      << small.out;
  const std::string shards = " --set topology.virtual_shards=16 --set topology.lanes=1";
  const Json fits = ParseJson(Retrace("plan " + recipe + " --gpus 16" + shards + " --json"));
  EXPECT_TRUE(fits["fits"].get<bool>());
  EXPECT_EQ(16, fits["tp"]);
  EXPECT_EQ(80000000000, fits["gpu_memory"].get<int64_t>());
  EXPECT_EQ("native", fits["levels"][1]["level"]);
  EXPECT_LT(fits["levels"][1]["update_seconds"], fits["levels"][0]["update_seconds"]);
  const Json larger = ParseJson(
      Retrace("plan " + recipe + " --gpus 4 --gpu-memory 282GiB --set topology.lanes=1 --json"));
  EXPECT_EQ(int64_t{282} << 30, larger["gpu_memory"].get<int64_t>());
  for (const char* wrong : {"--gpus 16 --tp 4 --dp 2", "--gpus 0", "--gpus 3 --tp 3",
                            "--gpu-memory 80G", "--gpus 4 --gpu-memory 80X",
                            "--gpus 4 --peak-fp32 nan", "--gpus 4 --gpu-memory -1"}) {
    EXPECT_EQ(2, Retrace("plan " + recipe + " " + wrong).code) << wrong;
  }
}

TEST(RecipeCommand, KeysListsAllASectionOrOne) {
  const Json all = ParseJson(Retrace("recipe keys --json"));
  const Json store = ParseJson(Retrace("recipe keys store --json"));
  EXPECT_GT(all.size(), 100u);
  EXPECT_EQ(12u, store.size());
  EXPECT_EQ(1u, ParseJson(Retrace("recipe keys optimizer.clip --json")).size());
  const Finished wrong = Retrace("recipe keys optimizer.klip");
  EXPECT_EQ(2, wrong.code);
  EXPECT_TRUE(Contains(wrong.err, "'optimizer.clip'")) << wrong.err;
}

TEST(InterventionsCommand, ListsTheRegistryAndNamesTheNearest) {
  const Json all = ParseJson(Retrace("interventions --json"));
  EXPECT_GE(all.size(), 5u);
  for (const Json& one : all) {
    EXPECT_FALSE(one["reference"].get<std::string>().empty()) << one;
    EXPECT_FALSE(one["touches"].get<std::string>().empty()) << one;
    EXPECT_FALSE(one["example"].get<std::string>().empty()) << one;
  }
  const Finished wrong = Retrace("interventions clp");
  EXPECT_EQ(2, wrong.code);
  EXPECT_TRUE(Contains(wrong.err, "'clip'")) << wrong.err;
}

// ---- verify ------------------------------------------------------------------------------------

// A recording of the tiny recipe over a dataset of its own.
class VerifyCommand : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    temp_ = new TempFolder();
    for (const char* end : {".bin", ".idx"}) {
      std::filesystem::copy_file(TestData(std::string("dataset/tiny") + end),
                                 *temp_ / (std::string("data") + end));
    }
    const Finished ran =
        Retrace("train " + kSource + "/examples/tiny.toml -q -o " + *temp_ / "run" +
                " --set steps=4 --set data.path=" + (*temp_ / "data"));
    ASSERT_EQ(0, ran.code) << ran.err;
  }
  static void TearDownTestSuite() {
    delete temp_;
    temp_ = nullptr;
  }
  static std::string run() { return *temp_ / "run"; }

  static void FlipMiddle(const std::string& path) {
    std::string text = ReadFileText(path);
    text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 4);
    WriteFileText(path, text);
  }

  static TempFolder* temp_;
};

TempFolder* VerifyCommand::temp_ = nullptr;

TEST_F(VerifyCommand, AGoodRunIsFineAndLivesAgain) {
  const Finished ran = Retrace("verify " + run() + " --replay --threads 1");
  EXPECT_EQ(0, ran.code) << ran.out << ran.err;
  EXPECT_TRUE(Contains(ran.out, "4 of 4 updates identical")) << ran.out;
  EXPECT_TRUE(Contains(ran.out, "all is fine")) << ran.out;
  // The range may stand before the run, or be left out there.
  EXPECT_EQ(0, Retrace("verify --replay " + run()).code);
  EXPECT_EQ(0, Retrace("verify --replay 2..3 " + run()).code);
  EXPECT_EQ(2, Retrace("verify --replay 3..2 " + run()).code);
  const Json json = ParseJson(Retrace("verify --json --replay 2..4 --tp 2 " + run()));
  EXPECT_EQ(true, json["fine"]);
  EXPECT_EQ(true, json["replay"]["identical"]);
  EXPECT_EQ(3u, json["replay"]["updates"].size());
}

TEST_F(VerifyCommand, AFlippedBitIsNamedWithExitCode3) {
  const std::string copy = *temp_ / "damaged";
  std::filesystem::copy(run(), copy, std::filesystem::copy_options::recursive);
  FlipMiddle(copy + "/steps/000000002.a0001.r0000.h5");
  const Finished ran = Retrace("verify " + copy);
  EXPECT_EQ(3, ran.code);
  EXPECT_TRUE(Contains(ran.out, "000000002.a0001.r0000.h5")) << ran.out;
  EXPECT_TRUE(Contains(ran.out, "tensor model.")) << ran.out;
  const Finished json = Retrace("verify --json " + copy);
  EXPECT_EQ(3, json.code);
  const Json report = ParseJson(json);
  EXPECT_EQ(false, report["fine"]);
  EXPECT_EQ(2, report["damage"][0]["position"]);
  EXPECT_FALSE(report["damage"][0]["tensors"].empty());
}

TEST_F(VerifyCommand, AChangedDatasetShowsAsOtherTokensWithExitCode1) {
  const std::string bin = *temp_ / "data.bin", original = ReadFileText(bin);
  std::string changed = original;  // ids are little-endian: another, still small one
  for (size_t i = 0; i < changed.size(); i += 2) changed[i] = static_cast<char>(changed[i] ^ 1);
  WriteFileText(bin, changed);
  const Finished ran = Retrace("verify " + run() + " --replay --threads 1");
  const Finished without = Retrace("verify " + run());
  WriteFileText(bin, original);
  EXPECT_EQ(1, ran.code) << ran.out << ran.err;
  EXPECT_TRUE(Contains(ran.out, "is it the same dataset?")) << ran.out;
  EXPECT_EQ(0, without.code) << "the run itself is as it was";
}

TEST_F(VerifyCommand, WhatIsNoRunIsAUsageError) {
  EXPECT_EQ(2, Retrace("verify " + (*temp_ / "nothing")).code);
  EXPECT_EQ(2, Retrace("verify").code);
  EXPECT_EQ(2, Retrace("verify " + run() + " --isa neon").code);
}

TEST_F(VerifyCommand, TheStoreBenchmarkMeasuresItsJournals) {
  const Finished ran = Retrace("bench store " + run() + " --seconds 0.01 --json");
  ASSERT_EQ(0, ran.code) << ran.err;
  const Json json = ParseJson(ran);
  EXPECT_GT(json["journals"], 0);
  EXPECT_GT(json["bytes_per_parameter"], 0.0);
  EXPECT_GT(json["ratio"], 0.0);
}

// ---- bench, selftest ---------------------------------------------------------------------------

TEST(BenchCommand, StepTellsWhereTheTimeGoes) {
  const Finished ran =
      Retrace("bench step " + kSource +
              "/examples/tiny.toml --random-tokens --updates 2 --threads 1 --json");
  ASSERT_EQ(0, ran.code) << ran.err;
  const Json json = ParseJson(ran);
  double sum = 0;
  for (const auto& [name, seconds] : json["phases"].items()) sum += seconds.get<double>();
  EXPECT_GT(sum, 0.0);
  EXPECT_GT(json["tokens_per_second"], 0.0);
}

TEST(BenchCommand, OpsComparesEveryOpWithScalar) {
  const Finished ran = Retrace("bench ops --seconds 0.001 --json");
  ASSERT_EQ(0, ran.code) << ran.err;
  EXPECT_EQ(23u, ParseJson(ran)["rows"].size());  // the table has so many ops
}

TEST(BenchCommand, AttentionMeasuresBothLayerKindsByBothKindsOfAttention) {
  const Finished ran =
      Retrace("bench attention " + kSource + "/examples/tiny.toml --seconds 0.001 --json");
  ASSERT_EQ(0, ran.code) << ran.err;
  const Json json = ParseJson(ran);
  std::set<std::pair<int, int>> shapes;
  for (const Json& row : json["rows"]) {
    shapes.emplace(row["head_dim"], row["window"]);
    for (const char* time : {"forward_seconds", "backward_seconds"}) {
      EXPECT_GT(row[time], 0.0) << row;
      EXPECT_GT(row[std::string("scalar_") + time], 0.0) << row;
    }
  }
  EXPECT_EQ(4u, json["rows"].size());
  EXPECT_EQ((std::set<std::pair<int, int>>{{8, 5}, {16, 0}}), shapes);
}

TEST(SelftestCommand, PrintsATableAndOneLastLine) {
  const Finished ran = Retrace("selftest");
  EXPECT_EQ(0, ran.code) << ran.out;
  EXPECT_TRUE(Contains(ran.out, "identical  op softmax")) << ran.out;
  const size_t last = ran.out.rfind('\n', ran.out.size() - 2);
  EXPECT_EQ(0u, ran.out.substr(last + 1).find("selftest: all identical here")) << ran.out;
}

// ---- completions, manual, version --------------------------------------------------------------

// What bash offers behind these words; the last is the one being typed.
std::string Offered(const std::string& words) {
  const Finished ran = Shell("source <(" + kProgram + " completion bash); COMP_WORDS=(" + words +
                             "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _retrace; "
                             "echo ${COMPREPLY[@]}");
  EXPECT_EQ(0, ran.code) << ran.err;
  return ran.out;
}

TEST(Completion, BashAcceptsTheScriptAndItOffersWhatFits) {
  const TempFolder temp;
  ASSERT_EQ(0, Shell(kProgram + " completion bash > " + (temp / "script")).code);
  const Finished syntax = Shell("bash -n " + (temp / "script"));
  EXPECT_EQ(0, syntax.code) << syntax.err;
  EXPECT_EQ("verify\n", Offered("retrace verif"));
  EXPECT_EQ("build inspect\n", Offered("retrace data \"\""));
  EXPECT_EQ("--replay\n", Offered("retrace verify runs/x --rep"));
  EXPECT_EQ("auto always never\n", Offered("retrace train --color \"\""));
  EXPECT_EQ("avx2 avx512\n", Offered("retrace replay x --isa avx"));
  EXPECT_EQ("bash\n", Offered("retrace completion ba"));
  EXPECT_EQ("optimizer.weight_decay=\n",
            Offered("retrace recipe check x --set optimizer.weight_decay"));
  EXPECT_TRUE(Contains(Offered("retrace replay x --do \"\""), "reset-moments"));
}

TEST(Completion, ZshAndFishAcceptTheirScripts) {
  int tried = 0;
  for (const std::string shell : {"zsh", "fish"}) {
    const Finished script = Retrace("completion " + shell);
    ASSERT_EQ(0, script.code);
    EXPECT_TRUE(Contains(script.out, "verify")) << shell;
    if (Shell("command -v " + shell).code != 0) continue;
    ++tried;
    const Finished syntax = Shell(kProgram + " completion " + shell + " | " + shell + " -n");
    EXPECT_EQ(0, syntax.code) << shell << ": " << syntax.err;
  }
  EXPECT_EQ(2, Retrace("completion tcsh").code);
  if (tried == 0) GTEST_SKIP() << "neither zsh nor fish is installed: their syntax was not checked";
}

// To regenerate: RETRACE_UPDATE_DOCS=1 build/cmd_ops_test --gtest_filter='Manual*'
TEST(Manual, ThePageInTheTreeIsUpToDate) {
  const std::string path = kSource + "/docs/retrace.1";
  const Finished ran = Retrace("man");
  ASSERT_EQ(0, ran.code);
  if (std::getenv("RETRACE_UPDATE_DOCS") != nullptr) std::ofstream(path) << ran.out;
  EXPECT_EQ(ran.out, ReadFileText(path));
}

TEST(Manual, HasEveryCommandAndEveryExitCode) {
  const Finished man = Retrace("man");
  for (const char* command : {"train", "replay", "verify", "plan", "data build", "selftest",
                              "bench step", "interventions", "completion"}) {
    EXPECT_TRUE(Contains(man.out, std::string(".SS \\fBretrace ") + command)) << command;
  }
  for (const char code : std::string("012345")) {
    EXPECT_TRUE(Contains(man.out, std::string(".B ") + code + "\n")) << code;
  }
}

TEST(Version, NamesWhatBitsDependOn) {
  const Finished ran = Retrace("--version");
  EXPECT_EQ(0, ran.code);
  for (const char* part :
       {"retrace 0.", "retrace-numerics-", "format", "instruction set", "plug-ins"}) {
    EXPECT_TRUE(Contains(ran.out, part)) << ran.out;
  }
}

TEST(Program, AnUnknownCommandIsAUsageError) {
  EXPECT_EQ(2, Retrace("verfy").code);
  EXPECT_EQ(2, Retrace("").code);
}

}  // namespace
}  // namespace retrace
