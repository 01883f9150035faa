// log, show and diff as their user runs them, on a small recording and its branch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/recipe_toml.h"
#include "formats/run_dir.h"
#include "replay/record.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

constexpr int kUpdates = 6;

std::vector<std::string> TrainWords(const std::string& run, std::vector<std::string> more = {}) {
  std::vector<std::string> words = {
      "train",     SourceDir() + "/examples/tiny.toml",
      "-o",        run,
      "--set",     "data.path=" + TestData("dataset/tiny"),
      "--set",     "steps=" + std::to_string(kUpdates),
      "--threads", "1",
      "--quiet"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

Json ParseJson(const Finished& done) {
  Json json = Json::parse(done.out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << done.out << done.err;
  return json;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// run: the recording; branch: of run@2, without clipping; again: the same recipe, once more; low:
// with another learning rate.
class ReadRuns : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    run_ = *folder_ / "run";
    branch_ = *folder_ / "branch";
    ASSERT_EQ(0, RunProgram(TrainWords(run_)).code);
    ASSERT_EQ(0, RunProgram(TrainWords(*folder_ / "again")).code);
    ASSERT_EQ(0, RunProgram(TrainWords(*folder_ / "low", {"--set", "schedule.peak=0.001"})).code);
    const Finished branch = RunProgram(
        {"replay", run_, "--steps", "3..6", "--do", "clip:none", "--out", branch_, "--quiet"});
    ASSERT_EQ(0, branch.code) << branch.err;
  }
  static void TearDownTestSuite() { delete folder_; }

  // A copy that a test may damage.
  static std::string CopyOfRun(const std::string& name) {
    const std::string copy = *folder_ / name;
    std::filesystem::copy(run_, copy, std::filesystem::copy_options::recursive);
    return copy;
  }

  static TempFolder* folder_;
  static std::string run_, branch_;
};
TempFolder* ReadRuns::folder_ = nullptr;
std::string ReadRuns::run_, ReadRuns::branch_;

// ---- log ---------------------------------------------------------------------------------------

TEST_F(ReadRuns, LogPrintsARowAnUpdate) {
  const Finished done = RunProgram({"log", run_});
  EXPECT_EQ(0, done.code) << done.err;
  const std::vector<std::string> lines = Lines(done.out);
  ASSERT_EQ(size_t{kUpdates + 1}, lines.size());
  EXPECT_TRUE(Contains(lines[0], "update") && Contains(lines[0], "eval"));
  const RunReader reader = RunReader::Open(run_).value();
  for (int k = 1; k <= kUpdates; ++k) {
    EXPECT_TRUE(Contains(lines[k], reader.history().Find(k)->digest.Hex().substr(0, 12)));
  }
  EXPECT_EQ(3u, Lines(RunProgram({"log", run_, "--steps", "2..3"}).out).size());
}

TEST_F(ReadRuns, LogAsJsonIsTheLedgersRecordsWithDigests) {
  const Finished done = RunProgram({"log", run_, "--json"});
  const std::vector<std::string> lines = Lines(done.out);
  ASSERT_EQ(size_t{kUpdates}, lines.size());
  const RunReader reader = RunReader::Open(run_).value();
  for (int k = 1; k <= kUpdates; ++k) {
    Json json = Json::parse(lines[k - 1]);
    EXPECT_EQ(run_, json["run"]);
    EXPECT_EQ(reader.history().Find(k)->digest.Hex(), json["digest"]);
    json.erase("run");
    json.erase("digest");
    EXPECT_EQ(Json::parse(reader.history().Find(k)->record), json);
  }
}

TEST_F(ReadRuns, LogAsCsvReadsBackToTheSameNumbers) {
  const std::vector<std::string> lines = Lines(RunProgram({"log", run_, branch_, "--csv"}).out);
  ASSERT_EQ(size_t{1 + kUpdates + 4}, lines.size());
  const RunReader reader = RunReader::Open(run_).value();
  std::istringstream fields(lines[1]);
  std::string run, update, loss;
  std::getline(fields, run, ',');
  std::getline(fields, update, ',');
  std::getline(fields, loss, ',');
  EXPECT_EQ(run_, run);
  EXPECT_EQ("1", update);
  EXPECT_EQ(Json::parse(reader.history().Find(1)->record)["loss"].get<double>(), std::stod(loss));
}

TEST_F(ReadRuns, ThePlotHasEveryCurveAndKeepsToItsWidth) {
  const Finished done = RunProgram({"log", run_, branch_, "--plot", "--ascii", "--width", "72"});
  EXPECT_EQ(0, done.code) << done.err;
  EXPECT_TRUE(Contains(done.out, "evaluation loss (nat)"));
  EXPECT_TRUE(Contains(done.out, "gradient norm"));
  EXPECT_TRUE(Contains(done.out, "largest-moving tensors of branch"));
  int stars = 0, circles = 0;
  for (const std::string& line : Lines(done.out)) {
    for (char c : line) EXPECT_TRUE(c >= ' ' && c <= '~') << line;
    const size_t axis = line.find_first_of("|+");
    if (axis != 9) continue;
    EXPECT_LE(line.size(), 72u) << line;
    stars += static_cast<int>(std::count(line.begin(), line.end(), '*'));
    circles += static_cast<int>(std::count(line.begin(), line.end(), 'o'));
  }
  // Two panels; a branch's point may hide its parent's, and two are marked as least and most.
  EXPECT_GE(stars, kUpdates);
  EXPECT_GE(circles, 4);
  const Finished braille = RunProgram({"log", run_, "--plot", "--color", "always"});
  EXPECT_TRUE(Contains(braille.out, "\033[") && Contains(braille.out, "\xe2\xa0"));
}

TEST_F(ReadRuns, NonFiniteValuesAreShownAndLeaveAGap) {
  const std::string dir = *folder_ / "broken";
  const RunReader reader = RunReader::Open(run_).value();
  const Recipe recipe = ParseRecipe(reader.recipe_text(), "recipe.toml").value();
  const Layout layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
  {
    RunPlan plan;
    plan.recipe_text = reader.recipe_text();
    const auto writer = RunWriter::Create(dir, layout, plan).value();
    for (int k = 0; k <= 5; ++k) {
      StepCommit commit;
      commit.counters.position = k;
      commit.counters.adam_t.assign(layout.tensors().size(), k);
      UpdateRecord record;
      record.update = k;
      record.loss = k == 3 ? std::nan("") : 8.0 - k;
      record.gradient_norm = k == 3 ? INFINITY : 1.0 + k;
      record.tensor_norms.assign(layout.tensors().size(), k == 3 ? INFINITY : 1.0);
      if (k > 0) commit.record = RecordJson(record);
      ASSERT_TRUE(writer->CommitStep(commit).ok());
    }
    ASSERT_TRUE(writer->Drain().ok());
  }
  const Finished table = RunProgram({"log", dir});
  ASSERT_EQ(6u, Lines(table.out).size()) << table.err;
  EXPECT_TRUE(Contains(Lines(table.out)[3], "nan") && Contains(Lines(table.out)[3], "inf"));
  EXPECT_EQ("nan", Json::parse(Lines(RunProgram({"log", dir, "--json"}).out)[2])["loss"]);
  const Finished plot = RunProgram({"log", dir, "--plot", "--ascii"});
  EXPECT_EQ(0, plot.code) << plot.err;
  EXPECT_EQ(2, std::count(plot.out.begin(), plot.out.end(), '!')) << plot.out;
  EXPECT_TRUE(Contains(plot.out, "training loss"));
}

TEST_F(ReadRuns, LogRefusesWhatItCanNotShow) {
  EXPECT_EQ(2, RunProgram({"log", *folder_ / "none"}).code);
  EXPECT_EQ(2, RunProgram({"log", run_, "--steps", "5..3"}).code);
  EXPECT_EQ(2, RunProgram({"log", run_, "--json", "--csv"}).code);
  const Finished beyond = RunProgram({"log", run_, "--steps", "50..60"});
  EXPECT_EQ(2, beyond.code);
  EXPECT_TRUE(Contains(beyond.err, "1..6")) << beyond.err;
}

// ---- show --------------------------------------------------------------------------------------

TEST_F(ReadRuns, ShowSaysWhatARunIsAndKeeps) {
  const Finished done = RunProgram({"show", run_});
  EXPECT_EQ(0, done.code) << done.err;
  EXPECT_TRUE(Contains(done.out, "6 of 6 done")) << done.out;
  EXPECT_TRUE(Contains(done.out, "states 0..6; keyframes 0, 4; journals 1..3, 5..6")) << done.out;
  const Json json = ParseJson(RunProgram({"show", branch_, "--json"}));
  EXPECT_EQ(2, json["first_position"]);
  EXPECT_EQ(run_, json["lineage"]["parent"]);
  EXPECT_EQ(Json::array({"clip:norm=none@3..6"}), json["lineage"]["interventions"]);
  EXPECT_GT(json["bytes"]["keyframes"], 0);
}

TEST_F(ReadRuns, ShowOfAStateAddsUpOverTensorsAndComponents) {
  const Finished done = RunProgram({"show", run_ + "@5"});
  EXPECT_EQ(0, done.code) << done.err;
  EXPECT_TRUE(Contains(done.out, "rebuilt from keyframe 4 and 1 journal")) << done.out;
  const Json json = ParseJson(RunProgram({"show", run_ + "@5", "--json"}));
  EXPECT_EQ(5, json["position"]);
  int64_t elements = 0;
  for (const Json& tensor : json["tensors"]) elements += tensor["elements"].get<int64_t>();
  EXPECT_EQ(3 * ParseJson(RunProgram({"show", run_, "--json"}))["parameters"].get<int64_t>(),
            elements);
}

TEST_F(ReadRuns, TheShownGradientHasTheRecordedNorm) {
  const Json json = ParseJson(RunProgram({"show", run_ + "@5:*#g", "--json"}));
  const Json record = Json::parse(RunReader::Open(run_).value().history().Find(5)->record);
  ASSERT_EQ(record["tensor_norms"].size(), json["tensors"].size());
  for (size_t t = 0; t < json["tensors"].size(); ++t) {
    const double recorded = record["tensor_norms"][t];
    // FP64 sums of at most 2^14 squares in two orders: each within 2^14 * 2^-53 of the exact one.
    EXPECT_NEAR(recorded, json["tensors"][t]["norm"].get<double>(), 2e-12 * recorded);
  }
}

TEST_F(ReadRuns, ShowOfATensorPrintsItsFirstValues) {
  const Json json = ParseJson(RunProgram({"show", run_ + "@0:model.norm.weight", "--json"}));
  ASSERT_EQ(1u, json["tensors"].size());
  EXPECT_EQ(Json::array({1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0}),
            json["tensors"][0]["first_values"]);
  const Finished text = RunProgram({"show", run_ + "@0:model.layers.*#v", "--top", "3"});
  EXPECT_TRUE(Contains(text.out, "more; --top 0 shows all")) << text.out;
}

TEST_F(ReadRuns, ShowRefusesBadAddresses) {
  EXPECT_EQ(2, RunProgram({"show", *folder_ / "none"}).code);
  EXPECT_EQ(2, RunProgram({"show", run_ + "@99"}).code);
  EXPECT_EQ(2, RunProgram({"show", run_ + "@x"}).code);
  EXPECT_EQ(2, RunProgram({"show", run_ + "@3:model.norm.weight#q"}).code);
  const Finished name = RunProgram({"show", run_ + "@3:model.norm.wait"});
  EXPECT_EQ(2, name.code);
  EXPECT_TRUE(Contains(name.err, "model.norm.weight")) << name.err;
  const Finished keyframe = RunProgram({"show", run_ + "@4:*#g"});
  EXPECT_EQ(2, keyframe.code);
  EXPECT_TRUE(Contains(keyframe.err, "1..3, 5..6")) << keyframe.err;
}

// ---- diff --------------------------------------------------------------------------------------

TEST_F(ReadRuns, EqualRunsAndStatesAreIdentical) {
  const Finished runs = RunProgram({"diff", run_, *folder_ / "again"});
  EXPECT_EQ(0, runs.code) << runs.out << runs.err;
  EXPECT_TRUE(runs.out.starts_with("identical")) << runs.out;
  EXPECT_EQ(0, RunProgram({"diff", run_ + "@5", *folder_ / "again@5"}).code);
  const Finished quiet = RunProgram({"diff", run_, branch_, "--quiet"});
  EXPECT_EQ(1, quiet.code);
  EXPECT_EQ("", quiet.out + quiet.err);
}

TEST_F(ReadRuns, ABranchPartsFromItsParentAfterItsFirstUpdate) {
  const Json json = ParseJson(RunProgram({"diff", run_, branch_, "--json"}));
  EXPECT_EQ(false, json["identical"]);
  EXPECT_EQ(2, json["first_common"]);
  // The clip factor is in the record of update 3; Adam's moments follow it.
  EXPECT_EQ(3, json["first_differing_state"]);
  EXPECT_EQ(3, json["first_differing_record"]);
  EXPECT_EQ(3, json["compared"]);
  EXPECT_EQ(Json::array({"clip:norm=none@3..6"}), json["interventions"]["b"]);
  ASSERT_GE(json["record"].size(), 2u);
  EXPECT_EQ("clip", json["record"][0]["field"]);
  EXPECT_EQ("1.0", json["record"][0]["b"]);
  for (size_t i = 1; i < json["record"].size(); ++i) {  // of what the update left
    EXPECT_TRUE(std::string(json["record"][i]["field"]).starts_with("norms."));
  }
  const Finished text = RunProgram({"diff", run_, branch_});
  EXPECT_EQ(1, text.code);
  EXPECT_TRUE(Contains(text.out, "B is a branch of A@2, with\n  clip:norm=none@3..6")) << text.out;
}

TEST_F(ReadRuns, RunsOfOtherRecipesListTheirKeysAndPartWhereLearningDoes) {
  const Json json = ParseJson(RunProgram({"diff", run_, *folder_ / "low", "--json"}));
  ASSERT_EQ(1u, json["recipe"].size());
  EXPECT_EQ("schedule.peak", json["recipe"][0]["key"]);
  EXPECT_EQ("0.01", json["recipe"][0]["a"]);
  EXPECT_EQ("0.001", json["recipe"][0]["b"]);
  EXPECT_EQ(1, json["first_differing_state"]);
}

TEST_F(ReadRuns, DiffOfStatesNamesTheFirstElementAndItsValues) {
  const std::string tensor = "model.layers.0.mlp.down_proj.weight";
  const Json json =
      ParseJson(RunProgram({"diff", run_ + "@4", branch_ + "@4", "--only", tensor, "--json"}));
  EXPECT_EQ(false, json["identical"]);
  EXPECT_EQ(3, json["tensors_compared"]);
  for (const Json& difference : json["tensors"]) {
    // The same element, read by show.
    const std::string suffix = "#" + difference["component"].get<std::string>();
    const Json a = ParseJson(RunProgram({"show", run_ + "@4:" + tensor + suffix, "--json"}));
    const Json b = ParseJson(RunProgram({"show", branch_ + "@4:" + tensor + suffix, "--json"}));
    const Json &values_a = a["tensors"][0]["first_values"],
               &values_b = b["tensors"][0]["first_values"];
    for (size_t i = 0; i < values_a.size(); ++i) {
      if (values_a[i] == values_b[i]) continue;
      EXPECT_EQ(i, difference["first"]["index"]);
      EXPECT_EQ(values_a[i], difference["first"]["a"]);
      EXPECT_EQ(values_b[i], difference["first"]["b"]);
      break;
    }
  }
}

TEST_F(ReadRuns, GradientsAndSingleTensorsOfOtherNamesAreCompared) {
  const Json gradient = ParseJson(RunProgram({"diff", run_ + "@3:*#g", branch_ + "@3", "--json"}));
  EXPECT_EQ(true, gradient["identical"]) << "update 3 starts from the same state";
  const Finished moments = RunProgram(
      {"diff", run_ + "@3:model.norm.weight#m", run_ + "@3:model.norm.weight#v", "--json"});
  EXPECT_EQ(1, moments.code) << moments.err;
  EXPECT_EQ(1, ParseJson(moments)["tensors_compared"]);
}

TEST_F(ReadRuns, DiffReadsSafetensors) {
  const std::string a = TestData("parity/cfg1_sliding_only/model.safetensors");
  const std::string b = *folder_ / "flipped.safetensors";
  std::string bytes = ReadFileText(a);
  bytes[bytes.size() - 4] ^= 1;  // the last element's lowest bit
  std::ofstream(b, std::ios::binary) << bytes;
  const Finished same = RunProgram({"diff", a, a});
  EXPECT_EQ(0, same.code) << same.out << same.err;
  const Json json = ParseJson(RunProgram({"diff", a, b, "--json"}));
  EXPECT_EQ(1, json["tensors_differing"]);
  EXPECT_EQ(1, json["tensors"][0]["differing"]);
  EXPECT_EQ(1, json["tensors"][0]["first"]["ulp"]);
  std::ofstream(b, std::ios::binary) << bytes.substr(0, bytes.size() - 1);
  EXPECT_EQ(3, RunProgram({"diff", a, b}).code);
  EXPECT_EQ(2, RunProgram({"diff", a, *folder_ / "none.safetensors"}).code);
}

TEST_F(ReadRuns, DiffRefusesWhatItCanNotCompare) {
  EXPECT_EQ(2, RunProgram({"diff", run_, run_ + "@3"}).code);
  EXPECT_EQ(2, RunProgram({"diff", run_ + "@3", run_ + "@99"}).code);
  EXPECT_EQ(2, RunProgram({"diff", run_ + "@3", run_ + "@4", "--only", "nothing"}).code);
  EXPECT_EQ(2, RunProgram({"diff", run_, *folder_ / "none"}).code);
}

// ---- Damage ------------------------------------------------------------------------------------

TEST_F(ReadRuns, ADamagedLedgerEndsEachCommandWithItsLine) {
  const std::string damaged = CopyOfRun("damaged");
  std::string ledger = ReadFileText(damaged + "/ledger.jsonl");
  ledger[ledger.find("\"loss\":") + 8] ^= 1;
  std::ofstream(damaged + "/ledger.jsonl", std::ios::binary) << ledger;
  const std::vector<std::vector<std::string>> commands = {{"log", damaged},
                                                          {"show", damaged},
                                                          {"show", damaged + "@3"},
                                                          {"diff", damaged, run_},
                                                          {"diff", run_ + "@3", damaged + "@3"}};
  for (const std::vector<std::string>& words : commands) {
    const Finished done = RunProgram(words);
    EXPECT_EQ(3, done.code) << words[0];
    EXPECT_EQ("", done.out);
    EXPECT_TRUE(Contains(done.err, "ledger.jsonl") && Contains(done.err, "line")) << done.err;
  }
}

TEST_F(ReadRuns, ADamagedStepFileIsDamageNotADifference) {
  const std::string damaged = CopyOfRun("damaged-step");
  const std::string file = damaged + "/steps/000000004.a0001.r0000.h5";
  std::string bytes = ReadFileText(file);
  ASSERT_FALSE(bytes.empty());
  bytes[bytes.size() / 2] ^= 1;
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_EQ(3, RunProgram({"show", damaged + "@4"}).code);
  EXPECT_EQ(3, RunProgram({"diff", damaged + "@4", run_ + "@3"}).code);
  EXPECT_EQ(0, RunProgram({"diff", damaged + "@4", run_ + "@4"}).code)
      << "the digests are the same; verify is the command that reads every byte";
  EXPECT_EQ(0, RunProgram({"log", damaged}).code);
}

}  // namespace
}  // namespace retrace
