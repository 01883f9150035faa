// report, and what log exports, as their user runs them. The page is opened in headless Chromium
// (tests/report_page.py), event files are read by the tensorboard package (tests/read_events.py);
// without them those tests are skipped.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/recipe_toml.h"
#include "formats/event_file.h"
#include "formats/run_dir.h"
#include "replay/record.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

constexpr int kUpdates = 6;
constexpr int kNoChromium = 77;
// What a user may call a run.
constexpr char kHostileName[] = "<img src=x onerror=hacked=1>&\"'</script><script>hacked=1<!--";

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Finished RunPython(std::vector<std::string> words) {
  const TempFolder folder;
  words.insert(words.begin(), TestPython());
  return Process(words, folder / "log").Wait();
}

bool PythonHas(const std::string& modules) {
  return std::filesystem::exists(TestPython()) &&
         RunPython({"-c", "import " + modules}).code == 0;
}

std::string Script(const std::string& name) {
  return SourceDir() + "/tests/" + name;
}

// run: the recording; branch: of run@2, without clipping; noise-1..3: replicas of run@2; broken:
// with values that are not finite; and a run with a hostile name.
class Reports : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    run_ = *folder_ / "run";
    branch_ = *folder_ / "branch";
    Train(run_);
    Branch(branch_, {"clip:none"});
    for (const char* seed : {"1", "2", "3"}) {
      noisy_.push_back(*folder_ / (std::string("noise-") + seed));
      Branch(noisy_.back(), {std::string("perturb:sigma=0.01,seed=") + seed});
    }
    result_ = *folder_ / "result.json";
    std::ofstream(result_) << ResultJson().dump();
  }
  static void TearDownTestSuite() {
    noisy_.clear();
    delete folder_;
  }

  static void Train(const std::string& run) {
    const Finished done =
        RunProgram({"train", SourceDir() + "/examples/tiny.toml", "-o", run,
                    "--set", "data.path=" + TestData("dataset/tiny"), "--set",
                    "steps=" + std::to_string(kUpdates), "--threads", "1", "--quiet"});
    ASSERT_EQ(0, done.code) << done.err;
  }
  static void Branch(const std::string& out, const std::vector<std::string>& changes) {
    std::vector<std::string> words = {"replay", run_, "--steps", "3..6", "--out", out, "--quiet"};
    for (const std::string& change : changes) words.insert(words.end(), {"--do", change});
    const Finished done = RunProgram(words);
    ASSERT_EQ(0, done.code) << done.err;
  }

  // As `retrace experiment --json` prints it.
  static Json ResultJson() {
    const auto arm = [](const char* name, const char* verdict, double median, double inf_at) {
      Json replicas = Json::array();
      for (int i = 0; i < 6; ++i) {
        Json losses = Json::array();
        for (int k = 0; k < 4; ++k) losses.push_back(6.0 + 0.1 * i + (k == 2 ? median : 0));
        Json jump = median + 0.05 * i;
        if (i == inf_at) jump = "inf";
        replicas.push_back({{"seed", i},
                            {"jump", jump},
                            {"spike", median > 0.5 ? Json(5) : Json("inf")},
                            {"halted", false},
                            {"state", ""},
                            {"run", ""},
                            {"evaluation_losses", losses}});
      }
      return Json{{"name", name},
                  {"hypothesis", "why <b>so</b>"},
                  {"changes", {"clip:norm=none@3..6"}},
                  {"verdict", verdict},
                  {"median", median},
                  {"delta", median - 1.2},
                  {"p_below", 0.0123},
                  {"p_above", 0.9},
                  {"p_later", 0.5},
                  {"replicas", replicas}};
    };
    return {{"file", "x.toml"},
            {"run", run_},
            {"out", "x"},
            {"first", 3},
            {"horizon", 6},
            {"threshold", 0.5},
            {"control_equal", true},
            {"scope", "this run"},
            {"sigma", 0.001},
            {"saturated", true},
            {"level", 0.05},
            {"least_effect", 0.3},
            {"arms",
             {arm("control", "control", 1.2, -1), arm("clip off", "removes", 0.1, -1),
              arm("<i>other</i>", "within noise", 1.1, 3)}}};
  }

  static Json ReportOf(std::vector<std::string> words) {
    words.insert(words.begin(), "report");
    words.push_back("--json");
    const Finished done = RunProgram(words);
    EXPECT_EQ(0, done.code) << done.err;
    return Json::parse(done.out, nullptr, false);
  }

  // Writes the page and the log of the same runs, and has Chromium look at it.
  static void CheckInChromium(const std::vector<std::string>& runs, std::vector<std::string> more) {
    const TempFolder out;
    std::vector<std::string> report = {"report", "-o", out / "page.html"}, log = {"log", "--json"};
    report.insert(report.end(), runs.begin(), runs.end());
    report.insert(report.end(), more.begin(), more.end());
    log.insert(log.end(), runs.begin(), runs.end());
    const Finished made = RunProgram(report);
    ASSERT_EQ(0, made.code) << made.err;
    std::ofstream(out / "log.jsonl") << RunProgram(log).out;
    const Finished done =
        RunPython({Script("report_page.py"), "check", out / "page.html", out / "log.jsonl"});
    if (done.code == kNoChromium) GTEST_SKIP() << done.out;
    EXPECT_EQ(0, done.code) << done.out << done.err;
    std::printf("%s", done.out.c_str());
  }

  static TempFolder* folder_;
  static std::string run_, branch_, result_;
  static std::vector<std::string> noisy_;
};
TempFolder* Reports::folder_ = nullptr;
std::string Reports::run_, Reports::branch_, Reports::result_;
std::vector<std::string> Reports::noisy_;

// ---- The data ----------------------------------------------------------------------------------

TEST_F(Reports, CurvesAreTheLedgersNumbers) {
  const Json json = ReportOf({run_, branch_});
  ASSERT_EQ(2u, json["runs"].size());
  for (const Json& run : json["runs"]) {
    const RunReader reader = RunReader::Open(run["dir"].get<std::string>()).value();
    const Json& curves = run["curves"];
    int64_t k = curves["first"];
    EXPECT_EQ(reader.history().first_position() + 1, k);
    EXPECT_EQ(reader.history().last_position(), k + std::ssize(curves["loss"]) - 1);
    for (size_t i = 0; i < curves["loss"].size(); ++i, ++k) {
      const Json record = Json::parse(reader.history().Find(k)->record);
      for (const char* field : {"loss", "evaluation_loss", "gradient_norm", "clip", "lr"}) {
        EXPECT_EQ(record[field], curves[field][i]) << field << " of update " << k;
      }
    }
    EXPECT_EQ(reader.history().positions.back().digest.Hex(), run["last_state"]);
  }
  EXPECT_EQ(0, json["runs"][1]["lineage"]["run"]);
  EXPECT_EQ(2, json["runs"][1]["lineage"]["position"]);
  EXPECT_EQ(Json::array({"clip:norm=none@3..6"}), json["runs"][1]["lineage"]["interventions"]);
}

TEST_F(Reports, ReplicasAreAGroupAndOthersAreNot) {
  std::vector<std::string> words = {run_, branch_};
  words.insert(words.end(), noisy_.begin(), noisy_.end());
  const Json json = ReportOf(words);
  ASSERT_EQ(1u, json["groups"].size()) << json["groups"];
  EXPECT_EQ(Json::array({2, 3, 4}), json["groups"][0]["runs"]);
  EXPECT_TRUE(ReportOf({run_, noisy_[0], noisy_[1]})["groups"].empty()) << "two are no band";
}

// show and diff read the same states in their own ways.
TEST_F(Reports, HeatMapsAreTheNormsOfTheStates) {
  const Json json = ReportOf({run_});
  const Json& heat = json["motion"]["heat"][0];
  const Json& states = heat["states"];
  ASSERT_FALSE(states.is_null());
  const Json& names = json["motion"]["models"][0]["name"];
  const int64_t first = states["first"], last = states["last"];
  ASSERT_GE(last, first + 2);
  for (const int64_t k : {first, last}) {
    const Json before = Json::parse(
        RunProgram({"show", run_ + "@" + std::to_string(k - 1) + ":*", "--top", "0", "--json"})
            .out);
    const Json moved =
        Json::parse(RunProgram({"diff", run_ + "@" + std::to_string(k - 1) + ":*#p",
                                run_ + "@" + std::to_string(k), "--top", "0", "--json"})
                        .out);
    int compared = 0;
    for (size_t t = 0; t < names.size(); ++t) {
      const double w = states["parameter"][t][k - first], change = states["change"][t][k - first];
      for (const Json& tensor : before["tensors"]) {
        if (tensor["name"] != names[t]) continue;
        const double norm = tensor["norm"];
        EXPECT_NEAR(norm, w, 1e-4 * norm) << names[t];  // five digits
      }
      for (const Json& tensor : moved["tensors"]) {
        if (tensor["name"] != names[t] || w == 0) continue;
        const double relative = tensor["relative_l2"];
        EXPECT_NEAR(relative, change / w, 3e-4 * relative) << names[t];
        ++compared;
      }
    }
    EXPECT_GT(compared, 5);
  }
  EXPECT_TRUE(ReportOf({run_, "--no-states"})["motion"]["heat"][0]["states"].is_null());
}

TEST_F(Reports, ByReplayThePassesAreThoseOfStats) {
  const Json json = ReportOf({branch_, "--replay"});
  const Json& heat = json["motion"]["heat"][0];
  const Finished done = RunProgram({"stats", branch_, "--replay", "--by", "layer", "--json"});
  ASSERT_EQ(0, done.code) << done.err;
  std::istringstream in(done.out);
  int compared = 0;
  for (std::string line; std::getline(in, line);) {
    const Json row = Json::parse(line);
    const size_t layer = std::stoul(row["of"].get<std::string>().substr(6));
    const int64_t i = row["update"].get<int64_t>() - heat["first"].get<int64_t>();
    if (i < 0 || i >= std::ssize(heat["lr"])) continue;
    for (const char* key : {"residual_rms", "mlp_ratio", "attention_entropy", "gradient_norm"}) {
      const double value = row[key];
      EXPECT_NEAR(value, heat["passes"][key][layer][i], 1e-4 * value) << key << " " << line;
      ++compared;
    }
  }
  EXPECT_GT(compared, 20);
  EXPECT_TRUE(ReportOf({branch_})["motion"]["heat"][0]["passes"].is_null());
}

TEST_F(Reports, TheGradientsOfAHeatMapAreTheRecords) {
  const Json json = ReportOf({run_});
  const Json& heat = json["motion"]["heat"][0];
  const RunReader reader = RunReader::Open(run_).value();
  int64_t k = heat["first"];
  for (size_t i = 0; i < heat["lr"].size(); ++i, ++k) {
    const Json record = Json::parse(reader.history().Find(k)->record);
    for (size_t t = 0; t < record["tensor_norms"].size(); ++t) {
      const double norm = record["tensor_norms"][t];
      EXPECT_NEAR(norm, heat["gradient"][t][i].get<double>(), 1e-4 * norm);
    }
  }
}

TEST_F(Reports, AnExperimentsResultAloneNamesItsRun) {
  const Json json = ReportOf({result_});
  ASSERT_EQ(1u, json["runs"].size());
  EXPECT_EQ(run_, json["runs"][0]["dir"]);
  EXPECT_EQ("removes", json["experiment"]["arms"][1]["verdict"]);
  EXPECT_EQ("inf", json["experiment"]["arms"][2]["replicas"][3]["jump"]);
  EXPECT_FALSE(json["experiment"].contains("out")) << "what a report does not read";
}

TEST_F(Reports, WhatCanNotBeReportedIsRefused) {
  const std::string out = *folder_ / "never.html";
  const auto refused = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"report", "-o", out});
    return RunProgram(words);
  };
  EXPECT_EQ(2, refused({*folder_ / "none"}).code);
  EXPECT_EQ(2, refused({run_, "--steps", "5..3"}).code);
  EXPECT_EQ(2, refused({run_, "--steps", "50..60"}).code);
  EXPECT_EQ(2, refused({run_, result_, result_}).code);
  EXPECT_EQ(2, RunProgram({"report", run_, "-o", *folder_ / "none/page.html"}).code);
  EXPECT_EQ(2, RunProgram({"report", run_, "-o", run_}).code);
  const std::string bad = *folder_ / "bad.json";
  for (const auto& [text, says] : std::vector<std::pair<std::string, std::string>>{
           {"", "no JSON"},
           {"[1]", "an object"},
           {"{}", "file"},
           {R"({"file": 3})", "file: expected text, got 3"}}) {
    std::ofstream(bad) << text;
    const Finished done = refused({run_, bad});
    EXPECT_EQ(3, done.code) << text;
    EXPECT_TRUE(Contains(done.err, says)) << done.err;
  }
  Json result = ResultJson();
  result["arms"][1]["replicas"][2]["evaluation_losses"][1] = "many";
  std::ofstream(bad) << result.dump();
  EXPECT_TRUE(Contains(refused({run_, bad}).err, "arms[1].replicas[2].evaluation_losses"));
  // Every field that is read, gone.
  for (const char* field : {"run", "first", "horizon", "threshold", "control_equal", "arms"}) {
    result = ResultJson();
    result.erase(field);
    std::ofstream(bad) << result.dump();
    EXPECT_EQ(3, refused({run_, bad}).code) << field;
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

// ---- The page ----------------------------------------------------------------------------------

TEST_F(Reports, ThePageIsOneFileThatLoadsNothingAndIsTheSameEachTime) {
  const TempFolder out;
  ASSERT_EQ(0, RunProgram({"report", run_, branch_, result_, "-o", out / "a.html"}).code);
  ASSERT_EQ(0,
            RunProgram({"report", run_, branch_, result_, "-o", out / "b.html", "--quiet"}).code);
  const std::string page = ReadFileText(out / "a.html");
  EXPECT_EQ(page, ReadFileText(out / "b.html"));
  EXPECT_TRUE(page.starts_with("<!DOCTYPE html>"));
  for (const char* loads : {" src=", "@import", "url(http", "<link rel=\"stylesheet"}) {
    EXPECT_FALSE(Contains(page.substr(0, page.find("<script")), loads)) << loads;
  }
  EXPECT_TRUE(Contains(page, "default-src 'none'"));
  EXPECT_TRUE(Contains(page, "Redistribution and use")) << "D3's license";
  EXPECT_FALSE(Contains(page, "{{title}}"));
}

TEST_F(Reports, TextOfUsersStaysText) {
  const std::string title = kHostileName;
  const TempFolder out;
  ASSERT_EQ(0, RunProgram({"report", run_, "--title", title, "-o", out / "page.html"}).code);
  const std::string page = ReadFileText(out / "page.html");
  EXPECT_FALSE(Contains(page, "<img src=x")) << "neither as HTML nor within the data";
  EXPECT_FALSE(Contains(page, "<script>hacked"));
}

class Pages : public Reports {
 protected:
  void SetUp() override {
    if (!PythonHas("websocket, numpy, PIL")) {
      GTEST_SKIP() << "no websocket-client, numpy and pillow; scripts/setup.sh --for-tests";
    }
  }
};

TEST_F(Pages, InChromiumARunAndItsBranchAreDrawn) { CheckInChromium({run_, branch_}, {"--replay"}); }

TEST_F(Pages, InChromiumReplicasAndAnExperimentAreDrawn) {
  std::vector<std::string> runs = {run_, branch_};
  runs.insert(runs.end(), noisy_.begin(), noisy_.end());
  CheckInChromium(runs, {result_});
}

// A run of records alone, written as its user might never do.
void WriteRecords(const std::string& dir, const std::string& like, int updates,
                  const std::function<void(UpdateRecord*)>& edit) {
  const RunReader reader = RunReader::Open(like).value();
  const Recipe recipe = ParseRecipe(reader.recipe_text(), "recipe.toml").value();
  const Layout layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
  RunPlan plan;
  plan.recipe_text = reader.recipe_text();
  const auto writer = RunWriter::Create(dir, layout, plan).value();
  for (int k = 0; k <= updates; ++k) {
    StepCommit commit;
    commit.counters.position = k;
    commit.counters.adam_t.assign(layout.tensors().size(), k);
    UpdateRecord record;
    record.update = k;
    record.loss = 3 + 7 * std::exp(-0.01 * k);
    record.gradient_norm = 1 + 100 * std::exp(-0.02 * k);
    const size_t tensors = layout.tensors().size();  // whose norms add up to the gradient's
    record.tensor_norms.assign(tensors, record.gradient_norm / std::sqrt(tensors));
    edit(&record);
    if (k > 0) commit.record = RecordJson(record);
    ASSERT_TRUE(writer->CommitStep(commit).ok());
  }
  ASSERT_TRUE(writer->Drain().ok());
}

TEST_F(Pages, InChromiumHostileNamesAndValuesThatAreNotFiniteAreShown) {
  const std::string dir = *folder_ / "hostile";
  std::filesystem::create_directories(dir);
  // No slash in a name: "</script>" is tried by the title above.
  std::string name = kHostileName;
  std::erase(name, '/');
  WriteRecords(dir + "/" + name, run_, 9, [](UpdateRecord* r) {
    if (r->update == 6) {
      r->loss = std::nan("");
      r->gradient_norm = INFINITY;
      r->tensor_norms.assign(r->tensor_norms.size(), INFINITY);
      r->action = "skipped";
    }
  });
  CheckInChromium({dir + "/" + name}, {"--title", kHostileName});
}

TEST_F(Pages, InChromiumFortyRunsOfAThousandUpdatesOpen) {
  const TempFolder out;
  std::vector<std::string> words = {"report", "-o", out / "page.html"};
  for (int i = 0; i < 40; ++i) {
    words.push_back(out / ("run-" + std::to_string(i)));
    WriteRecords(words.back(), run_, 1000, [&](UpdateRecord* r) {
      r->loss += 0.1 * std::sin(0.37 * (i + 1) * static_cast<double>(r->update)) + 0.02 * i;
      r->evaluation_loss = r->loss + 0.01;
    });
  }
  const Finished made = RunProgram(words);
  ASSERT_EQ(0, made.code) << made.err;
  const Finished done = RunPython({Script("report_page.py"), "time", out / "page.html"});
  if (done.code == kNoChromium) GTEST_SKIP() << done.out;
  EXPECT_EQ(0, done.code) << done.out << done.err;
  std::printf("%s%s", made.out.c_str(), done.out.c_str());
}

// ---- log --tensorboard -------------------------------------------------------------------------

TEST_F(Reports, TensorBoardReadsTheRecordsBack) {
  const TempFolder out;
  const Finished done = RunProgram({"log", run_, branch_, "--tensorboard", out.path()});
  ASSERT_EQ(0, done.code) << done.err;
  EXPECT_EQ("", done.out);
  if (!PythonHas("tensorboard")) GTEST_SKIP() << "no tensorboard; scripts/setup.sh --for-tests";
  const Finished read = RunPython({Script("read_events.py"), out.path()});
  ASSERT_EQ(0, read.code) << read.err;
  const Json runs = Json::parse(read.out);
  ASSERT_EQ(2u, runs.size()) << read.out.substr(0, 400);
  for (const auto& [name, dir] : {std::pair("run", run_), std::pair("branch", branch_)}) {
    const RunReader reader = RunReader::Open(dir).value();
    const Json& tags = runs[name];
    const int64_t first = reader.history().first_position() + 1;
    for (const auto& [tag, field] :
         {std::pair("loss/training", "loss"), std::pair("loss/evaluation", "evaluation_loss"),
          std::pair("gradient/norm", "gradient_norm"), std::pair("gradient/clip", "clip"),
          std::pair("optimizer/lr", "lr")}) {
      ASSERT_EQ(reader.history().last_position() - first + 1, std::ssize(tags[tag])) << tag;
      for (const Json& point : tags[tag]) {
        const Json record = Json::parse(reader.history().Find(point[0])->record);
        EXPECT_EQ(static_cast<float>(record[field].get<double>()), point[1].get<float>()) << tag;
      }
    }
    EXPECT_TRUE(tags.contains("gradient_norm/model.norm.weight"));
  }
}

TEST_F(Reports, EventFilesAreReplacedAndNeverMixed) {
  const TempFolder out;
  const std::string file = out / (std::string("run/") + kEventFileName);
  ASSERT_EQ(0, RunProgram({"log", run_, "--steps", "1..2", "--tensorboard", out.path()}).code);
  const std::string part = ReadFileText(file);
  ASSERT_EQ(0, RunProgram({"log", run_, "--tensorboard", out.path()}).code);
  const std::string whole = ReadFileText(file);
  EXPECT_GT(whole.size(), part.size());
  EXPECT_TRUE(whole.starts_with(part));
  // Two runs of one name keep apart.
  std::filesystem::create_directories(out / "other");
  std::filesystem::copy(branch_, out / "other/run", std::filesystem::copy_options::recursive);
  ASSERT_EQ(0, RunProgram({"log", run_, out / "other/run", "--tensorboard", out / "tb"}).code);
  EXPECT_TRUE(std::filesystem::exists(out / (std::string("tb/other/run/") + kEventFileName)));
  EXPECT_EQ(2, RunProgram({"log", run_, "--tensorboard", out / "tb", "--csv"}).code);
}

}  // namespace
}  // namespace retrace
