#include "replay/batch_source.h"

#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "formats/gpt_index.h"
#include "formats/indexed_dataset.h"
#include "replay/recipe_plan.h"

namespace retrace {
namespace {

class DatasetBatches : public BatchSource {
 public:
  DatasetBatches(GptSamples training, std::optional<GptSamples> validation, int64_t vocab)
      : training_(std::move(training)), validation_(std::move(validation)), vocab_(vocab) {}

  Status Sample(int64_t index, std::vector<int32_t>* tokens) const override {
    return Checked(training_, index, tokens);
  }
  Status EvaluationSample(int64_t index, std::vector<int32_t>* tokens) const override {
    RT_CHECK(validation_.has_value());
    return Checked(*validation_, index, tokens);
  }
  Digest identity() const override { return training_.dataset().identity(); }

 private:
  Status Checked(const GptSamples& samples, int64_t index, std::vector<int32_t>* tokens) const {
    RT_RETURN_IF_ERROR(samples.Sample(index, tokens));
    for (int32_t id : *tokens) {
      if (id < 0 || id >= vocab_) {
        return DamagedError(fmt::format(
            "sample {}: token id {} is outside the recipe's model.vocab_size = {}; is the dataset "
            "made with another tokenizer?",
            index, id, vocab_));
      }
    }
    return {};
  }

  GptSamples training_;
  std::optional<GptSamples> validation_;
  int64_t vocab_;
};

// Another dataset for training, and the run's own evaluation batch.
class ReplacedBatches : public BatchSource {
 public:
  ReplacedBatches(std::unique_ptr<BatchSource> training,
                  std::shared_ptr<const BatchSource> evaluation)
      : training_(std::move(training)), evaluation_(std::move(evaluation)) {}

  Status Sample(int64_t index, std::vector<int32_t>* tokens) const override {
    return training_->Sample(index, tokens);
  }
  Status EvaluationSample(int64_t index, std::vector<int32_t>* tokens) const override {
    return evaluation_->EvaluationSample(index, tokens);
  }
  Digest identity() const override { return training_->identity(); }

 private:
  std::unique_ptr<BatchSource> training_;
  std::shared_ptr<const BatchSource> evaluation_;
};

Status CheckIdentity(const DataRecipe& data, const IndexedDataset& dataset) {
  if (data.identity.empty() || data.identity == dataset.identity().Hex()) return {};
  return UsageError(fmt::format("data.identity: expected a dataset of identity {}, got {}",
                                data.identity, dataset.identity().Hex()));
}

Result<GptSamples> OpenSplit(const Recipe& recipe, DataSplit part, std::optional<int64_t> planned) {
  RT_ASSIGN_OR_RETURN(IndexedDataset dataset, IndexedDataset::Open(recipe.data.path));
  RT_RETURN_IF_ERROR(CheckIdentity(recipe.data, dataset));
  return GptSamples::Create(std::move(dataset),
                            {.split = recipe.data.split,
                             .part = part,
                             .index = {.seq_length = recipe.data.sequence_length,
                                       .seed = recipe.data.seed,
                                       .samples_planned = planned}});
}

}  // namespace

Result<std::unique_ptr<BatchSource>> OpenBatchSource(const Recipe& recipe) {
  const DataRecipe& data = recipe.data;
  Result<GptSamples> training =
      OpenSplit(recipe, DataSplit::kTrain, PlannedSamples(recipe));
  if (!training.ok()) return training.status().Within("data.path = " + data.path);
  std::optional<GptSamples> validation;
  if (data.evaluation_samples > 0) {
    Result<GptSamples> opened = OpenSplit(recipe, DataSplit::kValid, data.evaluation_samples);
    if (!opened.ok()) {
      return opened.status().Within("data.evaluation_samples (validation split of " + data.path +
                                    ")");
    }
    validation = std::move(opened).value();
  }
  return std::unique_ptr<BatchSource>(std::make_unique<DatasetBatches>(
      std::move(training).value(), std::move(validation), recipe.model.vocab_size));
}

Result<std::unique_ptr<BatchSource>> OpenTrainingSource(
    const Recipe& recipe, std::shared_ptr<const BatchSource> evaluation) {
  Recipe training = recipe;
  training.data.evaluation_samples = 0;
  RT_ASSIGN_OR_RETURN(std::unique_ptr<BatchSource> source, OpenBatchSource(training));
  return std::unique_ptr<BatchSource>(
      std::make_unique<ReplacedBatches>(std::move(source), std::move(evaluation)));
}

bool SameDataset(const DataRecipe& a, const DataRecipe& b) {
  return a.path == b.path && a.split == b.split && a.seed == b.seed && a.identity == b.identity &&
         a.sequence_length == b.sequence_length;
}

std::vector<int64_t> Consecutive(int64_t first, int64_t count) {
  std::vector<int64_t> samples(count);
  std::iota(samples.begin(), samples.end(), first);
  return samples;
}

Result<TokenBatch> ReadBatch(const BatchSource& source, bool evaluation, int64_t first,
                             int64_t count, int64_t length) {
  return ReadBatch(source, evaluation, Consecutive(first, count), length);
}

Result<TokenBatch> ReadBatch(const BatchSource& source, bool evaluation,
                             const std::vector<int64_t>& samples, int64_t length) {
  TokenBatch batch;
  batch.sequences = std::ssize(samples);
  batch.length = length;
  std::vector<int32_t> tokens;
  for (const int64_t i : samples) {
    RT_RETURN_IF_ERROR(evaluation ? source.EvaluationSample(i, &tokens)
                                  : source.Sample(i, &tokens));
    RT_CHECK_EQ(length + 1, static_cast<int64_t>(tokens.size()));
    batch.ids.insert(batch.ids.end(), tokens.begin(), tokens.end() - 1);
    batch.labels.insert(batch.labels.end(), tokens.begin() + 1, tokens.end());
  }
  return batch;
}

void AppendTokens(const TokenBatch& batch, DigestStream* stream) {
  for (int64_t i = 0; i < batch.sequences; ++i) {
    stream->Update(batch.ids.data() + i * batch.length, batch.length * sizeof(int32_t));
    stream->Update(batch.labels.data() + (i + 1) * batch.length - 1, sizeof(int32_t));
  }
}

}  // namespace retrace
