// Every intervention: its text, its values, and the law that a branch made with it keeps.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/recipe_toml.h"
#include "replay/local_ranks.h"
#include "replay/solo_comm.h"
#include "replay/train.h"
#include "surgery/branch.h"
#include "surgery/dry_run.h"
#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

constexpr int64_t kUpdates = 4;  // of the parent
constexpr int64_t kEdited = 3;   // the update that interventions of the branches are dated at

// tiny.toml with fewer sequences: the branches of all pairs are trained.
Recipe Parent(int64_t seed = 1234) {
  return LoadRecipe(
             SourceDir() + "/examples/tiny.toml",
             {"data.path=" + TestData("dataset/tiny"), "model.layers=2", "model.layer_scalar=1.0",
              "data.sequence_length=6", "data.micro_batch_size=1", "data.micro_batches=2",
              "data.evaluation_samples=1", "topology.lanes=1", "topology.virtual_shards=2",
              "steps=80", "store.keyframe_every=4", "model.sliding_window=4",
              "model.pad_token_id=511", "init.seed=" + std::to_string(seed)})
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
    if (kind.remake) example.first = example.last = kEdited - 1;
    if (kind.name == "layer-scalar") example.arguments["layers"] = "1..1";
    if (kind.name == "precision") example.arguments["preset"] = "bf16";
    if (kind.name == "virtual-shards") example.arguments["count"] = "4";
    if (kind.name == "update-clip") example.arguments["rms"] = "0.1";
    if (kind.name == "drop-samples") example.arguments["samples"] = "4..5+7";
    if (kind.name == "replace-data") {
      example.arguments["path"] = TestData("dataset/tiny");
      example.arguments["seed"] = "9";
    }
    if (kind.name != "graft" && kind.name != "average") return example;
    example.arguments["from"] = *folder_ / "donor";
    example.arguments["at"] = "2";
    example.arguments["only"] = "model.*";  // the donor has no lm_head, an untied branch has
    return example;
  }

  // Makes a branch of updates first..last and proves it. `name` is its directory. `replayed`: also
  // by living its updates again.
  static Status ProveBranch(const std::vector<Intervention>& interventions, const std::string& name,
                            int64_t last = kUpdates, bool replayed = true,
                            int64_t first = kEdited - 1) {
    static SoloComm comm;
    static const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
    const std::string out = *folder_ / name;
    RT_ASSIGN_OR_RETURN(const RunReader parent, RunReader::Open(*folder_ / "parent"));
    RT_RETURN_IF_ERROR(MakeBranch(parent, *job,
                                  {.first = first,
                                   .last = last,
                                   .interventions = interventions,
                                   .out = out},
                                  [](const UpdateRecord&, const Digest&) {}));
    RT_ASSIGN_OR_RETURN(const RunReader branch, RunReader::Open(out));
    EXPECT_EQ(last, branch.history().last_position());
    RT_ASSIGN_OR_RETURN(const Recipe recipe, ParseRecipe(branch.recipe_text(), name));
    const Layout layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
    const Timeline timeline(branch, layout, job->engine());
    for (int64_t k = first - 1; k <= last; ++k) {  // the law of the walk
      RT_ASSIGN_OR_RETURN(const State state, timeline.Seek(k));
      EXPECT_EQ(branch.history().Find(k)->digest, StateDigest(layout, state)) << name << "@" << k;
    }
    if (!replayed) return {};
    const bool remade = PrintRecipe(recipe) != PrintRecipe(Parent());
    RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> other, Job::Make(recipe, comm, {}));
    RT_ASSIGN_OR_RETURN(const bool same, ReplayAsRecorded(branch, remade ? *other : *job, first,
                                                          last, [](const ReplayedUpdate&) {}));
    EXPECT_TRUE(same) << name;
    return {};
  }

  // Dated at update k alone, or where it needs two at k and the next.
  static Intervention At(Intervention intervention, int64_t k) {
    intervention.first = k;
    intervention.last = intervention.kind->name == "swap-batch" ? k + 1 : k;
    if (intervention.kind->name == "drop-samples") {  // one of any two neighbours
      std::string& samples = intervention.arguments["samples"];
      samples = "1";
      for (int sample = 3; sample < 160; sample += 2) samples += "+" + std::to_string(sample);
    }
    return intervention;
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
  EXPECT_GE(names.size(), 43u);
}

// RETRACE_UPDATE_DOCS=1 build/interventions_test writes the page anew.
TEST_F(Interventions, TheDocumentIsWhatTheRegistrySays) {
  const std::string path = SourceDir() + "/docs/interventions.md";
  if (std::getenv("RETRACE_UPDATE_DOCS") != nullptr) {
    std::ofstream(path, std::ios::binary) << InterventionReference();
  }
  std::ifstream in(path, std::ios::binary);
  const std::string page((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(InterventionReference(), page) << "run RETRACE_UPDATE_DOCS=1 build/interventions_test";
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
      {"average:from=a,at=1,weight=2", "weight: expected a number in 0 .. 1"},
      {"average:from=a,at=1,weight=1,what=t", "expected one of p, m, v"},
      {"bias-correction:w", "the nearest is"},
      {"drop-samples:3..1", "A..B joined by +"},
      {"drop-samples:3+", "got '3+'"},
      {"freeze:*", "needs norm"},
      {"lr:scale=2,constant=1", "expected one of"},
      {"lr:shape=cosin", "the nearest is 'cosine'"},
      {"lr:hold=0.5", "hold: expected a whole number"},
      {"precision:ops=norm,format=fp32", "the nearest is 'norms'"},
      {"precision:ops=norms", "need format"},
      {"precision:ops=norms,format=fp64", "all or nothing"},
      {"qk-norm-gradient:first", "the nearest is 'first-shard'"},
      {"reorder:seed=x", "seed: expected a number"},
      {"repeat-batch", "needs then"},
      {"replace-data:a,identity=12", "identity"},
      {"replace-data:a,seed=4294967296", "2^32 - 1"},
      {"rewarm-v:max", "needs gradient"},
      {"skip-batch:count=0", "from 1"},
      {"swap-batch:count=1@2..3", "no parameter"},
      {"update-clip:0", "above 0"},
      {"untie", "needs moments"},
      {"untie:none", "expected one of copy, zero"},
      {"virtual-shards:3", "power of two"},
      {"window:off", "expected one of seen, ignored"},
      {"z-loss:0", "above 0"},
      {"lr:sclae=2", "lr has no parameter 'sclae'; the nearest is 'scale'"},
      {"beta1:vale=0.5", "the nearest is 'value'"},
      {"lr:hold=0", "from 1"},
      {"init:zero,std=0.1", "draws nothing"},
      {"average:from=a,at=1,weight=1,what=p+p", "'p' is given twice"},
      {"graft:from=a,at=1,what=m+v+m", "'m' is given twice"},
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
    EXPECT_EQ(StatusCode::kUsage, ParseIntervention(text).status().code()) << text;
  }
  // A value may have a '=' of its own.
  EXPECT_EQ("data/a=b", ParseIntervention("replace-data:data/a=b")->arguments.at("path"));
}

TEST_F(Interventions, WhatCanNotBeKnownFromTheTextIsRefusedBeforeAnythingRuns) {
  for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
           {"layer-scalar:0.9,layers=1..2", "layers below 2"},
           {"scale:2,only=model.layers.9.*", "no tensor matches"},
           {"freeze:model.layers.9.*,norm=counted,moments=stay", "no tensor matches"},
           {"clip:rule=ema,scope=embedding-rows", "expected fixed"},
           {"weight-decay:only=*.mpl.*", "no tensor matches"},
           {"swap-batch@3", "expected the dates @k..l"},
           {"repeat-batch:then=later@1", "within the replayed updates"},
           {"replace-data:nowhere@2", "nowhere"},
           {"virtual-shards:1@3", "the branch's first update, 2"},
           {"virtual-shards:16@2", "must divide"},
           {"scale:2,only=lm_head.*@3", "no tensor matches"},
           {"clip:factor=2", "factor: it is read with rule=ema alone"},
           {"clip:z=2,rule=ema", "z: it is read with rule=z-score alone"},
           {"clip:rule=ema,norm=1", "norm: it is read with rule=fixed alone"},
           {"clip:decay=0.5", "decay: it is read with"},
           {"clip:warmup_norm=1", "warmup_norm: it is read with a warmup alone"},
           {"skip-batch:count=77@2", "update 4 would consume sample 160: expected one of 0..159"},
           {"skip-batch:count=1099511627776@4", "update 4 would consume sample"},
           {"set-counter:cursor=159@4", "update 4 would consume sample 160"},
           {"drop-samples:4..159@3", "update 3 would consume sample 160"},
           {"drop-samples:4@4", "changes nothing: its updates consume samples of 6..7"},
           {"drop-samples:400000@2..4", "changes nothing: its updates consume samples of 2..7"},
           {"graft:from=nowhere,at=1,what=m", "nowhere"},
           {"average:from=nowhere,at=1,weight=1", "nowhere"},
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

// Each verb with each other, itself too, both at one update: a branch has some pairs at an update
// each. What remakes the run stands at its first update alone, so before all of its others.
TEST_F(Interventions, ABranchWithAnyTwoOfThemIsRebuiltBitForBit) {
  constexpr size_t kPairs = 12;  // of a branch: more of them and the state would be worn out
  const std::vector<const InterventionKind*>& kinds = InterventionKinds();
  for (size_t i = 0; i < kinds.size(); ++i) {
    std::vector<const InterventionKind*> others;
    for (size_t j = 0; j < kinds.size(); ++j) {
      if (kinds[j]->remake ? j > i && kinds[i]->remake : kinds[i]->remake || j >= i) {
        others.push_back(kinds[j]);
      }
    }
    for (size_t begin = 0; begin < others.size(); begin += kPairs) {
      std::vector<Intervention> all;
      int64_t k = kEdited - 1;
      if (kinds[i]->remake) all.push_back(At(Example(*kinds[i]), k));
      for (size_t j = begin; j < std::min(others.size(), begin + kPairs); ++j, ++k) {
        const Intervention other = At(Example(*others[j]), others[j]->remake ? kEdited - 1 : k);
        if (!kinds[i]->remake) all.push_back(At(Example(*kinds[i]), k));
        all.insert(j % 2 == 0 || kinds[i]->remake ? all.end() : all.end() - 1, other);
      }
      const std::string name = kinds[i]->name + "+" + std::to_string(begin);
      ASSERT_EQ("", ProveBranch(all, name, k, /*replayed=*/false).message()) << name;
      const RunReader run = RunReader::Open(*folder_ / name).value();
      EXPECT_TRUE(std::isfinite(ParseRecord(run.history().Find(k)->record)->loss)) << name;
      std::filesystem::remove_all(*folder_ / name);
    }
  }
}

// What edits a state asks other ranks for what it lacks: a donor's pieces, replicas, the gradient.
TEST_F(Interventions, ABranchMadeByTwoRanksIsThatOfOne) {
  constexpr size_t kKinds = 12;  // of a branch
  const std::vector<const InterventionKind*>& kinds = InterventionKinds();
  for (size_t begin = 0; begin < kinds.size(); begin += kKinds) {
    std::vector<Intervention> all;
    int64_t k = kEdited - 1;
    for (size_t i = begin; i < std::min(kinds.size(), begin + kKinds); ++i) {
      all.push_back(At(Example(*kinds[i]), kinds[i]->remake ? kEdited - 1 : k++));
    }
    const std::string name = kinds[begin]->name + "-by-";
    ASSERT_EQ("", ProveBranch(all, name + "one", k, /*replayed=*/false).message());
    const Status status = RunLocalRanks(2, {}, [&](Comm& comm) -> Status {
      RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Make(Parent(), comm, {.tp = 2}));
      RT_ASSIGN_OR_RETURN(const RunReader parent, RunReader::Open(*folder_ / "parent"));
      return MakeBranch(parent, *job,
                        {.first = kEdited - 1,
                         .last = k,
                         .interventions = all,
                         .out = *folder_ / (name + "two")},
                        [](const UpdateRecord&, const Digest&) {});
    });
    ASSERT_EQ("", status.message());
    const RunReader one = RunReader::Open(*folder_ / (name + "one")).value();
    const RunReader two = RunReader::Open(*folder_ / (name + "two")).value();
    for (int64_t at = kEdited - 2; at <= k; ++at) {
      EXPECT_EQ(one.history().Find(at)->digest, two.history().Find(at)->digest) << name << at;
    }
  }
}

// Samples of updates 2..4 of a branch; an update has two.
std::string SamplesOf(const std::string& dir) {
  const RunReader run = RunReader::Open(dir).value();
  std::string text;
  for (int64_t k = kEdited - 1; k <= kUpdates; ++k) {
    const UpdateRecord record = ParseRecord(run.history().Find(k)->record).value();
    const std::vector<int64_t> samples = record.sample_list.empty()
                                             ? Consecutive(record.first_sample, record.samples)
                                             : record.sample_list;
    for (size_t i = 0; i < samples.size(); ++i) {
      text += (i > 0 ? "," : text.empty() ? "" : " ") + std::to_string(samples[i]);
    }
  }
  return text;
}

TEST_F(Interventions, UpdatesConsumeTheSamplesThatDataInterventionsSay) {
  for (const auto& [text, samples] : std::vector<std::pair<std::string, std::string>>{
           {"skip-batch:1@3", "2,3 6,7 8,9"},
           {"repeat-batch:later@3..3", "2,3 2,3 4,5"},
           {"repeat-batch:later@3..4", "2,3 2,3 2,3"},
           {"repeat-batch:lost@3..3", "2,3 2,3 6,7"},
           {"repeat-batch:lost@3..4", "2,3 2,3 2,3"},
           {"swap-batch@3..4", "2,3 6,7 4,5"},
           {"swap-batch@2..4", "6,7 4,5 2,3"},
           {"drop-samples:4@3..4", "2,3 5,6 7,8"},
           {"drop-samples:3..5+7@2..4", "2,6 8,9 10,11"},
           {"drop-samples:4@3..3", "2,3 5,6 7,8"},
           {"set-counter:cursor=20@3", "2,3 20,21 22,23"},
           {"skip-update:t=stay,schedule=stay,cursor=stay@3..3", "2,3 4,5 4,5"}}) {
    ASSERT_EQ("", ProveBranch({ParseIntervention(text).value()}, "data").message()) << text;
    EXPECT_EQ(samples, SamplesOf(*folder_ / "data")) << text;
    std::filesystem::remove_all(*folder_ / "data");
  }
}

TEST_F(Interventions, DroppedSamplesAreFilledFromBehindTheBatchWhereTheCursorIsHeld) {
  const auto both = [](const std::string& one, const std::string& other) {
    return std::vector<Intervention>{ParseIntervention(one).value(),
                                     ParseIntervention(other).value()};
  };
  const std::string skip = "skip-update:t=stay,schedule=stay,cursor=stay@3..3";
  ASSERT_EQ("", ProveBranch(both(skip, "drop-samples:5@3..3"), "held").message());
  EXPECT_EQ("2,3 4,6 4,5", SamplesOf(*folder_ / "held"));
  ASSERT_EQ("", ProveBranch(both("drop-samples:5@3..3", skip), "turned").message());
  EXPECT_EQ("2,3 4,6 4,5", SamplesOf(*folder_ / "turned"));
}

// Without a date that far, the parent's last position is the branch's first: the plan still ends.
TEST_F(Interventions, ABranchBeyondTheSamplesThatAreThereIsRefusedBeforeItsDirectoryIsMade) {
  const Status status =
      ProveBranch({ParseIntervention("eps:1e-7").value()}, "beyond", 81, true, kUpdates + 1);
  EXPECT_EQ(StatusCode::kUsage, status.code());
  EXPECT_NE(std::string::npos, status.message().find("update 81 would consume sample 160"))
      << status.message();
  EXPECT_FALSE(std::filesystem::exists(*folder_ / "beyond"));
}

TEST_F(Interventions, ALineageNamesTheStateThatWasTakenAndAnotherInItsPlaceIsRefused) {
  const std::string copy = *folder_ / "moved";
  std::filesystem::copy(*folder_ / "donor", copy, std::filesystem::copy_options::recursive);
  const Intervention graft =
      ParseIntervention("graft:from=" + copy + ",at=2,what=m,only=model.*@3").value();
  ASSERT_EQ("", ProveBranch({graft}, "taken").message());
  const RunReader taken = RunReader::Open(*folder_ / "taken").value();
  const std::string digest =
      RunReader::Open(copy)->history().Find(2)->digest.Hex();
  EXPECT_NE(std::string::npos,
            taken.history().header.lineage->interventions.find(",digest=" + digest));
  std::filesystem::remove_all(copy);
  std::filesystem::copy(*folder_ / "parent", copy, std::filesystem::copy_options::recursive);
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const Status status = ReplayAsRecorded(taken, *job, 2, kUpdates, nullptr).status();
  EXPECT_EQ(StatusCode::kUsage, status.code());
  EXPECT_NE(std::string::npos, status.message().find("digest: expected " + digest))
      << status.message();
}

TEST_F(Interventions, ReorderingPermutesTheSamplesOfItsDatesAcrossTheirUpdates) {
  std::set<std::string> orders;
  for (const char* seed : {"1", "2", "3"}) {
    const std::string name = std::string("order") + seed;
    ASSERT_EQ(
        "", ProveBranch({ParseIntervention("reorder:" + std::string(seed) + "@2..4").value()}, name)
                .message());
    const std::string samples = SamplesOf(*folder_ / name);
    std::multiset<char> sorted;
    for (char c : samples) {
      if (c >= '0' && c <= '9') sorted.insert(c);
    }
    EXPECT_EQ((std::multiset<char>{'2', '3', '4', '5', '6', '7'}), sorted) << samples;
    orders.insert(samples);
  }
  EXPECT_GT(orders.size(), 1u);
}

TEST_F(Interventions, ABranchFromWithinTheDatesOfASwapGoesOnAsTheSwapSays) {
  ASSERT_EQ("", ProveBranch({ParseIntervention("swap-batch@2..4").value()}, "swapped").message());
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const BranchPlan plan = {.first = 3,
                           .last = kUpdates,
                           .interventions = {},
                           .out = *folder_ / "within"};
  const RunReader swapped = RunReader::Open(*folder_ / "swapped").value();
  ASSERT_EQ("",
            MakeBranch(swapped, *job, plan, [](const UpdateRecord&, const Digest&) {}).message());
  EXPECT_EQ(LastState("swapped"), LastState("within"));
  const RunReader within = RunReader::Open(plan.out).value();
  EXPECT_TRUE(ReplayAsRecorded(within, *job, 3, kUpdates, nullptr).value());
}

TEST_F(Interventions, RewarmingTakesTheGradientOfTheComingUpdate) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  for (const std::string text : {"rewarm-v:square,gradient=clipped", "rewarm-v:max,gradient=raw"}) {
    const Intervention rewarm = ParseIntervention(text).value();
    ASSERT_TRUE(job->Seek(parent, 2).ok());
    const State before = job->state().state;
    ASSERT_EQ("", rewarm.kind->edit_state(rewarm.arguments, *job).message());
    const State after = job->state().state;
    ASSERT_TRUE(job->Seek(parent, 2).ok());
    const UpdateResult result = job->Advance().value().result;
    ASSERT_LT(result.record.clip, 1);
    int64_t larger = 0;
    for (int s = 0; s < job->layout().shards(); ++s) {
      const auto &was = before.shards[s].slabs[2], &is = after.shards[s].slabs[2];
      for (size_t i = 0; i < is.size(); ++i) {
        const bool raw = rewarm.arguments.at("gradient") == "raw";
        const float g =
            (raw ? 1.0f : static_cast<float>(result.record.clip)) * job->updater().gradient(s)[i];
        const float square = g * g;
        ASSERT_EQ(raw ? std::max(was[i], square) : square, is[i]);
        larger += was[i] > square ? 1 : 0;
      }
      EXPECT_EQ(before.shards[s].slabs[0], after.shards[s].slabs[0]);
    }
    EXPECT_GT(larger, 0);  // both sides of the maximum are seen
  }
}

TEST_F(Interventions, AnAverageIsTheWeightedMeanInFp64RoundedOnce) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  Intervention average = Example(*ParseIntervention("average:from=a,at=1,weight=0.5")->kind);
  average.arguments["from"] = *folder_ / "parent";
  average.arguments["at"] = "4";
  average.arguments["weight"] = "0.25";
  ASSERT_TRUE(job->Seek(parent, 4).ok());
  const State other = job->state().state;
  ASSERT_TRUE(job->Seek(parent, 2).ok());
  const State before = job->state().state;
  ASSERT_EQ("", average.kind->edit_state(average.arguments, *job).message());
  for (int s = 0; s < job->layout().shards(); ++s) {
    const ShardState& after = job->state().state.shards[s];
    for (size_t i = 0; i < after.slabs[0].size(); ++i) {
      const double mean = 0.75 * static_cast<double>(before.shards[s].slabs[0][i]) +
                          0.25 * static_cast<double>(other.shards[s].slabs[0][i]);
      ASSERT_EQ(static_cast<float>(mean), after.slabs[0][i]);
    }
    EXPECT_EQ(before.shards[s].slabs[1], after.slabs[1]);
  }
}

TEST_F(Interventions, ReplacedDataIsReadAndTheEvaluationBatchStays) {
  const Intervention other =
      ParseIntervention("replace-data:" + TestData("dataset/tiny") + ",seed=9@3..3").value();
  ASSERT_EQ("", ProveBranch({other}, "replaced").message());
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  const RunReader branch = RunReader::Open(*folder_ / "replaced").value();
  const auto record = [](const RunReader& run, int64_t k) {
    return ParseRecord(run.history().Find(k)->record).value();
  };
  EXPECT_EQ(record(parent, 2).tokens, record(branch, 2).tokens);
  EXPECT_NE(record(parent, 3).tokens, record(branch, 3).tokens);
  EXPECT_EQ(record(parent, 4).tokens, record(branch, 4).tokens);
  EXPECT_EQ(record(parent, 3).evaluation_loss, record(branch, 3).evaluation_loss);
  Intervention wrong = other;
  wrong.arguments["identity"] = std::string(32, '0');
  EXPECT_NE(std::string::npos, ProveBranch({wrong}, "wrong").message().find("data.identity"));
}

// What a tensor is as a whole, by name and component.
std::map<std::string, std::vector<float>> Wholes(const Layout& layout, const State& state) {
  std::map<std::string, std::vector<float>> wholes;
  for (int s = 0; s < layout.shards(); ++s) {
    for (const Piece& piece : layout.pieces(s)) {
      const TensorSpec& spec = layout.tensors()[piece.tensor];
      for (int c = 0; c < kNumComponents; ++c) {
        std::vector<float>& whole = wholes[spec.name + "#" + "pmv"[c]];
        whole.resize(spec.numel());
        const float* from = state.shards[s].slabs[c].data() + piece.offset;
        for (int64_t row = piece.row_first; row < piece.row_last; ++row) {
          for (int64_t col = piece.col_first; col < piece.col_last; ++col) {
            whole[row * spec.cols + col] = *from++;
          }
        }
      }
    }
  }
  return wholes;
}

// The first state of a branch, and the parent's that it comes from, with the recipes of both.
struct BothStates {
  std::map<std::string, std::vector<float>> parent, branch;
  Counters counters;
  Layout layout;
};

BothStates StatesOf(const std::string& parent_dir, const std::string& branch_dir) {
  Engine engine(Isa::kScalar, 1);
  BothStates both;
  for (const std::string& dir : {parent_dir, branch_dir}) {
    const RunReader run = RunReader::Open(dir).value();
    const Recipe recipe = ParseRecipe(run.recipe_text(), dir).value();
    both.layout = Layout::Make(recipe.model, recipe.topology.virtual_shards).value();
    const State state = Timeline(run, both.layout, engine).Seek(1).value();
    (dir == parent_dir ? both.parent : both.branch) = Wholes(both.layout, state);
    both.counters = state.counters;
  }
  return both;
}

TEST_F(Interventions, OtherVirtualShardsHoldTheSameStateAndPartFromTheParentByRoundingAlone) {
  for (const char* count : {"1", "4"}) {
    const std::string name = std::string("shards") + count;
    ASSERT_EQ("",
              ProveBranch({ParseIntervention("virtual-shards:" + std::string(count)).value()}, name)
                  .message());
    EXPECT_EQ(StatesOf(*folder_ / "parent", *folder_ / name).parent,
              StatesOf(*folder_ / "parent", *folder_ / name).branch);
    const RunReader parent = RunReader::Open(*folder_ / "parent").value();
    const RunReader branch = RunReader::Open(*folder_ / name).value();
    const UpdateRecord a = ParseRecord(parent.history().Find(2)->record).value();
    const UpdateRecord b = ParseRecord(branch.history().Find(2)->record).value();
    EXPECT_NEAR(a.loss, b.loss, 1e-5);
    EXPECT_NE(a.gradient_norm, b.gradient_norm);
  }
}

TEST_F(Interventions, AnUntiedHeadBeginsAsTheEmbeddingWithTheMomentsItIsGiven) {
  for (const std::string moments : {"copy", "zero"}) {
    ASSERT_EQ("", ProveBranch({ParseIntervention("untie:" + moments).value()}, moments).message());
    BothStates both = StatesOf(*folder_ / "parent", *folder_ / moments);
    for (const char c : {'p', 'm', 'v'}) {
      const auto head = both.branch.extract(std::string("lm_head.weight#") + c);
      const std::vector<float>& table =
          both.parent.at(std::string("model.embed_tokens.weight#") + c);
      const bool copied = c == 'p' || moments == "copy";
      EXPECT_EQ(copied ? table : std::vector<float>(table.size(), 0.0f), head.mapped()) << c;
    }
    EXPECT_EQ(both.parent, both.branch);  // nothing else changed
    EXPECT_EQ(moments == "copy" ? 1 : 0, both.counters.adam_t[both.layout.Find("lm_head.weight")]);
    const RunReader parent = RunReader::Open(*folder_ / "parent").value();
    const RunReader branch = RunReader::Open(*folder_ / moments).value();
    EXPECT_EQ(ParseRecord(parent.history().Find(2)->record)->loss,
              ParseRecord(branch.history().Find(2)->record)->loss);
  }
}

TEST_F(Interventions, ABranchOfARemadeBranchGoesOnUnderItsRecipe) {
  ASSERT_EQ("", ProveBranch({ParseIntervention("untie:zero@2").value(),
                             ParseIntervention("virtual-shards:4@2").value()},
                            "remade")
                    .message());
  const RunReader remade = RunReader::Open(*folder_ / "remade").value();
  SoloComm comm;
  const std::unique_ptr<Job> job =
      Job::Make(ParseRecipe(remade.recipe_text(), "remade").value(), comm, {}).value();
  for (const int64_t first : {2, 3}) {
    const BranchPlan plan = {.first = first,
                             .last = kUpdates,
                             .interventions = {},
                             .out = *folder_ / ("on" + std::to_string(first))};
    ASSERT_EQ("",
              MakeBranch(remade, *job, plan, [](const UpdateRecord&, const Digest&) {}).message());
    EXPECT_EQ(LastState("remade"), LastState("on" + std::to_string(first)));
  }
}

TEST_F(Interventions, ADryRunSaysWhatEachWouldChangeAndWritesNothing) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  BranchPlan plan = {.first = 2,
                     .last = kUpdates,
                     .interventions = {},
                     .out = *folder_ / "dry"};
  for (const char* text : {"clip:0.5@3..4", "scale:2,only=model.norm.weight@2",
                           "reset-moments:m,t=reset,only=model.norm.weight@3",
                           "scale:2,only=model.norm.weight@2", "swap-batch@2..4"}) {
    plan.interventions.push_back(ParseIntervention(text).value());
  }
  const auto planned = PlanBranch(parent, *job, plan).value();
  ASSERT_EQ(5u, planned.size());
  const auto find = [&](const std::string& begin, int skip = 0) {
    for (const PlannedIntervention& one : planned) {
      if (one.intervention.Text().starts_with(begin) && skip-- == 0) return one;
    }
    ADD_FAILURE() << begin;
    return PlannedIntervention();
  };
  const PlannedIntervention once = find("scale:"), twice = find("scale:", 1);
  ASSERT_EQ(1u, once.tensors.size());
  EXPECT_EQ("model.norm.weight", once.tensors[0].tensor);
  EXPECT_EQ(Component::kParameter, once.tensors[0].component);
  EXPECT_EQ(job->layout().tensors()[job->layout().Find("model.norm.weight")].numel(),
            once.tensors[0].elements);
  EXPECT_EQ(2 * once.tensors[0].norm_before, once.tensors[0].norm_after);
  EXPECT_EQ(once.tensors[0].norm_after, twice.tensors[0].norm_before);
  const PlannedIntervention reset = find("reset-moments");
  ASSERT_EQ(1u, reset.tensors.size());
  EXPECT_EQ(0, reset.tensors[0].norm_after);
  ASSERT_EQ(1u, reset.counters.size());
  EXPECT_EQ("t of model.norm.weight", reset.counters[0].Name());
  EXPECT_EQ(2, reset.counters[0].before);
  EXPECT_EQ(0, reset.counters[0].after);
  const PlannedIntervention clip = find("clip");
  ASSERT_EQ(1u, clip.recipe.size());
  EXPECT_EQ("optimizer.clip", clip.recipe[0].key);
  EXPECT_EQ("0.5", clip.recipe[0].b);
  const PlannedIntervention swap = find("swap-batch");
  ASSERT_EQ(2u, swap.updates.size());
  EXPECT_EQ(2, swap.updates_changed);
  EXPECT_EQ((std::vector<int64_t>{6, 7}), swap.updates[0].after);
  EXPECT_EQ(4, swap.updates[1].update);
  EXPECT_EQ((std::vector<int64_t>{2, 3}), swap.updates[1].after);
  EXPECT_FALSE(std::filesystem::exists(plan.out));
}

// What a dry run says of samples, and what the records of the branch say.
TEST_F(Interventions, ADryRunForetellsTheSamplesThatTheBranchConsumes) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  int made = 0;
  for (const std::vector<std::string>& texts : std::vector<std::vector<std::string>>{
           {"skip-update:t=stay,schedule=stay,cursor=stay@2..4"},
           {"drop-samples:2+5+8@2..4"},
           {"repeat-batch:later@2..4"},
           {"skip-batch:3@3", "drop-samples:3+10+13@2..4"},
           {"set-counter:cursor=40@3", "swap-batch@2..4"},
           {"skip-batch:1@2", "reorder:seed=2@2..4"},
           {"graft:from=" + (*folder_ / "donor") + ",at=4,what=cursor@3",
            "skip-update:t=stay,schedule=stay,cursor=stay@2..3", "drop-samples:9@3..4"}}) {
    BranchPlan plan = {.first = 2,
                       .last = kUpdates,
                       .interventions = {},
                       .out = *folder_ / ("told" + std::to_string(made++))};
    for (const std::string& text : texts) {
      plan.interventions.push_back(ParseIntervention(text).value());
    }
    std::map<int64_t, std::vector<int64_t>> told;  // of updates that are changed
    const auto planned = PlanBranch(parent, *job, plan);
    ASSERT_EQ("", planned.status().message());
    for (const PlannedIntervention& one : *planned) {
      for (const SamplesChange& change : one.updates) told[change.update] = change.after;
    }
    ASSERT_EQ("", MakeBranch(parent, *job, plan, [](const UpdateRecord&, const Digest&) {})
                      .message());
    const RunReader branch = RunReader::Open(plan.out).value();
    for (const auto& [update, samples] : told) {
      const UpdateRecord record = ParseRecord(branch.history().Find(update)->record).value();
      EXPECT_EQ(samples, record.sample_list.empty()
                             ? Consecutive(record.first_sample, record.samples)
                             : record.sample_list)
          << texts[0] << " at " << update;
    }
    EXPECT_FALSE(told.empty()) << texts[0];
  }
}

TEST_F(Interventions, ADryRunOfARemadeBranchSeesTheTensorsThatItWillHave) {
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(Parent(), comm, {}).value();
  const RunReader parent = RunReader::Open(*folder_ / "parent").value();
  const BranchPlan plan = {.first = 2,
                           .last = kUpdates,
                           .interventions = {ParseIntervention("untie:zero@2").value(),
                                             ParseIntervention("scale:2,only=lm_head.*@3").value()},
                           .out = *folder_ / "dry"};
  const auto planned = PlanBranch(parent, *job, plan).value();
  ASSERT_EQ(2u, planned.size());
  for (const PlannedIntervention& one : planned) {
    ASSERT_EQ(1u, one.tensors.size());
    EXPECT_EQ("lm_head.weight", one.tensors[0].tensor);
  }
  ASSERT_EQ(1u, planned[0].recipe.size());
  EXPECT_EQ("model.tie_word_embeddings", planned[0].recipe[0].key);
  EXPECT_EQ(0, planned[0].tensors[0].norm_before);
  EXPECT_LT(0, planned[1].tensors[0].norm_before);
  EXPECT_EQ(2 * planned[1].tensors[0].norm_before, planned[1].tensors[0].norm_after);
}

// The verbs whose forms an example can not show.
TEST_F(Interventions, EveryFormOfAVerbIsRebuiltAndReplayedBitForBit) {
  for (const std::string text : {"clip:0.01,scope=tensor@3..4",
                                 "clip:0.01,scope=layer@3..4",
                                 "clip:0.001,scope=embedding-rows@3..4",
                                 "clip:rule=ema,factor=0.5@2..4",
                                 "clip:rule=z-score,z=0.1,decay=0.5@2..4",
                                 "clip:rule=ema,scope=tensor,factor=0.5@2..4",
                                 "clip:none,warmup=2,warmup_norm=0.01@2..4",
                                 "pre-norm:off@3..4",
                                 "qk-norm:gain=0.5@3..4",
                                 "freeze:*,norm=left-out,moments=move@3..3",
                                 "freeze:model.embed*,norm=left-out,moments=stay@3..4",
                                 "skip-update:t=advance,schedule=stay,cursor=stay@2..3",
                                 "rewarm-v:square,gradient=raw@3",
                                 "repeat-batch:then=lost@3..4",
                                 "bias-correction:v@3..4",
                                 "lr:hold=2@3..4",
                                 "lr:shape=constant,peak=0.02@3..4",
                                 "weight-decay:value=0.3,only=*.mlp.*@3..4",
                                 "precision:ops=norms+attention-softmax,format=bf16@3..4",
                                 "init:embedding_std=0.3@3",
                                 "update-clip:0.1@2..3"}) {
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
                           .out = *folder_ / "once"};
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
