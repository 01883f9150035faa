// Where two runs part: exact for one flipped bit in any op of any layer, forward, backward and in the
// optimizer, in any rank; and what is known of a fault that replay does not have.
#include "surgery/first_difference.h"

#include <gtest/gtest.h>

#include "replay/local_ranks.h"
#include "replay/update_tracer.h"
#include "surgery/branch.h"
#include "tests/faulty_run.h"
#include "tests/places.h"
#include "tests/small_run.h"
#include "tests/test_data.h"

namespace retrace {
namespace {

// Two layers, one of each kind; two virtual shards, two lanes: as small as an update with everything
// in it can be, for it is lived hundreds of times.
Recipe Small(std::vector<std::string> more = {}) {
  more.insert(more.begin(),
              {"data.path=" + TestData("dataset/tiny"), "data.micro_batches=2",
               "data.micro_batch_size=1", "data.sequence_length=6", "model.sliding_window=3",
               "model.layers=2", "model.layer_scalar=[1.0, 0.875]", "topology.virtual_shards=2",
               "model.full_attention_every=2"});
  return LoadRecipe(SourceDir() + "/examples/tiny.toml", more).value();
}

// The same faults each time that the update is lived: as a machine would have that is broken.
class EveryTime : public Probe {
 public:
  EveryTime(std::string op, int64_t element) : op_(std::move(op)), element_(element) {}
  void Op(const std::string& name, const float* data, int64_t rows, int64_t cols) override {
    Flip(name, const_cast<float*>(data), rows * cols);
  }
  void Op(const std::string& name, const double* data, int64_t rows, int64_t cols) override {
    Flip(name, const_cast<double*>(data), rows * cols);
  }

 private:
  template <class T>
  void Flip(const std::string& name, T* data, int64_t numel) {
    if (name != op_) return;
    reinterpret_cast<unsigned char*>(data + element_ % numel)[2] ^= 0x10;
  }
  const std::string op_;
  const int64_t element_;
};

struct Runs {
  Runs() {
    RecordFaulty(Small(), dir / "clean", 2, nullptr);
    // Another learning rate: the states part after update 1.
    RecordFaulty(Small({"schedule.peak=0.02"}), dir / "other", 2, nullptr);
  }
  TempDir dir;
};

const Runs& Recorded() {
  static const Runs* runs = new Runs;
  return *runs;
}

// Update 2 of the clean run on both sides, B with the fault in one rank of tp x dp.
FirstDifference WithFault(const std::string& op, int64_t element, int tp, int dp, int rank) {
  const RunReader run = RunReader::Open(Recorded().dir / "clean").value();
  PartingPoint point;
  point.position = 2;
  FirstDifference found;
  const Status done = RunLocalRanks(tp * dp, {}, [&](Comm& comm) -> Status {
    EveryTime fault(op, element);
    Probe* mine = comm.rank() == rank ? &fault : nullptr;
    RT_ASSIGN_OR_RETURN(found, LiveDifference(comm, {.tp = tp, .dp = dp, .threads = 1},
                                              {&run, nullptr}, {&run, mine}, point));
    return {};
  });
  EXPECT_TRUE(done.ok()) << op << ": " << done.message();
  return found;
}

// All ops of update 2, and which rank of tp 2 has each.
std::vector<std::string> AllOps() {
  SoloComm comm;
  const RunReader run = RunReader::Open(Recorded().dir / "clean").value();
  const auto job = Job::Make(Small(), comm, {.tp = 1, .dp = 1, .threads = 1}).value();
  EXPECT_TRUE(GoBefore(run, *job, 2).ok());
  UpdateTracer tracer(*job, {.evaluation = true});
  EXPECT_TRUE(tracer.Advance(nullptr).ok());
  std::vector<std::string> names;
  for (const auto& op : tracer.ops()) {
    if (!op.name.starts_with("state/")) names.push_back(op.name);
  }
  return names;
}

int64_t ShardOf(const std::string& name) {
  const size_t at = name.rfind("/shard");
  return at == std::string::npos ? -1 : std::stoi(name.substr(at + 6));
}

// Every op kind in both layers, forward and backward, each parameter's gradient, the optimizer; those
// that both ranks compute, in each of the two.
TEST(FirstDifference, OneBitOfAnyOpInAnyRankIsNamedExactly) {
  int64_t tried = 0;
  for (const std::string& op : AllOps()) {
    // A covering set: of the parameters' gradients and the optimizer those of one layer.
    const bool parameter = op.find("model.") != std::string::npos;
    if (parameter && op.find("layers.0.") != std::string::npos) continue;
    if (op.starts_with("mb1/") && op.find("layer0/") != std::string::npos) continue;
    const int64_t shard = ShardOf(op);
    for (int rank = 0; rank < 2; ++rank) {
      if (shard >= 0 && shard != rank) continue;
      ++tried;
      const FirstDifference found = WithFault(op, 3, 2, 1, rank);
      ASSERT_TRUE(found.op.has_value()) << op << " in rank " << rank;
      const std::string expected = shard < 0 && rank == 1 ? op + "@rank1" : op;
      EXPECT_EQ(expected, *found.op);
      ASSERT_TRUE(found.element.has_value()) << op;
      EXPECT_EQ(1, found.element->differing) << op;
      EXPECT_EQ(3 % found.element->elements, found.element->element.index) << op;
    }
  }
  EXPECT_GT(tried, 250);
}

TEST(FirstDifference, ALaneOfAnotherRankIsSearchedToo) {
  for (const int rank : {0, 1}) {
    const std::string op = "mb" + std::to_string(rank) + "/layer1/geglu.grad/shard1";
    const FirstDifference found = WithFault(op, 5, 1, 2, rank);
    ASSERT_TRUE(found.op.has_value());
    EXPECT_EQ(op, *found.op);
    EXPECT_EQ(5, found.element->element.index);
    EXPECT_NE(found.element->element.a, found.element->element.b);
    EXPECT_EQ("backward", PhaseOf(*found.op));
  }
}

FirstDifference Between(const RunReader& a, const RunReader& b, PartingPoint* point) {
  *point = FindPartingPoint(a, b).value();
  SoloComm comm;
  return LiveDifference(comm, {.tp = 1, .dp = 1, .threads = 1}, {&a, nullptr}, {&b, nullptr}, *point)
      .value();
}

TEST(FirstDifference, RunsOfTwoRecipesPartWhereTheKeyActsAndTheKeyIsNamed) {
  const RunReader a = RunReader::Open(Recorded().dir / "clean").value();
  const RunReader b = RunReader::Open(Recorded().dir / "other").value();
  PartingPoint point;
  const FirstDifference found = Between(a, b, &point);
  EXPECT_EQ(1, *point.position);
  EXPECT_TRUE(point.states);
  EXPECT_EQ("optimizer/rows", *found.op);  // the learning rate of the first tensor
  EXPECT_EQ("[0, 2]", found.element->IndexText());
  ASSERT_EQ(1u, found.recipes.size());
  EXPECT_EQ("schedule.peak", found.recipes[0].key);
  EXPECT_TRUE(found.a.same && found.b.same);
  EXPECT_FALSE(FindPartingPoint(a, a)->position.has_value());
}

TEST(FirstDifference, OtherWeightsFromTheBeginningAreTheFirstDifference) {
  const TempDir dir;
  RecordFaulty(Small({"init.seed=9"}), dir / "seeded", 1, nullptr);
  const RunReader a = RunReader::Open(Recorded().dir / "clean").value();
  const RunReader b = RunReader::Open(dir / "seeded").value();
  PartingPoint point;
  const FirstDifference found = Between(a, b, &point);
  EXPECT_TRUE(point.at_first);
  EXPECT_EQ(0, *point.position);
  EXPECT_EQ(1, found.update);
  EXPECT_EQ("state/model.embed_tokens.weight#p/shard0", *found.op);
  EXPECT_TRUE(found.element.has_value());
}

struct FaultCase {
  std::string op, phase, shown;  // what is recorded and replayed
};

// A bit that flipped once, when the run was made: replay has it not.
TEST(FirstDifference, AFaultThatReplayDoesNotHaveIsFoundInWhatWasRecorded) {
  const RunReader clean = RunReader::Open(Recorded().dir / "clean").value();
  for (const FaultCase& fault :
       {FaultCase{"mb1/layer1/attention/shard1", "forward", "#g/"},
        FaultCase{"mb0/layer1/down_proj.grad", "backward", "#g/"},
        FaultCase{"mb0/model.layers.1.mlp.up_proj.weight.grad/shard1", "backward",
                  "optimizer/model.layers.1.mlp.up_proj.weight#g/shard1"},
        FaultCase{"optimizer/model.layers.0.mlp.up_proj.weight#v/shard0", "optimizer",
                  "optimizer/model.layers.0.mlp.up_proj.weight#v/shard0"}}) {
    const TempDir dir;
    BitFlip flip(fault.op, 3, 22, 2);
    const Recipe recipe = Small({"store.keyframe_every=1"});
    RecordFaulty(fault.phase == "optimizer" ? recipe : Small(), dir / "faulty", 3, &flip);
    ASSERT_TRUE(flip.flipped());
    const RunReader faulty = RunReader::Open(dir / "faulty").value();
    PartingPoint point;
    const FirstDifference found = Between(clean, faulty, &point);
    EXPECT_EQ(2, *point.position) << fault.op;
    EXPECT_FALSE(found.op.has_value()) << *found.op;  // replay is right on both sides
    EXPECT_TRUE(found.a.same);
    ASSERT_TRUE(found.b.fault.has_value()) << fault.op;
    EXPECT_EQ(fault.phase, found.b.fault->phase) << fault.op;
    ASSERT_TRUE(found.b.fault->element.has_value()) << fault.op;
    EXPECT_TRUE(found.b.fault->element->name.find(fault.shown) != std::string::npos)
        << found.b.fault->element->name;
    if (fault.shown == "#g/") continue;
    EXPECT_EQ(3, found.b.fault->element->element.index) << fault.op;
    EXPECT_EQ(1, found.b.fault->element->differing) << fault.op;
  }
}

TEST(FirstDifference, WithoutAJournalTheRecordsNormsNameTheTensors) {
  const TempDir dir;
  BitFlip flip("mb0/model.layers.1.mlp.up_proj.weight.grad/shard1", 3, 28, 2);
  RecordFaulty(Small(), dir / "faulty", 2, &flip, {.states = false, .keyframes = {1}});
  const RunReader clean = RunReader::Open(Recorded().dir / "clean").value();
  const RunReader faulty = RunReader::Open(dir / "faulty").value();
  PartingPoint point;
  const FirstDifference found = Between(clean, faulty, &point);
  ASSERT_TRUE(found.b.fault.has_value());
  EXPECT_FALSE(found.b.fault->has_journal || found.b.fault->has_keyframe);
  EXPECT_FALSE(found.b.fault->element.has_value());
  EXPECT_EQ("backward", found.b.fault->phase);
  EXPECT_EQ(std::vector<std::string>{"model.layers.1.mlp.up_proj.weight"}, found.b.fault->tensors);
}

TEST(FirstDifference, OtherVirtualShardsAreRefused) {
  const TempDir dir;
  RecordFaulty(Small({"topology.virtual_shards=4"}), dir / "four", 1, nullptr);
  const RunReader a = RunReader::Open(Recorded().dir / "clean").value();
  const RunReader b = RunReader::Open(dir / "four").value();
  EXPECT_EQ(StatusCode::kUnsupported, FindPartingPoint(a, b).status().code());
}

}  // namespace
}  // namespace retrace
