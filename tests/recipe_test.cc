#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/nearest_name.h"
#include "core/recipe_check.h"
#include "core/recipe_toml.h"
#include "tests/places.h"

namespace retrace {
namespace {

using Overrides = std::vector<std::string>;

std::string SourcePath(const std::string& name) {
  return SourceDir() + "/" + name;
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

Recipe Example(const std::string& name, const Overrides& overrides = {}) {
  const auto recipe = LoadRecipe(SourcePath("examples/" + name), overrides);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.value();
}

Recipe Tiny(const Overrides& overrides = {}) { return Example("tiny.toml", overrides); }

// The smallest recipe there is: the required keys alone.
constexpr const char* kSmallest = R"(steps = 1
[model]
vocab_size = 64
hidden_size = 8
intermediate_size = 8
layers = 2
query_heads = 2
kv_heads = 1
head_dim = 4
sliding_window = 4
[data]
path = "data/x"
sequence_length = 8
)";

Recipe Smallest(const std::string& top = "", const std::string& bottom = "",
                const Overrides& overrides = {}) {
  const auto recipe = ParseRecipe(top + kSmallest + bottom, "smallest.toml", overrides);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.ok() ? recipe.value() : Tiny();
}

std::string Refused(const Result<Recipe>& result) {
  EXPECT_FALSE(result.ok());
  if (result.ok()) return "";
  EXPECT_EQ(StatusCode::kUsage, result.status().code());
  return result.status().message();
}

void ExpectHas(const std::string& text, const std::string& part) {
  EXPECT_NE(std::string::npos, text.find(part)) << "\"" << part << "\" not in: " << text;
}

std::vector<std::string> ExampleNames() {  // of recipes; experiments lie there too
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(SourcePath("examples"))) {
    if (entry.path().extension() != ".toml") continue;
    const std::string name = entry.path().filename();
    if (ReadText(SourcePath("examples/" + name)).find("[[arm]]") == std::string::npos) names.push_back(name);
  }
  return names;
}

// ---- Text and back ----

TEST(Recipe, CanonicalTextOfEveryExampleReadsBackToItself) {
  ASSERT_GE(ExampleNames().size(), 5u);
  for (const std::string& name : ExampleNames()) {
    const Recipe recipe = Example(name);
    const std::string text = PrintRecipe(recipe);
    const auto again = ParseRecipe(text, "resolved.toml");
    ASSERT_TRUE(again.ok()) << name << ": " << again.status().message();
    EXPECT_EQ(text, PrintRecipe(*again)) << name;
    EXPECT_EQ(RecipeDigest(recipe), RecipeDigest(*again)) << name;
    EXPECT_TRUE(DiffRecipes(recipe, *again).empty()) << name;
    EXPECT_TRUE(recipe.precision == again->precision) << name;
  }
}

TEST(Recipe, CanonicalTextHasEveryKeyThatIsNotInputOnly) {
  const std::string text = "\n" + PrintRecipe(Tiny());
  for (const RecipeKey& key : RecipeKeys()) {
    const std::string tail = key.name.substr(key.name.find('.') + 1);  // npos + 1 is 0
    const bool there = text.find("\n" + tail + " = ") != std::string::npos ||
                       text.find("\n\"" + tail + "\" = ") != std::string::npos;
    EXPECT_EQ(!key.input_only && !key.quiet, there) << key.name;
  }
}

// So a key that a newer program knows leaves the digests of older recipes alone.
TEST(Recipe, AQuietKeyStandsInTheTextOnlyWhereItIsNotTheDefault) {
  const std::string text = PrintRecipe(Tiny());
  EXPECT_EQ(text, PrintRecipe(Tiny({"optimizer.clip_scope=global", "optimizer.freeze=[]"})));
  const std::string other =
      PrintRecipe(Tiny({"optimizer.freeze=[\"*,norm=counted,moments=stay\"]"}));
  ExpectHas(other, "freeze = [\"*,norm=counted,moments=stay\"]\n");
  EXPECT_EQ(other, PrintRecipe(ParseRecipe(other, "resolved.toml").value()));
}

// Every key can be set, to a value other than the one it has, and reads back; no other key moves.
TEST(Recipe, EachKeyIsSetAloneAndChangesTheCanonicalTextThere) {
  const Recipe first = Smallest("", "micro_batches = 4\n");
  const std::string start = PrintRecipe(first);
  std::set<std::string> moved;
  for (const RecipeKey& key : RecipeKeys()) {
    if (key.input_only) continue;
    Overrides tries;
    for (const std::string& choice : key.choices) tries.push_back(choice);
    for (const char* value : {"true", "false", "2", "16", "0.5", "1e-5", "7", "50", "\"other\"",
                              "\"9,1,0\"", "[0, 4]", "[0.5, 0.25]", "[\"full\", \"sliding\"]",
                              "\"*.mlp.*\"", "\"0123456789abcdef0123456789abcdef\"",
                              "[\"*.mlp.*,norm=left-out,moments=move\"]"}) {
      tries.push_back(value);
    }
    for (const std::string& value : tries) {
      const auto changed = ParseRecipe(start, "start.toml", {key.name + "=" + value});
      if (!changed.ok()) continue;
      const auto differences = DiffRecipes(first, *changed);
      if (differences.empty()) continue;
      EXPECT_EQ(1u, differences.size()) << key.name << "=" << value;
      EXPECT_EQ(key.name, differences[0].key);
      EXPECT_NE(start, PrintRecipe(*changed));
      moved.insert(key.name);
      break;
    }
  }
  // model.layers is tied to model.layer_types and can not move alone.
  for (const RecipeKey& key : RecipeKeys()) {
    EXPECT_TRUE(key.input_only || moved.contains(key.name) || key.name == "model.layers")
        << key.name;
  }
}

TEST(Recipe, DoublesSurviveBitForBit) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 300; ++i) {
    const double value = std::ldexp(static_cast<double>(random() >> 11) + 1, -60 - i % 60);
    Recipe recipe = Tiny();
    recipe.optimizer.eps = value;
    ASSERT_TRUE(CheckRecipe(recipe).ok()) << value;
    const auto again = ParseRecipe(PrintRecipe(recipe), "resolved.toml");
    ASSERT_TRUE(again.ok());
    EXPECT_EQ(value, again->optimizer.eps);
  }
}

TEST(Recipe, TextWithQuotesAndOtherAlphabetsSurvives) {
  Recipe recipe = Tiny();
  recipe.name = "a \"b\" \\ c # d = \xce\xb5 \xf0\x9f\x8c\x80";
  const auto again = ParseRecipe(PrintRecipe(recipe), "resolved.toml");
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(recipe.name, again->name);
}

TEST(Recipe, NegativeZeroIsZero) {
  EXPECT_EQ(PrintRecipe(Tiny({"schedule.initial=0"})),
            PrintRecipe(Tiny({"schedule.initial=-0.0"})));
}

// ---- Digest and difference ----

TEST(Recipe, DigestCoversEveryKeyButThoseOfStoreAndExecution) {
  const Recipe tiny = Tiny();
  for (const char* same : {"store.window=[2, 3]", "store.every=5", "store.keyframe_every=2",
                           "execution.recompute_activations=true"}) {
    EXPECT_EQ(RecipeDigest(tiny), RecipeDigest(Tiny({same}))) << same;
    EXPECT_EQ(1u, DiffRecipes(tiny, Tiny({same})).size()) << same;
  }
  for (const char* other :
       {"name=x", "steps=11", "data.seed=7", "init.seed=7", "optimizer.eps=1e-7",
        "precision.scores.grad=bf16", "topology.virtual_shards=4",
        "schedule.indexing=step-minus-one", "model.layer_scalar=1"}) {
    EXPECT_NE(RecipeDigest(tiny), RecipeDigest(Tiny({other}))) << other;
  }
}

TEST(Recipe, DifferenceNamesTheKeysWithBothValues) {
  const auto differences =
      DiffRecipes(Tiny(), Tiny({"optimizer.eps=1e-5", "precision.softmax=bf16"}));
  ASSERT_EQ(2u, differences.size());
  EXPECT_EQ("optimizer.eps", differences[0].key);
  EXPECT_EQ("1e-08", differences[0].a);
  EXPECT_EQ("1e-05", differences[0].b);
  EXPECT_EQ("precision.softmax", differences[1].key);
  EXPECT_EQ("\"bf16\"", differences[1].b);
}

// ---- Refusals ----

struct BadLine {
  const char* bad;  // replaces `good` in the smallest recipe, or is appended where `good` is empty
  const char* good;
  std::vector<const char*> parts;
};

TEST(Recipe, RefusalsNamePlaceKeyExpectedGotAndNearest) {
  const BadLine lines[] = {
      {"vocab_sizes = 64",
       "vocab_size = 64",
       {"bad.toml:3:1", "unknown key \"model.vocab_sizes\"", "nearest is model.vocab_size"}},
      {"layers = \"2\"",
       "layers = 2",
       {"bad.toml:6:10", "model.layers", "expected an integer in 1 .. 1024", "got \"2\" (text)"}},
      {"layers = 2.0", "layers = 2", {"bad.toml:6:10", "got 2.0 (real)"}},
      {"layers = 0", "layers = 2", {"bad.toml:6:10", "1 .. 1024", "got 0"}},
      {"layers = true", "layers = 2", {"got true (boolean)"}},
      {"layers = [2]", "layers = 2", {"got [2] (list of integers)"}},
      {"layers = 2024-01-01", "layers = 2", {"bad.toml:6:10", "got a date or time"}},
      {"layers = {}", "layers = 2", {"model.layers", "unknown key", ""}},
      {"", "layers = 2\n", {"bad.toml: model.layers: missing", "expected an integer"}},
      {"layers = 2\nlayers = 3", "layers = 2", {"bad.toml:7:"}},
      {"layers = ", "layers = 2", {"bad.toml:6:", "not TOML"}},
      {"head_dim = 3", "head_dim = 4", {"bad.toml:9:12", "model.head_dim", "even", "got 3"}},
      {"kv_heads = 3",
       "kv_heads = 1",
       {"bad.toml:8:12", "model.kv_heads", "divisor of model.query_heads = 2", "got 3"}},
      {"sliding_window = 0", "sliding_window = 4", {"model.sliding_window", "got 0"}},
      {"sequence_length = 0", "sequence_length = 8", {"data.sequence_length", "got 0"}},
      {"steps = 0", "steps = 1", {"bad.toml:1:9", "steps"}},
      {"path = \"a\\u0000b\"", "path = \"data/x\"", {"data.path", "control"}},
      {"path = \"\"", "path = \"data/x\"", {"data.path", "prefix"}},
      {"\n[modle]\nx = 1", "", {"unknown section \"modle\"", "nearest is model"}},
      {"\n[optimizer]\nbeta1 = 1.0", "", {"optimizer.beta1", ">= 0.0 and < 1.0", "got 1.0"}},
      {"\n[optimizer]\nbeta2 = nan", "", {"optimizer.beta2", "got nan"}},
      {"\n[optimizer]\neps = 0.0", "", {"optimizer.eps", "got 0.0"}},
      {"\n[optimizer]\nfreeze = [\"*,norm=count,moments=stay\"]", "",
       {"optimizer.freeze", "norm=counted|left-out"}},
      {"\n[optimizer]\nfreeze = [\"*.mpl.*,norm=counted,moments=stay\"]", "",
       {"optimizer.freeze", "no tensor matches"}},
      {"\n[optimizer]\ndecay_only = \"*.mpl.*\"", "", {"optimizer.decay_only", "the nearest is"}},
      {"\n[schedule]\npeak = 1e38", "", {"schedule.peak", ">= 0.0 and <= 1e+30"}},
      {"\n[optimizer]\nclip = inf", "", {"optimizer.clip", "got inf"}},
      {"\n[optimizer]\ndecay_on = \"matrixes\"",
       "",
       {"one of all, matrices", "nearest is \"matrices\""}},
      {"\n[schedule]\nwarmup_steps = 100", "", {"schedule.warmup_steps", "total_steps = 100"}},
      {"\n[schedule]\npeak = 1e-6", "", {"schedule.minimum", "at most schedule.peak"}},
      {"\n[schedule]\ninitial = 1", "", {"schedule.initial", "at most schedule.peak"}},
      {"\n[topology]\nvirtual_shards = 3", "", {"topology.virtual_shards", "power of two"}},
      {"\n[topology]\nvirtual_shards = 4", "", {"must divide model.query_heads = 2"}},
      {"\n[topology]\nlanes = 2", "", {"topology.lanes", "divisor of data.micro_batches = 1"}},
      {"\n[precision]\nsofmax = \"fp32\"", "", {"nearest is precision.softmax"}},
      {"\n[precision]\n\"scores.gard\" = \"fp32\"", "", {"nearest is precision.scores.grad"}},
      {"\n[precision]\nscores = \"fp16\"", "", {"precision.scores", "one of bf16, fp32, fp64"}},
      {"\n[precision]\nscores = \"fp64\"", "", {"all or nothing", "precision.scores = fp64"}},
      {"\n[precision]\nscores = {}", "", {"precision.scores", "got a table"}},
      {"\n[precision]\npreset = \"bf8\"", "", {"precision.preset", "nearest is \"bf16\""}},
      {"\n[store]\nwindow = [3]", "", {"store.window", "got [3]"}},
      {"\n[store]\nwindow = [3, 2]", "", {"store.window", "got [3, 2]"}},
      {"\n[init]\nseed = -1", "", {"init.seed", "got -1"}},
      {"split = \"99,1\"", "", {"data.split", "three weights"}},
      {"split = \"0,1,1\"", "", {"data.split", "first positive"}},
      {"split = \"99,-1,0\"", "", {"data.split"}},
      {"split = \"99,nan,0\"", "", {"data.split"}},
      {"split = \"99,0,1\"\nevaluation_samples = 4", "", {"data.split", "validation part"}},
  };
  for (const BadLine& line : lines) {
    std::string text = kSmallest;
    const std::string good = line.good;
    if (good.empty()) {
      text += line.bad;
    } else {
      ASSERT_NE(std::string::npos, text.find(good)) << good;
      text.replace(text.find("\n" + good) == std::string::npos ? text.find(good)
                                                               : text.find("\n" + good) + 1,
                   good.size(), line.bad);
    }
    SCOPED_TRACE(line.bad);
    const std::string message = Refused(ParseRecipe(text, "bad.toml"));
    if (std::string(line.bad) == "layers = {}") {
      ExpectHas(message, "bad.toml:6:10: model.layers");
      continue;
    }
    ExpectHas(message, "bad.toml");
    for (const char* part : line.parts) ExpectHas(message, part);
  }
}

TEST(Recipe, ModelRulesAreChecked) {
  const auto refused = [](const char* override_text) {
    return Refused(LoadRecipe(SourcePath("examples/tiny.toml"), {override_text}));
  };
  ExpectHas(refused("model.global_head_dim=7"), "model.global_head_dim: expected an even number");
  ExpectHas(refused("model.global_kv_heads=3"), "model.global_kv_heads");
  ExpectHas(refused("model.full_partial_rotary_factor=0"), "> 0.0 and <= 1.0");
  ExpectHas(refused("model.full_partial_rotary_factor=1.5"), "> 0.0 and <= 1.0");
  ExpectHas(refused("model.layer_scalar=[1, 1, 1]"),
            "one entry per layer, model.layers = 4, got 3");
  ExpectHas(refused("model.layer_scalar=[1]"), "one entry per layer");
  ExpectHas(refused("model.layer_scalar=[]"), "one entry per layer");
  ExpectHas(refused("model.layer_types=[\"full\"]"), "one entry per layer");
  ExpectHas(refused("model.layer_types=[\"ful\", \"full\"]"), "nearest is \"full\"");
  ExpectHas(refused("model.pad_token_id=512"), "less than model.vocab_size = 512");
  ExpectHas(refused("model.pad_token_id=-1"), "needs a pad token");
  ExpectHas(refused("model.vocab_size=516"), "must divide model.vocab_size = 516");
  ExpectHas(refused("model.intermediate_size=60"), "must divide model.intermediate_size = 60");
  ExpectHas(refused("data.micro_batches=3"), "topology.lanes");
}

TEST(Recipe, SizesWhoseProductsOverflowAreRefused) {
  const char* const kLargest = "2147483647";
  for (const Overrides& overrides :
       {Overrides{std::string("model.hidden_size=") + kLargest, "model.layers=1024",
                  "model.layer_scalar=1", "model.query_heads=65536", "model.head_dim=65536"},
        Overrides{std::string("model.hidden_size=") + kLargest,
                  "model.intermediate_size=2147483640", "model.layers=1024",
                  "model.layer_scalar=1"},
        Overrides{std::string("model.hidden_size=") + kLargest, "model.vocab_size=2147483640"},
        Overrides{"steps=1099511627776", "data.micro_batch_size=1048576",
                  "data.micro_batches=1048576", "data.sequence_length=16777216"},
        Overrides{"data.micro_batch_size=1048576", "data.sequence_length=16777216",
                  "model.vocab_size=2147483640"}}) {
    ExpectHas(Refused(LoadRecipe(SourcePath("examples/tiny.toml"), overrides)), "exceed 2^56");
  }
}

TEST(Recipe, RecipeMadeInMemoryIsCheckedToo) {
  EXPECT_TRUE(CheckRecipe(Tiny()).ok());
  Recipe recipe = Tiny();
  recipe.optimizer.eps = std::numeric_limits<double>::quiet_NaN();
  ExpectHas(CheckRecipe(recipe).message(), "optimizer.eps");
  Recipe empty;
  empty.precision = recipe.precision;
  EXPECT_EQ(StatusCode::kUsage, CheckRecipe(empty).code());
}

TEST(Recipe, MissingAndOverlongFilesAreRefused) {
  ExpectHas(Refused(LoadRecipe(SourcePath("examples/none.toml"))), "examples/none.toml");
  ExpectHas(Refused(LoadRecipe(SourcePath("examples"))), "examples");
  ExpectHas(Refused(ParseRecipe(std::string(2 << 20, ' '), "long.toml")), "1 MiB");
  ExpectHas(Refused(ParseRecipe("", "empty.toml")), "empty.toml: steps: missing");
}

// ---- Overrides ----

TEST(Recipe, OverridesWinOverTheFileAndTheLastOfSeveralCounts) {
  EXPECT_EQ(7u, Tiny({"data.seed=7"}).data.seed);
  EXPECT_EQ(8u, Tiny({"data.seed=7", " data.seed = 8 "}).data.seed);
  EXPECT_EQ("a b", Tiny({"name=a b"}).name);
  EXPECT_EQ("a b", Tiny({"name=\"a b\""}).name);
  EXPECT_EQ("x=y", Tiny({"data.path=x=y"}).data.path);
  EXPECT_EQ("99,1,0", Tiny({"data.split=99,1,0"}).data.split);
  EXPECT_EQ(4, Tiny({"store.window=[4, 6]"}).store.window_first);
  EXPECT_EQ(-1, Tiny({"store.window=[]"}).store.window_last);
  EXPECT_EQ(std::vector<double>(4, 0.5), Tiny({"model.layer_scalar=0.5"}).model.layer_scalar);
  EXPECT_EQ(1.0, Tiny({"optimizer.clip=1"}).optimizer.clip);
  EXPECT_TRUE(Tiny({"execution.recompute_activations=true"}).execution.recompute_activations);
}

TEST(Recipe, OverridesAreCheckedLikeTheFile) {
  const auto refused = [](const std::string& text) {
    return Refused(LoadRecipe(SourcePath("examples/tiny.toml"), {text}));
  };
  ExpectHas(refused("data.sed=7"),
            "override \"data.sed=7\": unknown key \"data.sed\"; the nearest is "
            "data.seed");
  ExpectHas(refused("vocab_size=7"), "nearest is model.vocab_size");
  ExpectHas(refused("data.seed"), "expected KEY=VALUE");
  ExpectHas(refused("=3"), "unknown key \"\"");
  ExpectHas(refused("data.seed=-1"), "override \"data.seed=-1\": data.seed: expected an integer");
  ExpectHas(refused("data.seed="), "not one TOML value");
  ExpectHas(refused("data.seed=seven"), "not one TOML value");
  ExpectHas(refused("data.seed=7\nother=8"), "not one TOML value");
  ExpectHas(refused("model.qk_norm=1"), "true or false");
  ExpectHas(refused("model.head_dim=5"), "override \"model.head_dim=5\": model.head_dim");
  ExpectHas(refused("name=\xff\xfe"), "not one TOML value");
  ExpectHas(refused("name=\"a"), "not one TOML value");
}

TEST(Recipe, PatternAndListOfLayerKindsTakeEachOthersPlace) {
  using K = LayerKind;
  EXPECT_EQ((std::vector<K>{K::kSliding, K::kFull, K::kSliding, K::kFull}),
            Tiny().model.layer_types);
  EXPECT_EQ((std::vector<K>{K::kSliding, K::kSliding, K::kFull, K::kFull}),
            Tiny({"model.full_attention_every=3"}).model.layer_types);
  EXPECT_EQ(
      (std::vector<K>{K::kSliding, K::kSliding, K::kFull, K::kSliding}),
      Tiny({"model.full_attention_every=3", "model.last_layer_full=false"}).model.layer_types);
  EXPECT_EQ(
      std::vector<K>(4, K::kSliding),
      Tiny({"model.full_attention_every=0", "model.last_layer_full=false"}).model.layer_types);
  EXPECT_EQ(
      (std::vector<K>{K::kFull, K::kSliding, K::kSliding, K::kFull}),
      Tiny({"model.layer_types=[\"full\", \"sliding\", \"sliding\", \"full\"]"}).model.layer_types);
  // On a resolved recipe a pattern replaces the list, rather than being without effect.
  const auto changed = ParseRecipe(PrintRecipe(Tiny()), "r.toml", {"model.full_attention_every=1"});
  ASSERT_TRUE(changed.ok()) << changed.status().message();
  EXPECT_EQ(std::vector<K>(4, K::kFull), changed->model.layer_types);
  const std::string both =
      "model.layer_types = [\"full\", \"full\"]\nmodel.last_layer_full = true\n";
  ExpectHas(Refused(ParseRecipe(both + kSmallest, "both.toml")), "both.toml");
  ExpectHas(Refused(LoadRecipe(SourcePath("examples/tiny.toml"),
                               {"model.layer_types=[\"full\", \"full\", \"full\", \"full\"]",
                                "model.last_layer_full=true"})),
            "remove one of them");
}

// ---- Defaults and presets ----

TEST(Recipe, WhatIsLeftOutHasItsDefault) {
  const Recipe recipe = Smallest();
  EXPECT_EQ(recipe.model.kv_heads, recipe.model.global_kv_heads);
  EXPECT_EQ(recipe.model.head_dim, recipe.model.global_head_dim);
  EXPECT_EQ(std::vector<double>(2, 1.0), recipe.model.layer_scalar);
  EXPECT_EQ((std::vector<LayerKind>{LayerKind::kSliding, LayerKind::kFull}),
            recipe.model.layer_types);
  EXPECT_TRUE(recipe.precision == PrecisionPreset("fp32").value());
  EXPECT_EQ(1e-6, recipe.model.rms_norm_eps);
  EXPECT_EQ(1234u, recipe.init.seed);
}

TEST(Recipe, FrameworkPresetsSetWhatDiffersBetweenTheFrameworks) {
  const std::string bf16 = "[precision]\npreset = \"bf16\"\n";
  const Recipe am = Smallest("preset = \"automodel\"\n", bf16);
  EXPECT_EQ(EmbedScaleRounding::kBf16, am.model.embed_scale_rounding);
  EXPECT_FALSE(am.model.pad_lookup_gradient);
  EXPECT_TRUE(am.init.zero_pad_row);
  EXPECT_EQ(InitScheme::kHf, am.init.scheme);
  EXPECT_EQ(0.1, am.optimizer.weight_decay);
  EXPECT_EQ(DecayOn::kAll, am.optimizer.decay_on);
  EXPECT_EQ(LossDivision::kStepTokens, am.optimizer.loss_division);
  EXPECT_EQ(0.1 * 3e-4, am.schedule.initial);
  EXPECT_EQ("900,50,50", am.data.split);
  EXPECT_EQ(Format::kFp32, am.precision.partials);
  const Recipe mb = Smallest("preset = \"megatron\"\n", bf16);
  EXPECT_EQ(EmbedScaleRounding::kNone, mb.model.embed_scale_rounding);
  EXPECT_TRUE(mb.model.pad_lookup_gradient);
  EXPECT_FALSE(mb.init.zero_pad_row);
  EXPECT_EQ(InitScheme::kResidualScaled, mb.init.scheme);
  EXPECT_EQ(0.033, mb.optimizer.weight_decay);
  EXPECT_EQ(DecayOn::kMatrices, mb.optimizer.decay_on);
  EXPECT_EQ(LossDivision::kPerMicroBatch, mb.optimizer.loss_division);
  EXPECT_EQ(0.0, mb.schedule.initial);
  EXPECT_EQ("9999,8,2", mb.data.split);
  EXPECT_EQ(Format::kBf16, mb.precision.partials);
  for (const Recipe& recipe : {am, mb}) {
    EXPECT_EQ(LrIndexing::kStepMinusOne, recipe.schedule.indexing);
    EXPECT_TRUE(recipe.model.rope_angle_fp32);
  }
}

TEST(Recipe, FrameworkPresetsRoundToBf16OnlyWhereTheRunIsBf16) {
  for (const std::string precision : {"fp32", "fp64"}) {
    const std::string section = "[precision]\npreset = \"" + precision + "\"\n";
    for (const char* preset : {"preset = \"automodel\"\n", "preset = \"megatron\"\n"}) {
      const Recipe recipe = Smallest(preset, section);
      EXPECT_EQ(EmbedScaleRounding::kNone, recipe.model.embed_scale_rounding);
      EXPECT_TRUE(recipe.precision == PrecisionPreset(precision).value()) << precision;
    }
  }
}

TEST(Recipe, KeysOfTheFileWinOverThePresetAndThePrintedRecipeIsResolved) {
  const Recipe recipe = Smallest("preset = \"megatron\"\n",
                                 "[optimizer]\nweight_decay = 0.2\n[precision]\npreset = \"bf16\"\n"
                                 "softmax = \"fp32\"\n\"scores.grad\" = \"fp32\"\n");
  EXPECT_EQ(0.2, recipe.optimizer.weight_decay);
  EXPECT_EQ(DecayOn::kMatrices, recipe.optimizer.decay_on);
  EXPECT_EQ(Format::kFp32, recipe.precision.Forward(Point::kSoftmax));
  EXPECT_EQ(Format::kBf16, recipe.precision.Gradient(Point::kSoftmax));
  EXPECT_EQ(Format::kFp32, recipe.precision.Gradient(Point::kScores));
  EXPECT_EQ(Format::kBf16, recipe.precision.Forward(Point::kScores));
  EXPECT_EQ(std::string::npos, PrintRecipe(recipe).find("preset"));
}

TEST(Recipe, PresetOverridesTakeEffectOnAResolvedRecipe) {
  const std::string bf16 = "[precision]\npreset = \"bf16\"\n";
  const Recipe am = Smallest("preset = \"automodel\"\n", bf16);
  const Recipe mb = Smallest("preset = \"megatron\"\n", bf16);
  const std::string resolved = PrintRecipe(am);
  const auto to_mb = ParseRecipe(resolved, "r.toml", {"preset=megatron"});
  ASSERT_TRUE(to_mb.ok()) << to_mb.status().message();
  EXPECT_EQ(PrintRecipe(mb), PrintRecipe(*to_mb));
  const auto to_fp32 =
      ParseRecipe(resolved, "r.toml", {"precision.rope=bf16", "precision.preset=fp32"});
  ASSERT_TRUE(to_fp32.ok()) << to_fp32.status().message();
  PrecisionPolicy expected = PrecisionPreset("fp32").value();
  ASSERT_TRUE(SetPrecision("rope", "bf16", &expected).ok());
  EXPECT_TRUE(expected == to_fp32->precision) << "a single point wins over the preset";
}

// ---- Examples ----

TEST(Recipe, ExamplesHaveTheParametersThatTheirCommentsClaim) {
  const auto parameters = [](const char* name) {
    const Recipe recipe = Example(name);
    return Layout::Make(recipe.model, recipe.topology.virtual_shards).value().parameters();
  };
  EXPECT_EQ(30'697'345'280, parameters("gemma4_31b.toml"));
  EXPECT_EQ(5'373'824, parameters("bench_spike.toml"));
  EXPECT_EQ(128'620'800, parameters("bench_100m.toml"));
}

TEST(Recipe, DemoIsTheSpikeBenchmarkWithTwoQueryHeadsAndTwoShards) {
  std::vector<std::string> keys;
  for (const auto& difference : DiffRecipes(Example("bench_spike.toml"), Example("demo.toml"))) {
    keys.push_back(difference.key);
  }
  EXPECT_EQ(
      (std::vector<std::string>{"name", "steps", "model.query_heads", "data.evaluation_samples",
                                "topology.virtual_shards", "store.window"}),
      keys);
}

TEST(Recipe, BothFrameworksReadTheReportsConfiguration) {
  const Recipe am = Example("gemma4_31b.toml"),
               mb = Example("gemma4_31b.toml", {"preset=megatron"});
  std::set<std::string> keys;
  for (const auto& difference : DiffRecipes(am, mb)) keys.insert(difference.key);
  EXPECT_EQ((std::set<std::string>{"model.embed_scale_rounding", "model.pad_lookup_gradient",
                                   "init.scheme", "init.zero_pad_row", "data.split",
                                   "optimizer.weight_decay", "optimizer.decay_on",
                                   "optimizer.loss_division", "precision.partials"}),
            keys);
  EXPECT_EQ(0.0, mb.schedule.initial);
  EXPECT_EQ(0.0, am.schedule.initial);
}

// ---- Documentation ----

// To regenerate: RETRACE_UPDATE_DOCS=1 build/recipe_test --gtest_filter='*ReferencePage*'
TEST(Recipe, ReferencePageIsUpToDate) {
  const std::string path = SourcePath("docs/recipe.md");
  if (std::getenv("RETRACE_UPDATE_DOCS") != nullptr) std::ofstream(path) << RecipeReference();
  EXPECT_EQ(RecipeReference(), ReadText(path));
}

TEST(Recipe, EveryKeyIsDocumented) {
  const std::string page = ReadText(SourcePath("docs/recipe.md"));
  std::set<std::string> names;
  for (const RecipeKey& key : RecipeKeys()) {
    EXPECT_TRUE(names.insert(key.name).second) << key.name << " is listed twice";
    EXPECT_FALSE(key.doc.empty()) << key.name;
    EXPECT_EQ(key.required, key.default_value.empty() && key.name != "name") << key.name;
    ExpectHas(page, "| `" + key.name + "`");
  }
}

TEST(NearestName, IsTheOneWithTheFewestEdits) {
  const std::vector<std::string> names = {"model.layers", "model.head_dim", "data.path"};
  EXPECT_EQ("model.layers", NearestName("model.layer", names));
  EXPECT_EQ("model.head_dim", NearestName("headdim", names));
  EXPECT_EQ("data.path", NearestName("model.path", names));
  EXPECT_FALSE(NearestName(std::string(1 << 20, 'x'), names).empty());
}

// ---- Hostile input ----

// Whatever comes in, a recipe or a kUsage error comes out, and a recipe reads back to itself.
void ExpectSurvives(const std::string& text) {
  const auto recipe = ParseRecipe(text, "fuzz.toml");
  if (!recipe.ok()) {
    ASSERT_EQ(StatusCode::kUsage, recipe.status().code());
    ASSERT_TRUE(recipe.status().message().starts_with("fuzz.toml")) << recipe.status().message();
    return;
  }
  const std::string printed = PrintRecipe(*recipe);
  const auto again = ParseRecipe(printed, "printed.toml");
  ASSERT_TRUE(again.ok()) << again.status().message() << "\nfrom:\n" << text;
  ASSERT_EQ(printed, PrintRecipe(*again));
}

TEST(RecipeFuzz, EveryTruncationIsRefusedOrARecipe) {
  for (const std::string& text :
       {ReadText(SourcePath("examples/tiny.toml")), PrintRecipe(Tiny())}) {
    for (size_t length = 0; length <= text.size(); ++length) {
      ASSERT_NO_FATAL_FAILURE(ExpectSurvives(text.substr(0, length))) << length;
    }
  }
}

TEST(RecipeFuzz, EveryByteChangedIsRefusedOrARecipe) {
  std::string text = PrintRecipe(Tiny());
  for (size_t at = 0; at < text.size(); ++at) {
    const char before = text[at];
    for (char byte : {'9', '"', '\n', static_cast<char>(before ^ (1 << at % 8))}) {
      text[at] = byte;
      ASSERT_NO_FATAL_FAILURE(ExpectSurvives(text)) << at;
    }
    text[at] = before;
  }
}

TEST(RecipeFuzz, RandomSplicesAreRefusedOrRecipes) {
  std::mt19937 random(11);
  const std::string tiny = PrintRecipe(Tiny());
  for (int round = 0; round < 1500; ++round) {
    std::string text = tiny;
    for (int edit = 0; edit < 3; ++edit) {
      const size_t from = random() % text.size(), count = random() % 40,
                   to = random() % text.size();
      const std::string piece = text.substr(from, count);
      if (random() % 2 == 0) text.erase(random() % text.size(), random() % 10);
      text.insert(std::min(to, text.size()), piece);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectSurvives(text)) << round;
  }
}

TEST(RecipeFuzz, OverridesOfAnyBytesAreRefusedOrTaken) {
  std::mt19937 random(13);
  const std::string resolved = PrintRecipe(Tiny());
  const auto keys = RecipeKeys();
  constexpr std::string_view kBytes = "019.-+eE_\"'[]{},= \n\t#\\xfalsetrue\x80\xff";
  for (int round = 0; round < 2000; ++round) {
    std::string text = keys[random() % keys.size()].name + "=";
    for (size_t length = random() % 12; length > 0; --length)
      text += kBytes[random() % kBytes.size()];
    const auto recipe = ParseRecipe(resolved, "r.toml", {text});
    if (!recipe.ok()) {
      ASSERT_EQ(StatusCode::kUsage, recipe.status().code()) << text;
    }
  }
}

TEST(RecipeFuzz, DeepNestingAndLongNamesAreRefused) {
  ExpectSurvives("model = " + std::string(100'000, '['));
  ExpectSurvives("model = " + std::string(100'000, '{'));
  ExpectSurvives(std::string(1'000'000, 'a') + " = 1");
  std::string dotted = "model";
  for (int i = 0; i < 100'000; ++i) dotted += ".a";
  ExpectSurvives(dotted + " = 1");
  ExpectSurvives("[" + dotted + "]");
  ExpectHas(Refused(ParseRecipe(kSmallest, "r.toml", {"model.layer_scalar={" + dotted + "=1}"})),
            "4096 dots");
  ExpectSurvives(dotted.substr(0, 8000) + " = 1");
}

}  // namespace
}  // namespace retrace
