// stats as its user runs it, against states and gradients themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/recipe_toml.h"
#include "formats/run_dir.h"
#include "replay/record.h"
#include "replay/timeline.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/tensor_elements.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

using Json = nlohmann::json;

class Stats : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    run_ = *folder_ / "run";
    const Finished done = RunProgram(
        {"train", SourceDir() + "/examples/tiny.toml", "-o", run_, "--set",
         "data.path=" + TestData("dataset/tiny"), "--set", "steps=5", "--set",
         "store.keyframe_every=16", "--threads", "1", "--quiet"});
    ASSERT_EQ(0, done.code) << done.err;
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::vector<Json> Lines(std::vector<std::string> words) {
    words.insert(words.begin(), {"stats", run_, "--json"});
    const Finished done = RunProgram(words);
    EXPECT_EQ(0, done.code) << done.err;
    std::vector<Json> lines;
    std::istringstream in(done.out);
    for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
    return lines;
  }

  static TempFolder* folder_;
  static std::string run_;
};
TempFolder* Stats::folder_ = nullptr;
std::string Stats::run_;

double Share(const std::vector<float>& a, const std::function<bool(size_t)>& counts) {
  double n = 0;
  for (size_t i = 0; i < a.size(); ++i) n += counts(i);
  return n / static_cast<double>(a.size());
}

TEST_F(Stats, OfTensorsAreThoseOfTheStatesAndGradients) {
  const RunReader run = RunReader::Open(run_).value();
  const Recipe recipe = ParseRecipe(run.recipe_text(), "recipe.toml").value();
  const Layout layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
  Engine engine(Isa::kScalar, 1);
  const Timeline timeline(run, layout, engine);
  const int64_t k = 4;
  const State before = timeline.Seek(k - 1).value(), after = timeline.Seek(k).value();
  Journal journal, last;
  ASSERT_TRUE(run.ReadJournal(layout, k, 0, layout.shards(), &journal).ok());
  ASSERT_TRUE(run.ReadJournal(layout, k - 1, 0, layout.shards(), &last).ok());
  const auto gradient = [&](const Journal& from, int t) {
    return Elements(layout, t, [&](int shard) { return from.gradients[shard].data(); });
  };
  const std::vector<Json> lines = Lines({"--steps", "4..4", "--by", "tensor"});
  ASSERT_EQ(layout.tensors().size(), lines.size());
  for (int t = 0; t < std::ssize(layout.tensors()); ++t) {
    const Json& line = lines[t];
    const std::vector<float> g = gradient(journal, t), g0 = gradient(last, t),
                             m = Elements(layout, before, t, Component::kM),
                             v = Elements(layout, after, t, Component::kV),
                             p = Elements(layout, before, t, Component::kParameter);
    const std::vector<float> change =
        Difference(Elements(layout, after, t, Component::kParameter), p);
    const OptimizerRow& row = journal.optimizer.rows[t];
    EXPECT_EQ(layout.tensors()[t].name, line["of"]);
    EXPECT_NEAR(Dot(m, g) / Norm(m) / Norm(g), line["cos_m_g"].get<double>(), 1e-9);
    EXPECT_NEAR(Dot(g0, g) / Norm(g0) / Norm(g), line["cos_g_g"].get<double>(), 1e-9);
    const auto same = [](float a, float b) { return a * std::copysign(1.0f, b) > 0 && b != 0; };
    const auto signs = [&](const std::vector<float>& other) {
      return Share(g, [&](size_t i) { return same(g[i], other[i]); }) /
             Share(g, [&](size_t i) { return g[i] != 0 && other[i] != 0; });
    };
    EXPECT_NEAR(signs(g0), line["signs_g_g"], 1e-12);
    EXPECT_NEAR(signs(m), line["signs_m_g"], 1e-12);
    EXPECT_NEAR(Share(g, [&](size_t i) { return std::fabs(row.clip * g[i]) < row.eps; }),
                line["g_below_eps"], 1e-12);
    const double rms = Norm(change) / std::sqrt(static_cast<double>(p.size())) / row.lr;
    EXPECT_NEAR(rms, line["update_rms"].get<double>(), 2e-5 * rms);
    const double relative = Norm(change) / Norm(p);
    EXPECT_NEAR(relative, line["relative_update"].get<double>(), 2e-5 * relative);
    std::vector<double> ratios;
    for (size_t i = 0; i < g.size(); ++i) {
      const double clipped = row.clip * g[i];
      if (v[i] > 0) ratios.push_back(clipped * clipped / (v[i] / row.bias_correction2));
    }
    std::sort(ratios.begin(), ratios.end());
    const double median = ratios[(ratios.size() + 1) / 2 - 1];
    EXPECT_NEAR(median, line["ratio_q50"].get<double>(), 0.02 * median) << line["of"];
  }
}

// RUN@0 has no momentum, so nothing can be said of its signs.
TEST_F(Stats, SignsAreThoseOfElementsThatHaveOne) {
  const Json first = Lines({"--steps", "1..1"})[0];
  EXPECT_TRUE(first["cos_m_g"].is_null()) << first;
  EXPECT_TRUE(first["signs_m_g"].is_null()) << first;
  EXPECT_FALSE(Lines({"--steps", "2..2"})[0]["signs_m_g"].is_null());
}

TEST_F(Stats, GroupsAddUp) {
  for (const char* by : {"layer", "kind"}) {
    double share = 0, squares = 0;
    for (const Json& line : Lines({"--steps", "3..3", "--by", by})) {
      share += line["g_share"].get<double>();
      squares += line["p_norm"].get<double>() * line["p_norm"].get<double>();
    }
    EXPECT_NEAR(1, share, 1e-12) << by;
    const double norm = Lines({"--steps", "3..3"})[0]["p_norm"];
    EXPECT_NEAR(norm, std::sqrt(squares), 1e-9 * norm) << by;
  }
}

TEST_F(Stats, RowsOfTheEmbeddingAreRankedByGradient) {
  const std::vector<Json> rows = Lines({"--steps", "2..3", "--rows", "4"});
  ASSERT_EQ(8u, rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(i < 4 ? 2 : 3, rows[i]["update"]);
    if (i % 4 != 0) {
      EXPECT_GE(rows[i - 1]["g_norm"], rows[i]["g_norm"]);
    }
  }
  // All rows together are the tensor.
  double share = 0;
  for (const Json& row : Lines({"--steps", "3..3", "--rows", "1000000"})) {
    share += row["g_share"].get<double>();
  }
  EXPECT_NEAR(1, share, 1e-9);
}

TEST_F(Stats, ByReplayTellsOfPassesAndIsProven) {
  const std::vector<Json> updates = Lines({"--steps", "2..3", "--replay"});
  ASSERT_EQ(2u, updates.size());
  const RunReader run = RunReader::Open(run_).value();
  for (const Json& line : updates) {
    const UpdateRecord record = ParseRecord(run.history().Find(line["update"])->record).value();
    double sum = 0;
    for (int64_t i = 0; i < record.samples; ++i) {
      sum += line["loss_" + std::to_string(i)].get<double>();
    }
    EXPECT_NEAR(record.loss, sum / static_cast<double>(record.samples), 1e-5);
    EXPECT_LE(line["loss_least"], line["loss_most"]);
  }
  const std::vector<Json> layers = Lines({"--steps", "3..3", "--replay", "--by", "layer"});
  EXPECT_EQ("layer 0", layers[0]["of"]);
  for (const Json& layer : layers) EXPECT_GT(layer["gradient_norm"], 0);
}

TEST_F(Stats, ByReplayABranchHasTheRecipeThatWasInForce) {
  const std::string branch = *folder_ / "branch";
  ASSERT_EQ(0, RunProgram({"replay", run_, "--steps", "3..4", "--out", branch, "--threads", "1",
                           "--quiet", "--do", "attn-scale:1e-12@4"}).code);
  const Finished done = RunProgram({"stats", branch, "--json", "--replay", "--by", "layer"});
  ASSERT_EQ(0, done.code) << done.err;
  std::istringstream in(done.out);
  for (std::string line; std::getline(in, line);) {
    const Json json = Json::parse(line);
    EXPECT_EQ(json["update"] == 4, json["attention_logit"] < 1e-9) << line;
  }
}

TEST_F(Stats, TableAndCsvAndBadWords) {
  const Finished table = RunProgram({"stats", run_});
  EXPECT_EQ(0, table.code) << table.err;
  EXPECT_EQ(6, std::count(table.out.begin(), table.out.end(), '\n')) << table.out;
  const Finished csv = RunProgram({"stats", run_, "--csv", "--by", "layer"});
  EXPECT_EQ(0, csv.code) << csv.err;
  std::istringstream in(csv.out);
  std::string head, line;
  std::getline(in, head);
  EXPECT_TRUE(head.starts_with("update,of,clip,g_norm,")) << head;
  while (std::getline(in, line)) {
    EXPECT_EQ(std::count(head.begin(), head.end(), ','), std::count(line.begin(), line.end(), ','));
  }
  EXPECT_EQ(2, RunProgram({"stats", run_, "--only", "no.such.*"}).code);
  EXPECT_EQ(2, RunProgram({"stats", run_, "--steps", "70..80"}).code);
  EXPECT_EQ(2, RunProgram({"stats", run_, "--by", "head"}).code);
  EXPECT_EQ(2, RunProgram({"stats", run_, "--rows", "0"}).code);
  EXPECT_EQ(2, RunProgram({"stats", run_, "--replay", "--by", "tensor"}).code);
  EXPECT_EQ(2, RunProgram({"stats", run_, "--replay", "--by", "kind"}).code);
  EXPECT_EQ(2, RunProgram({"stats", *folder_ / "none"}).code);
}

}  // namespace
}  // namespace retrace
