// Golden chains: the digests of five updates of tiny recipes, committed for each numerics id in
// tests/data/golden/ID.json. A changed chain under the same id is a broken promise, because runs
// that carry that id could not be replayed any more.
//
// New chains are written by
//   RETRACE_UPDATE_GOLDEN=1 build/golden_test
// which adds chains and files, but never changes a chain of an id (core/NUMERICS.md, clause 17).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "core/version.h"
#include "replay/job.h"
#include "replay/solo_comm.h"
#include "tests/places.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int kUpdates = 5;

struct Chain {
  std::string recipe;  // RecipeDigest, so that another recipe is not taken for other bits
  std::vector<std::string> digests = {};  // of RUN@0 ... RUN@5
  std::vector<std::string> losses = {};   // of updates 1 ... 5, then of the evaluation batch, as %a

  bool operator==(const Chain&) const = default;
};
using Chains = std::map<std::string, Chain>;

std::string Hexadecimal(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%a", x);
  return text;
}

// examples/tiny.toml with overrides; the dataset's name in it is relative, as in the file.
Recipe GoldenRecipe(std::vector<std::string> overrides) {
  overrides.push_back("data.path=tests/data/dataset/tiny");
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", overrides).value();
}

Chain ChainOf(const Recipe& recipe, Probe* probe = nullptr) {
  Chain chain{.recipe = RecipeDigest(recipe).Hex()};
  Recipe here = recipe;
  here.data.path = TestData("dataset/tiny");
  SoloComm comm;
  Result<std::unique_ptr<Job>> made = Job::Make(here, comm, {});
  EXPECT_TRUE(made.ok()) << made.status().message();
  if (!made.ok()) return chain;
  Job& job = **made;
  job.set_probe(probe);
  EXPECT_TRUE(job.StartFresh().ok());
  chain.digests.push_back(job.StateDigestNow().value().Hex());
  std::vector<std::string> evaluation;
  for (int i = 0; i < kUpdates; ++i) {
    const Job::Step step = job.Advance().value();
    chain.digests.push_back(step.digest.Hex());
    chain.losses.push_back(Hexadecimal(step.result.record.loss));
    evaluation.push_back(Hexadecimal(step.result.record.evaluation_loss.value()));
  }
  chain.losses.insert(chain.losses.end(), evaluation.begin(), evaluation.end());
  return chain;
}

// Every policy, both attentions, one shard and eight; and what the two frameworks' presets change.
std::map<std::string, Recipe> GoldenRecipes() {
  std::map<std::string, Recipe> recipes;
  for (const std::string shards : {"1", "8"}) {
    const std::string topology = "topology.virtual_shards=" + shards;
    for (const std::string& policy : PrecisionPresets()) {
      for (const std::string attention : {"materialised", "blockwise"}) {
        recipes[policy + "/" + attention + "/V" + shards] =
            GoldenRecipe({topology, "precision.preset=" + policy, "model.attention=" + attention});
      }
      // Three attention blocks, and a window that ends within one.
      recipes[policy + "/blockwise-long/V" + shards] =
          GoldenRecipe({topology, "precision.preset=" + policy, "model.attention=blockwise",
                        "model.sliding_window=70", "data.sequence_length=150",
                        "data.micro_batch_size=1", "data.micro_batches=2"});
    }
    for (const std::string framework : {"automodel", "megatron"}) {
      // The split stays the file's: the small dataset has no validation part by the frameworks'.
      recipes[framework + "/bf16/V" + shards] = GoldenRecipe(
          {topology, "preset=" + framework, "precision.preset=bf16", "data.split=80,20,0"});
    }
  }
  return recipes;
}

Chains ComputeChains() {
  Chains chains;
  for (const auto& [name, recipe] : GoldenRecipes()) chains[name] = ChainOf(recipe);
  return chains;
}

nlohmann::json ToJson(const Chains& chains, const std::string& id) {
  nlohmann::json json = {{"numerics", id}};
  for (const auto& [name, chain] : chains) {
    json["chains"][name] = {
        {"recipe", chain.recipe}, {"digests", chain.digests}, {"losses", chain.losses}};
  }
  return json;
}

Chains FromJson(const nlohmann::json& json) {
  Chains chains;
  for (const auto& [name, chain] : json.at("chains").items()) {
    chains[name] = {chain.at("recipe"), chain.at("digests"), chain.at("losses")};
  }
  return chains;
}

// What is wrong with `computed`, one sentence each; empty where it is what `golden` says.
std::vector<std::string> Complaints(const Chains& golden, const Chains& computed,
                                    const std::string& id) {
  std::vector<std::string> complaints;
  for (const auto& [name, chain] : computed) {
    const auto at = golden.find(name);
    if (at == golden.end()) {
      complaints.push_back(name + ": no golden chain under " + id +
                           "; add it with RETRACE_UPDATE_GOLDEN=1 build/golden_test");
      continue;
    }
    if (at->second == chain) continue;
    if (at->second.recipe != chain.recipe) {
      complaints.push_back(name +
                           ": its recipe is another one than when the chain was written "
                           "(examples/tiny.toml, a preset or the set of keys changed); "
                           "RETRACE_UPDATE_GOLDEN=1 build/golden_test writes the new one");
      continue;
    }
    size_t k = 0;
    while (k < chain.digests.size() && k < at->second.digests.size() &&
           chain.digests[k] == at->second.digests[k]) {
      ++k;
    }
    const std::string where = k < chain.digests.size()
                                  ? "RUN@" + std::to_string(k) + " has other bits"
                                  : std::string("a loss has other bits");
    complaints.push_back(name + ": " + where + " than the same recipe had under " + id +
                         ". Runs made under this id can not be replayed any more. If the change is "
                         "meant, give kNumericsId (core/version.h) a new value, say what changed "
                         "under Numerics in CHANGELOG.md, and write the new id's chains with "
                         "RETRACE_UPDATE_GOLDEN=1 build/golden_test");
  }
  for (const auto& [name, chain] : golden) {
    if (!computed.contains(name)) complaints.push_back(name + ": golden, but not computed");
  }
  return complaints;
}

// The file after an update: chains of new names and new recipes. Errors: kUsage for a chain that
// would change under the same id.
Result<Chains> Updated(const Chains& golden, const Chains& computed, const std::string& id) {
  for (const auto& [name, chain] : computed) {
    const auto at = golden.find(name);
    if (at == golden.end() || at->second.recipe != chain.recipe || at->second == chain) continue;
    return UsageError("refused: " + Complaints({{name, at->second}}, {{name, chain}}, id)[0]);
  }
  return computed;
}

std::string GoldenPath(const std::string& id) { return TestData("golden/" + id + ".json"); }

Chains ReadGolden(const std::string& id) {
  std::ifstream in(GoldenPath(id));
  if (!in) return {};
  const nlohmann::json json = nlohmann::json::parse(in);
  EXPECT_EQ(id, json.at("numerics"));
  return FromJson(json);
}

TEST(Golden, ChainsAreThoseOfTheNumericsId) {
  const Chains golden = ReadGolden(kNumericsId), computed = ComputeChains();
  if (std::getenv("RETRACE_UPDATE_GOLDEN") != nullptr) {
    const Result<Chains> updated = Updated(golden, computed, kNumericsId);
    ASSERT_TRUE(updated.ok()) << updated.status().message();
    std::ofstream(GoldenPath(kNumericsId)) << ToJson(*updated, kNumericsId).dump(1) << "\n";
    return;
  }
  for (const std::string& complaint : Complaints(golden, computed, kNumericsId)) {
    ADD_FAILURE() << complaint;
  }
}

// Policies, orders and topologies that gave the same bits would make half of the chains idle. (But
// the order of FP64 sums is hidden by rounding the gradient to FP32: tests/numerics_test.cc looks
// at FP64 bits.)
TEST(Golden, NoTwoChainsAreTheSame) {
  std::map<std::string, std::string> names;  // by last digest
  const Chains golden = ReadGolden(kNumericsId);
  for (const auto& [name, chain] : golden) {
    if (name.starts_with("fp64/blockwise/")) continue;
    const auto [at, fresh] = names.emplace(chain.digests.back(), name);
    EXPECT_TRUE(fresh) << name << " and " << at->second;
  }
  EXPECT_EQ(GoldenRecipes().size(), golden.size());
}

// Turns over one bit of the first element of one op's output, once. (The lowest would be rounded
// away in the additions that follow.)
class BitFlip : public Probe {
 public:
  explicit BitFlip(std::string op) : op_(std::move(op)) {}
  void Op(const std::string& name, const float* data, int64_t, int64_t) override {
    if (name != op_ || flipped_) return;
    flipped_ = true;
    reinterpret_cast<uint32_t&>(const_cast<float&>(data[0])) ^= 1u << 12;
  }
  void Op(const std::string&, const double*, int64_t, int64_t) override {}
  bool flipped() const { return flipped_; }

 private:
  std::string op_;
  bool flipped_ = false;
};

TEST(Golden, OneFlippedBitOfOneOpIsAChangedChain) {
  const Recipe recipe = GoldenRecipes().at("fp32/materialised/V8");
  BitFlip flip("mb1/layer2/o_proj");
  const Chains computed = {{"x", ChainOf(recipe, &flip)}};
  ASSERT_TRUE(flip.flipped());
  const Chains golden = {{"x", ReadGolden(kNumericsId).at("fp32/materialised/V8")}};
  const std::vector<std::string> complaints = Complaints(golden, computed, "some-id");
  ASSERT_EQ(1u, complaints.size());
  for (const char* part :
       {"x: RUN@1 has other bits", "some-id", "core/version.h", "CHANGELOG.md"}) {
    EXPECT_NE(std::string::npos, complaints[0].find(part)) << complaints[0];
  }
}

TEST(Golden, AnUpdateAddsChainsButChangesNone) {
  const Chain one{"r1", {"a", "b"}, {"l"}};
  Chain changed = one, of_another_recipe = one;
  changed.losses = {"m"};
  of_another_recipe.recipe = "r2";
  of_another_recipe.digests = {"c", "d"};
  EXPECT_TRUE(Updated({}, {{"x", one}}, "id").ok());
  EXPECT_TRUE(Updated({{"x", one}}, {{"x", one}, {"y", changed}}, "id").ok());
  EXPECT_TRUE(Updated({{"x", one}}, {{"x", of_another_recipe}}, "id").ok());
  const Result<Chains> refused = Updated({{"x", one}}, {{"x", changed}}, "id");
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(std::string::npos, refused.status().message().find("x: a loss has other bits"))
      << refused.status().message();
  EXPECT_EQ(2u, Complaints({{"x", one}}, {{"y", one}}, "id").size());
}

TEST(Golden, FilesReadBackToWhatWasWritten) {
  const Chains chains = {{"x", {"r", {"a"}, {"0x1p+0"}}}, {"y", {"s", {"b", "c"}, {}}}};
  EXPECT_EQ(chains, FromJson(nlohmann::json::parse(ToJson(chains, "id").dump(1))));
}

}  // namespace
}  // namespace retrace
