// Every intervention: its text, its values, and the law that a branch made with it keeps.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "surgery/branch.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int64_t kUpdates = 4;  // of the parent
constexpr int64_t kEdited = 3;   // the update that interventions of the branches are dated at

// tiny.toml with fewer sequences: the branches of all pairs are trained.
Recipe Parent(int64_t seed = 1234) {
  return LoadRecipe(std::string(RETRACE_SOURCE_DIR) + "/examples/tiny.toml",
                    {"data.path=" + TestData("dataset/tiny"), "model.layers=2",
                     "model.layer_scalar=1.0", "data.sequence_length=6", "data.micro_batch_size=1",
                     "data.micro_batches=2", "data.evaluation_samples=1", "topology.lanes=1",
                     "topology.virtual_shards=2", "steps=8", "model.pad_token_id=511", "init.seed=" + std::to_string(seed)})
      .value();
}

Status RecordParent(const std::string& dir, const Recipe& recipe) {
  SoloComm comm;
  TrainOptions options;
  options.run_dir = dir;
  options.until = kUpdates;
  return Train(recipe, comm, {}, options).status();
}

// A parent and a run to graft from, made once.
class Interventions : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    // In memory where there is such a place: hundreds of branches are made durable.
    const bool shm = ::access("/dev/shm", W_OK) == 0;
    if (shm) ::setenv("TMPDIR", "/dev/shm", 0);
    folder_ = new TempFolder;
    ASSERT_EQ("", RecordParent(*folder_ / "parent", Parent()).message());
    Recipe donor = Parent(77);
    donor.topology.virtual_shards = 1;  // its slabs are cut differently
    ASSERT_EQ("", RecordParent(*folder_ / "donor", donor).message());
  }
  static void TearDownTestSuite() { delete folder_; }

  // The kind's example with a date that the small branches have, and values that change them.
  static Intervention Example(const InterventionKind& kind) {
    Intervention example = ParseIntervention(kind.example).value();
    example.first = kEdited;
    example.last = kind.edit_state ? kEdited : kUpdates;
    if (kind.name == "layer-scalar") example.arguments["layers"] = "1..1";
    if (kind.name == "precision") example.arguments["preset"] = "bf16";
    if (kind.name != "graft") return example;
    example.arguments["from"] = *folder_ / "donor";
    example.arguments["at"] = "2";
    return example;
  }

  // Makes a branch of updates 2..last and proves it. `name` is its directory. `replayed`: also by
  // living its updates again.
  static Status ProveBranch(const std::vector<Intervention>& interventions,
                            const std::string& name, int64_t last = kUpdates,
                            bool replayed = true) {
    static SoloComm comm;
    static const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
    const std::string out = *folder_ / name;
    RT_ASSIGN_OR_RETURN(const RunReader parent, RunReader::Open(*folder_ / "parent"));
    RT_RETURN_IF_ERROR(MakeBranch(
        parent, *job, {.first = kEdited - 1, .last = last, .interventions = interventions,
                       .out = out, .device = "cpu", .isa = "scalar"},
        [](const UpdateRecord&, const Digest&) {}));
    RT_ASSIGN_OR_RETURN(const RunReader branch, RunReader::Open(out));
    EXPECT_EQ(last, branch.history().last_position());
    const Timeline timeline(branch, job->layout(), job->engine());
    for (int64_t k = kEdited - 2; k <= last; ++k) {  // the law of the walk
      RT_ASSIGN_OR_RETURN(const State state, timeline.Seek(k));
      EXPECT_EQ(branch.history().Find(k)->digest, StateDigest(job->layout(), state)) << name;
    }
    if (!replayed) return {};
    RT_ASSIGN_OR_RETURN(const bool same, ReplayAsRecorded(branch, *job, kEdited - 1, last,
                                                          [](const ReplayedUpdate&) {}));
    EXPECT_TRUE(same) << name;
    return {};
  }

  static Digest LastState(const std::string& name) {
    const RunReader run = RunReader::Open(*folder_ / name).value();
    return run.history().Find(kUpdates)->digest;
  }

  static TempFolder* folder_;
};
TempFolder* Interventions::folder_ = nullptr;

std::string ErrorOf(const std::string& text) {
  const Result<Intervention> parsed = ParseIntervention(text);
  return parsed.ok() ? "" : parsed.status().message();
}

TEST_F(Interventions, EveryExampleIsCanonicalAfterOneRoundTrip) {
  std::set<std::string> names;
  for (const InterventionKind* kind : InterventionKinds()) {
    EXPECT_TRUE(names.insert(kind->name).second) << kind->name;
    EXPECT_EQ(1, (kind->edit_state != nullptr) + (kind->edit_recipe != nullptr) +
                     (kind->edit_update != nullptr))
        << kind->name;
    EXPECT_FALSE(kind->summary.empty() || kind->touches.empty() || kind->formula.empty() ||
                 kind->reference.empty())
        << kind->name;
    const Result<Intervention> parsed = ParseIntervention(kind->example);
    ASSERT_TRUE(parsed.ok()) << kind->example << ": " << parsed.status().message();
    EXPECT_EQ(kind, parsed->kind);
    const Result<Intervention> again = ParseIntervention(parsed->Text());
    ASSERT_TRUE(again.ok()) << parsed->Text() << ": " << again.status().message();
    EXPECT_EQ(parsed->Text(), again->Text());
    for (const Parameter& parameter : kind->parameters) {
      const bool named = parsed->Text().find(parameter.name + "=") != std::string::npos;
      EXPECT_EQ(parsed->arguments.at(parameter.name) != kAsTheRecipe, named) << parsed->Text();
      EXPECT_EQ(parsed->arguments, again->arguments);
    }
  }
  EXPECT_GE(names.size(), 28u);
}

TEST_F(Interventions, CanonicalFormNamesEveryArgument) {
  EXPECT_EQ("weight-decay:value=0.033,which=matrices@2..4",
            ParseIntervention("weight-decay:which=matrices,value=0.033@2..4")->Text());
  EXPECT_EQ("set-counter:schedule=0,cursor=keep,t=0,only=*@6",
            ParseIntervention("set-counter:t=0,schedule=0@6")->Text());
  EXPECT_EQ("scale-moments:m=1,v=100,only=*", ParseIntervention("scale-moments:v=100")->Text());
}

TEST_F(Interventions, BadValuesAreNamedWithWhatWasExpected) {
  const std::vector<std::pair<std::string, std::string>> kBad = {
      {"atention:blockwise", "the nearest is 'attention'"},
      {"attention:blokwise", "the nearest is 'blockwise'"},
      {"attention", "needs kind"},
      {"attn-scale:1/sqrt(d)", "1/sqrt(head_dim) or 1/sqrt(global_head_dim)"},
      {"attn-scale:-1", "in 0 .. 1e+30"},
      {"beta1:1", "below 1"},
      {"beta2:1", "below 1"},
      {"clip", "expected a norm"},
      {"clip:0", "above 0"},
      {"clip:1e31", "at most 1e+30"},
      {"clip:scope=tensors", "the nearest is 'tensor'"},
      {"clip:rule=emma", "the nearest is 'ema'"},
      {"clip:rule=ema,decay=1", "below 1"},
      {"clip:1,warmup=-1", "warmup: expected a whole number"},
      {"freeze:*", "needs norm"},
      {"freeze:*,norm=counted", "needs moments"},
      {"freeze:*,norm=count,moments=stay", "the nearest is 'counted'"},
      {"post-norm:of", "the nearest is 'off'"},
      {"pre-norm", "needs state"},
      {"qk-norm", "expected state=off|on, gain=FACTOR"},
      {"qk-norm:gain=-1", "in 0 .. 1e+30"},
      {"skip-update:t=stay,schedule=advance", "needs cursor"},
      {"skip-update:t=stay,schedule=advance,cursor=stays", "the nearest is 'stay'"},
      {"v-norm:state=1", "expected one of off, on"},
      {"beta1:nan", "in 0 .. 1"},
      {"beta2:-0.1", "in 0 .. 1"},
      {"embed-scale:on=yess", "the nearest is 'yes'"},
      {"embed-scale:on=recipe", "expected on=yes|no"},
      {"eps:0", "1e-37"},
      {"graft:from=a,at=1,what=m+w", "expected one of p, m, v, t, schedule, cursor"},
      {"graft:from=a,at=1.5,what=m", "at: expected a whole number"},
      {"graft:from=a,at=1,what=m,digest=zz", "digest"},
      {"layer-scalar:0.9,layers=5..2", "L <= M"},
      {"layer-scalar:0.9,layers=x", "got 'x'"},
      {"layer-scalar:0.9,layer=1", "the nearest is 'layers'"},
      {"lr-indexing:n-2", "the nearest is 'n-1'"},
      {"pad-lookup:kep", "the nearest is 'keep'"},
      {"partials:bf17", "the nearest is 'bf16'"},
      {"scale:x", "expected a number"},
      {"scale:2@3..4", "takes one date"},
      {"scale-moments:v=-1", "in 0 .."},
      {"set-counter:only=*", "expected one of schedule=N"},
      {"set-counter:cursor=1e300", "2^53"},
      {"set-counter:t=9007199254740992", "2^40"},
      {"softcap:0", "or off"},
      {"weight-decay:which=matrix", "the nearest is 'matrices'"},
      {"weight-decay:value=recipe", "expected value=DECAY"},
  };
  for (const auto& [text, expected] : kBad) {
    EXPECT_NE(std::string::npos, ErrorOf(text).find(expected)) << text << ": " << ErrorOf(text);
  }
}

TEST_F(Interventions, WhatCanNotBeKnownFromTheTextIsRefusedBeforeAnythingRuns) {
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
           {"layer-scalar:0.9,layers=1..2", "layers below 2"},
           {"scale:2,only=model.layers.9.*", "no tensor matches"},
           {"freeze:model.layers.9.*,norm=counted,moments=stay", "no tensor matches"},
           {"clip:rule=ema,scope=embedding-rows", "expected fixed"},
           {"weight-decay:value=1e30,which=all@9", "within the replayed updates"}}) {
    const Status status = ProveBranch({ParseIntervention(text).value()}, "refused");
    EXPECT_EQ(StatusCode::kUsage, status.code()) << text;
    EXPECT_NE(std::string::npos, status.message().find(expected)) << status.message();
    EXPECT_FALSE(std::filesystem::exists(*folder_ / "refused")) << text;
  }
}

TEST_F(Interventions, ABranchWithAnyOfThemIsRebuiltAndReplayedBitForBit) {
  ASSERT_EQ("", ProveBranch({}, "control").message());
  EXPECT_EQ(LastState("parent"), LastState("control"));
  for (const InterventionKind* kind : InterventionKinds()) {
    ASSERT_EQ("", ProveBranch({Example(*kind)}, kind->name).message()) << kind->name;
    EXPECT_NE(LastState("control"), LastState(kind->name)) << kind->name << " changed nothing";
  }
}

TEST_F(Interventions, ABranchWithAnyTwoOfThemIsRebuiltBitForBit) {
  const std::vector<const InterventionKind*>& kinds = InterventionKinds();
  for (size_t i = 0; i < kinds.size(); ++i) {
    for (size_t j = i; j < kinds.size(); ++j) {
      std::vector<Intervention> both = {Example(*kinds[i]), Example(*kinds[j])};
      if ((i + j) % 2 == 1) std::swap(both[0], both[1]);
      both[0].first = kEdited - 1;  // one on the branch's first state, one on a later
      both[0].last = both[0].kind->edit_state ? kEdited - 1 : kEdited;
      both[1].last = kEdited;
      const std::string name = kinds[i]->name + "+" + kinds[j]->name;
      ASSERT_EQ("", ProveBranch(both, name, kEdited, /*replayed=*/false).message()) << name;
      std::filesystem::remove_all(*folder_ / name);
    }
  }
}

// The verbs whose forms an example can not show.
TEST_F(Interventions, EveryFormOfAVerbIsRebuiltAndReplayedBitForBit) {
  for (const std::string text :
       {"clip:0.01,scope=tensor@3..4", "clip:0.01,scope=layer@3..4",
        "clip:0.001,scope=embedding-rows@3..4", "clip:rule=ema,factor=0.5@2..4",
        "clip:rule=z-score,z=0.1,decay=0.5@2..4", "clip:rule=ema,scope=tensor,factor=0.5@2..4",
        "clip:none,warmup=2,warmup_norm=0.01@2..4", "pre-norm:off@3..4",
        "qk-norm:gain=0.5@3..4", "freeze:*,norm=left-out,moments=move@3..3",
        "freeze:model.embed*,norm=left-out,moments=stay@3..4",
        "skip-update:t=advance,schedule=stay,cursor=stay@2..3"}) {
    ASSERT_EQ("", ProveBranch({ParseIntervention(text).value()}, text).message()) << text;
    EXPECT_NE(LastState("parent"), LastState(text)) << text << " changed nothing";
  }
}

TEST_F(Interventions, AClipThatRemembersBeginsAnewWhereItsDatesBegin) {
  const Intervention ema = ParseIntervention("clip:rule=ema,factor=0.5@3..3").value();
  ASSERT_EQ("", ProveBranch({ema}, "dated").message());
  const RunReader run = RunReader::Open(*folder_ / "dated").value();
  const Layout layout = Layout::Make(Parent().model, 2).value();
  Engine engine(Isa::kScalar, 1);
  const Timeline timeline(run, layout, engine);
  EXPECT_TRUE(timeline.Seek(2).value().memory.empty());
  EXPECT_EQ(1.0, timeline.Seek(3).value().memory.at("clip.updates")[0]);
  EXPECT_TRUE(timeline.Seek(4).value().memory.empty());
}

TEST_F(Interventions, GraftTakesWhatItNamesFromARunThatIsCutDifferently) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  const RunReader donor = RunReader::Open(*folder_ / "donor").value();
  ASSERT_TRUE(job->Seek(parent, 2).ok());
  const State before = job->state().state;
  Intervention graft = Example(*ParseIntervention("graft:from=a,at=2,what=m+t")->kind);
  graft.arguments["what"] = "p+m+v+t";
  graft.arguments["only"] = "*";
  ASSERT_EQ("", graft.kind->edit_state(graft.arguments, *job).message());
  // Whole, it is the donor's state: the same digests of whole tensors, whatever the shards.
  const Layout whole = Layout::Make(Parent().model, 1).value();
  const State other = Timeline(donor, whole, job->engine()).Seek(2).value();
  int64_t compared = 0;
  for (int shard = 0; shard < job->layout().shards(); ++shard) {
    for (const Piece& piece : job->layout().pieces(shard)) {
      const Piece& from = *whole.FindPiece(0, piece.tensor);
      for (int c = 0; c < kNumComponents; ++c) {
        const float* got = job->state().state.shards[shard].slabs[c].data() + piece.offset;
        for (int64_t row = piece.row_first; row < piece.row_last; ++row) {
          for (int64_t col = piece.col_first; col < piece.col_last; ++col, ++compared) {
            ASSERT_EQ(other.shards[0].slabs[c][from.offset + row * from.cols() + col], *got++);
          }
        }
      }
    }
  }
  EXPECT_EQ(kNumComponents * job->layout().parameters(), compared);
  EXPECT_NE(before.shards[0].slabs[0], job->state().state.shards[0].slabs[0]);
  graft.arguments["digest"] = std::string(32, '0');
  const Status refused = graft.kind->edit_state(graft.arguments, *job);
  EXPECT_NE(std::string::npos, refused.message().find("digest: expected 0000"));
}

TEST_F(Interventions, ABranchOfABranchDoesNotRepeatTheSurgeryOfItsFirstState) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const auto ignore = [](const UpdateRecord&, const Digest&) {};
  const BranchPlan plan = {.first = 3, .last = kUpdates,
                           .interventions = {ParseIntervention("scale:0.5@3").value()},
                           .out = *folder_ / "once", .device = "cpu", .isa = "scalar"};
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  ASSERT_EQ("", MakeBranch(parent, *job, plan, ignore).message());
  const RunReader once = RunReader::Open(plan.out).value();
  BranchPlan again = plan;
  again.interventions.clear();
  again.out = *folder_ / "again";
  ASSERT_EQ("", MakeBranch(once, *job, again, ignore).message());
  EXPECT_EQ(LastState("once"), LastState("again"));
}

}  // namespace
}  // namespace retrace
