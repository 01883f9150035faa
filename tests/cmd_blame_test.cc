// blame as its user runs it: losses are those of the records to the bit, and a planted part is named.
#include <cmath>
#include <map>

#include "core/recipe_toml.h"
#include "formats/run_dir.h"
#include "replay/record.h"
#include "replay/solo_comm.h"
#include "surgery/blame.h"
#include "surgery/branch.h"
#include "tests/recorded_run.h"

namespace retrace {
namespace {

constexpr char kPlanted[] = "model.layers.1.post_attention_layernorm.weight";

class BlameCommand : public RecordedRun {
 protected:
  static Json BlameOf(const std::string& address, std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"blame", address, "--json", "--threads", "1", "--quiet"};
    words.insert(words.end(), more.begin(), more.end());
    const Finished done = RunProgram(words);
    EXPECT_EQ(0, done.code) << done.err;
    return ParseJson(done);
  }
  static UpdateRecord RecordAt(int64_t update) {
    const RunReader run = RunReader::Open(run_).value();
    return ParseRecord(run.history().Find(update)->record).value();
  }
};

TEST_F(BlameCommand, TheLossesAtBothEndsAreThoseOfTheRecordsToTheBit) {
  const Json evaluation = BlameOf(run_ + "@4");
  EXPECT_EQ("evaluation", evaluation["on"]);
  EXPECT_EQ(*RecordAt(4).evaluation_loss, evaluation["before"].get<double>());
  EXPECT_EQ(*RecordAt(5).evaluation_loss, evaluation["after"].get<double>());
  const Json update = BlameOf(run_ + "@4", {"--on", "update"});
  EXPECT_EQ(RecordAt(4).loss, update["before"].get<double>());
  const Json next = BlameOf(run_ + "@4", {"--on", "next"});
  EXPECT_EQ(RecordAt(5).loss, next["after"].get<double>());
  EXPECT_NE(next["after"], update["after"]) << "two batches with one loss would test nothing";
  EXPECT_EQ(true, evaluation["before_is_recorded"]);
  EXPECT_EQ(true, evaluation["after_is_recorded"]);
  EXPECT_EQ(false, update["after_is_recorded"]);
  EXPECT_EQ(false, next["before_is_recorded"]);
}

TEST_F(BlameCommand, TheUpdateOfOneGroupIsTheWholeUpdate) {
  const Json model = BlameOf(run_ + "@3", {"--level", "model", "--alphas", "0,1"});
  ASSERT_EQ(1u, model["groups"].size());
  EXPECT_EQ(model["after"], model["groups"][0]["loss_alone"]);
  EXPECT_EQ(model["before"], model["groups"][0]["loss_without"]);
  EXPECT_EQ(0, model["remainder"].get<double>());
  EXPECT_EQ(model["before"], model["along"][0]["loss"]);
  EXPECT_EQ(model["after"], model["along"][1]["loss"]);
}

TEST_F(BlameCommand, EachLevelHasEveryTensorOnce) {
  const RunReader run = RunReader::Open(run_).value();
  const Recipe recipe = ParseRecipe(run.recipe_text(), "recipe.toml").value();
  const Layout layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
  for (const char* level : {"model", "layer", "block", "tensor"}) {
    int64_t tensors = 0, elements = 0;
    double change2 = 0;
    const Json blame = BlameOf(run_ + "@2", {"--level", level, "--alphas", "1"});
    for (const Json& group : blame["groups"]) {
      tensors += group["tensors"].get<int64_t>();
      elements += group["elements"].get<int64_t>();
      change2 += std::pow(group["change_norm"].get<double>(), 2);
      int64_t matched = 0;
      for (const TensorSpec& spec : layout.tensors()) {
        matched += GlobMatches(group["glob"].get<std::string>(), spec.name);
      }
      EXPECT_EQ(matched, group["tensors"]) << group;
    }
    EXPECT_EQ(std::ssize(layout.tensors()), tensors) << level;
    EXPECT_EQ(layout.parameters(), elements) << level;
    EXPECT_NEAR(1, change2 / blame["curvature"]["change2"].get<double>(), 1e-12) << level;
  }
}

TEST_F(BlameCommand, SequencesAndPositionsHaveTheMeanOfTheWhole) {
  const Json blame = BlameOf(run_ + "@4", {"--level", "model", "--on", "update"});
  const RunReader run = RunReader::Open(run_).value();
  const Recipe recipe = ParseRecipe(run.recipe_text(), "recipe.toml").value();
  ASSERT_EQ(recipe.data.SamplesPerStep(), std::ssize(blame["sequences"]));
  ASSERT_EQ(recipe.data.sequence_length, std::ssize(blame["positions"]));
  for (const char* by : {"sequences", "positions"}) {
    for (const char* when : {"before", "after"}) {
      double sum = 0;
      for (const Json& one : blame[by]) sum += one[when].get<double>();
      EXPECT_NEAR(blame[when].get<double>(), sum / std::ssize(blame[by]), 1e-12) << by << when;
    }
  }
}

// A branch whose update 4 has the planted tensor's change multiplied, by its first moment.
TEST_F(BlameCommand, ATensorWhoseUpdateWasMultipliedIsNamed) {
  const std::string branch = Path("planted");
  const Finished made = RunProgram({"replay", run_, "--steps", "4..6", "--do",
                                    "scale-moments:m=400,only=" + std::string(kPlanted) + "@4",
                                    "--out", branch, "--quiet", "--threads", "1"});
  ASSERT_EQ(0, made.code) << made.err;
  const auto most = [](const Json& blame) {
    std::map<double, std::string> groups;
    for (const Json& group : blame["groups"]) {
      groups[std::fabs(group["loss_alone"].get<double>() - blame["before"].get<double>())] =
          group["name"];
    }
    return groups.rbegin()->second;
  };
  EXPECT_EQ(kPlanted, most(BlameOf(branch + "@4", {"--level", "tensor"})));
  EXPECT_EQ("layer 1 norms", most(BlameOf(branch + "@4", {"--level", "block"})));
  EXPECT_EQ("layer 1", most(BlameOf(branch + "@4", {"--level", "layer"})));
  EXPECT_NE(kPlanted, most(BlameOf(run_ + "@4", {"--level", "tensor"})));
  const Finished shown = RunProgram(
      {"blame", branch + "@4", "--level", "tensor", "--top", "1", "--threads", "1", "--quiet"});
  EXPECT_TRUE(Contains(shown.out, kPlanted)) << shown.out;
  EXPECT_FALSE(Contains(shown.out, "layers.0.")) << shown.out;
}

// At shares near 0 the loss is a parabola of what is reported.
TEST_F(BlameCommand, TheLossAlongTheUpdateFollowsSlopeAndCurvature) {
  const Json blame = BlameOf(run_ + "@4", {"--level", "model", "--on", "update", "--alphas",
                                           "-0.05,0.05", "--step", "0.1"});
  const Json& c = blame["curvature"];
  EXPECT_LT(c["slope"].get<double>(), 0) << "an update that does not descend on its own batch";
  for (const Json& at : blame["along"]) {
    const double a = at["alpha"].get<double>();
    const double expected = blame["before"].get<double>() + c["slope"].get<double>() * a +
                            c["second"].get<double>() * a * a / 2;
    // What the parabola misses is of third order: |a|^3 of the move, and FP32 losses' rounding.
    EXPECT_NEAR(expected, at["loss"].get<double>(),
                1e-5 + 0.05 * std::fabs(c["slope"].get<double>() * a));
  }
  const double lr = RecordAt(4).lr;
  EXPECT_EQ(2 / lr, c["gradient_edge"].get<double>());
  EXPECT_NEAR(38 / lr, c["momentum_edge"].get<double>(), 1e-9 / lr) << "beta1 = 0.9";
  EXPECT_EQ(c["second"].get<double>() / c["preconditioned2"].get<double>(),
            c["preconditioned"].get<double>());
}

// d'Pd against its meaning: without weight decay and with m = 0 before, d = -lr P^-1 m^.
TEST_F(BlameCommand, ThePreconditionerIsWhatAdamDividedBy) {
  const std::string plain = Path("plain");
  const Finished made =
      RunProgram({"replay", run_, "--steps", "4..5", "--do", "weight-decay:0", "--out", plain,
                  "--quiet", "--threads", "1"});
  ASSERT_EQ(0, made.code) << made.err;
  const RunReader run = RunReader::Open(plain).value();
  const Recipe recipe = ParseRecipe(run.recipe_text(), "recipe.toml").value();
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(recipe, comm, {}).value();
  ASSERT_EQ("", GoBefore(run, *job, 4).message());
  const State before = job->state().state;
  ASSERT_EQ("", job->Seek(run, 4).message());
  const State after = job->state().state;
  Journal journal;
  ASSERT_TRUE(run.ReadJournal(job->layout(), 4, 0, job->layout().shards(), &journal).ok());
  double expected = 0;  // d'Pd = -lr d'm^
  for (int s = 0; s < job->layout().shards(); ++s) {
    for (const Piece& piece : job->layout().pieces(s)) {
      const OptimizerRow& row = journal.optimizer.rows[piece.tensor];
      for (int64_t i = piece.offset; i < piece.offset + piece.numel(); ++i) {
        const auto p = [&](const State& state) {
          return static_cast<double>(state.shards[s].slab(Component::kParameter)[i]);
        };
        expected -= (p(after) - p(before)) * row.lr * after.shards[s].slab(Component::kM)[i] /
                    row.bias_correction1;
      }
    }
  }
  const Json blame = BlameOf(plain + "@4", {"--level", "model"});
  // Parameters are rounded to 2^-24 of themselves, which is up to 1e-4 of a change.
  EXPECT_NEAR(1, blame["curvature"]["preconditioned2"].get<double>() / expected, 1e-3);
}

TEST_F(BlameCommand, WhatIsNotKeptIsLivedAgain) {
  const std::string sparse = Path("sparse");
  const Finished made = RunProgram(
      {"train", SourceDir() + "/examples/tiny.toml", "-o", sparse, "--set",
       "data.path=" + TestData("dataset/tiny"), "--set", "store.window=[0,0]", "--until", "6",
       "--threads", "1", "--quiet"});
  ASSERT_EQ(0, made.code) << made.err;
  Json kept = BlameOf(run_ + "@4"), lived = BlameOf(sparse + "@4");
  kept.erase("address");
  lived.erase("address");
  EXPECT_EQ(kept, lived);
}

TEST_F(BlameCommand, WrongWordsAreRefusedWithWhatIsRight) {
  EXPECT_TRUE(Contains(Refused({"blame", run_}, 2), "expected RUN@k"));
  EXPECT_TRUE(Contains(Refused({"blame", run_ + "@4:x#m"}, 2), "--only"));
  EXPECT_TRUE(Contains(Refused({"blame", run_ + "@0"}, 2), "updates 1..6"));
  EXPECT_TRUE(Contains(Refused({"blame", run_ + "@9"}, 2), "0..6"));
  EXPECT_TRUE(Contains(Refused({"blame", run_ + "@6", "--on", "next"}, 2), "no next batch"));
  EXPECT_TRUE(Contains(Refused({"blame", run_ + "@4", "--only", "model.layers.7.*"}, 2),
                       "the nearest is"));
  EXPECT_TRUE(Contains(Refused({"blame", run_ + "@4", "--alphas", "nan"}, 2), "--alphas"));
  EXPECT_EQ(2, RunProgram({"blame", run_ + "@4", "--level", "head"}).code);
  const std::string skipped = Path("skipped");
  ASSERT_EQ(0, RunProgram({"replay", run_, "--steps", "4..5", "--do",
                           "skip-update:t=advance,schedule=advance,cursor=advance@4", "--out", skipped,
                           "--quiet"})
                   .code);
  EXPECT_TRUE(Contains(Refused({"blame", skipped + "@4"}, 2), "was skipped"));
}

}  // namespace
}  // namespace retrace
