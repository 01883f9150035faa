// Five updates of AdamW, against five updates of the public implementation under PyTorch: its FP32
// and FP64 trajectories A, B, C (tests/data/parity/cfg2_mixed_keqv_softcap/trajectory.json).
#include <map>

#include "replay/job.h"
#include "tests/memory_batches.h"
#include "tests/parity_case.h"

namespace retrace {
namespace {

constexpr int kUpdates = 5;

struct Variant {
  const char* name;  // in trajectory.json
  LrIndexing indexing;
  DecayOn decay_on;
};

std::string Directory() { return TestData("parity/cfg2_mixed_keqv_softcap"); }

Recipe RecipeOf(const Variant& variant) {
  ParityCase c(Directory());
  Recipe recipe = c.recipe;
  recipe.precision = PrecisionPreset("fp32").value();
  recipe.steps = kUpdates;
  recipe.data.sequence_length = c.batch.length;
  recipe.data.micro_batch_size = c.batch.sequences;
  recipe.optimizer = {.beta1 = 0.9,
                      .beta2 = 0.95,
                      .eps = 1e-8,
                      .weight_decay = 0.1,
                      .decay_on = variant.decay_on,
                      .clip = 1.0};
  recipe.schedule = {.initial = 0,
                     .peak = 3e-4,
                     .minimum = 3e-5,
                     .warmup_steps = 40,
                     .total_steps = 100,
                     .indexing = variant.indexing};
  return recipe;
}

std::shared_ptr<BatchSource> Batches() {
  std::vector<std::vector<int32_t>> samples;
  for (int i = 0; i < kUpdates; ++i) {
    const TokenBatch batch =
        ParityCase::ReadBatch(Directory() + "/traj_inputs.safetensors", i, kUpdates);
    for (int64_t b = 0; b < batch.sequences; ++b) {
      const auto row = batch.ids.begin() + b * batch.length;
      samples.emplace_back(row, row + batch.length);
      samples.back().push_back(batch.labels[(b + 1) * batch.length - 1]);
    }
  }
  return std::make_shared<MemoryBatches>(std::move(samples));
}

// V = 1: shard 0 owns every tensor whole.
void LoadParameters(Job& job) {
  const SafetensorsFile file = SafetensorsFile::Open(Directory() + "/model.safetensors").value();
  for (const Piece& piece : job.layout().pieces(0)) {
    const std::vector<float> whole =
        file.ReadFloat(job.layout().tensors()[piece.tensor].name).value();
    ASSERT_EQ(piece.numel(), std::ssize(whole));
    std::copy(whole.begin(), whole.end(),
              job.state().slab(0).slab(Component::kParameter).begin() + piece.offset);
  }
}

double Ulp32(double x) { return std::ldexp(1.0, std::ilogb(x) - 23); }

// How far an FP32 value may be from the FP64 trajectory: three times as far as the reference's FP32
// value is. That one distance can be small by luck (down to a hundredth of an ulp here), so at
// least `floor_ulps` ulps of FP32, see the callers.
void ExpectAsCloseAsTheReference(double got, double fp32, double fp64, double floor_ulps) {
  const double reference = std::abs(fp32 - fp64);
  EXPECT_LE(std::abs(got - fp64), std::max(3 * reference, floor_ulps * Ulp32(fp64)))
      << "got " << got << ", FP64 " << fp64 << ", the reference's FP32 is " << reference
      << " away from it";
}

class Trajectory : public testing::TestWithParam<Variant> {};

TEST_P(Trajectory, IsAsCloseToTheFp64TrajectoryAsTheReferenceIs) {
  const Recipe recipe = RecipeOf(GetParam());
  const nlohmann::json all = ReadJson(Directory() + "/trajectory.json");
  const nlohmann::json& expected = all[GetParam().name];
  SoloComm comm;
  const std::unique_ptr<Job> job = Job::Make(recipe, comm, {.threads = 2}, Batches()).value();
  ASSERT_TRUE(job->StartFresh().ok());
  LoadParameters(*job);
  for (int i = 0; i < kUpdates; ++i) {
    SCOPED_TRACE(testing::Message() << "update " << i + 1);
    const UpdateRecord record = job->Advance().value().result.record;
    const nlohmann::json &fp32 = expected["fp32"][i], &fp64 = expected["fp64"][i];
    // A token's loss (log(sum) + max) - z is rounded at the log, the sum and the difference, half
    // an ulp each at the loss's size, and so is the reference's mean: 2 ulps before any error of z.
    ExpectAsCloseAsTheReference(record.loss, fp32["loss"], fp64["loss"], 2);
    // Summed in FP64 here and there: what differs is each gradient's own rounding, half an ulp, and
    // that of the parameters it was computed from.
    ExpectAsCloseAsTheReference(record.gradient_norm, fp32["grad_norm"], fp64["grad_norm"], 1);
    EXPECT_EQ(double(fp32["lr"]), record.lr);
    // c = 1/(norm + 1e-6): the relative distance of the norm, and its own rounding to FP32.
    const double coefficient = fp64["clip_coef"], norm = fp64["grad_norm"];
    EXPECT_LE(std::abs(record.clip - coefficient),
              coefficient * std::abs(record.gradient_norm - norm) / norm * (1 + 1e-6) +
                  0.5 * Ulp32(coefficient));
  }
  // |ours - FP32| <= |ours - FP64| + |FP64 - FP32|, and the file has the largest of the latter over
  // all parameters: 3 times it, and once. It is several ulps of the largest parameter.
  const double bound = 4 * double(expected["max_abs_param_diff_fp32_vs_fp64"]);
  const SafetensorsFile final_file =
      SafetensorsFile::Open(Directory() + "/traj_final_params_fp32.safetensors").value();
  int compared = 0;
  double largest = 0, moved = 0;
  const SafetensorsFile start = SafetensorsFile::Open(Directory() + "/model.safetensors").value();
  for (const Piece& piece : job->layout().pieces(0)) {
    const TensorSpec& spec = job->layout().tensors()[piece.tensor];
    const std::string key = std::string(GetParam().name) + "." + spec.name;
    if (!final_file.tensors().contains(key)) continue;  // C lists the tensors that differ from B's
    ++compared;
    const std::vector<float> reference = final_file.ReadFloat(key).value();
    const std::vector<float> before = start.ReadFloat(spec.name).value();
    const float* ours = job->state().slab(0).slab(Component::kParameter).data() + piece.offset;
    for (int64_t e = 0; e < piece.numel(); ++e) {
      largest = std::max(largest, std::abs(double(ours[e]) - double(reference[e])));
      moved = std::max(moved, std::abs(double(before[e]) - double(reference[e])));
    }
  }
  EXPECT_GE(compared, 10);
  EXPECT_LE(largest, bound);
  EXPECT_GE(moved, 20 * bound) << "the parameters hardly moved: the bound would prove nothing";
  RecordProperty("largest", std::to_string(largest / bound));
}

INSTANTIATE_TEST_SUITE_P(OfTheReference, Trajectory,
                         testing::Values(Variant{"A_lr_n", LrIndexing::kStep, DecayOn::kAll},
                                         Variant{"B_lr_n_minus_1", LrIndexing::kStepMinusOne,
                                                 DecayOn::kAll},
                                         Variant{"C_lr_n_minus_1_no_wd_on_1d",
                                                 LrIndexing::kStepMinusOne, DecayOn::kMatrices}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace retrace
