// BatchSource: the tokens of the sample at an index. Used by the update, by evaluation and, through
// decorators, by data interventions. A pure function of the index (clause 14); thread-safe reads.
#ifndef RETRACE_REPLAY_BATCH_SOURCE_H_
#define RETRACE_REPLAY_BATCH_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/digest.h"
#include "core/recipe.h"
#include "core/status.h"
#include "replay/transformer.h"

namespace retrace {

class BatchSource {
 public:
  virtual ~BatchSource() = default;

  // The length + 1 token ids of sample `index` of the training split.
  // Errors: kUsage past the samples planned; kDamaged for an id outside the vocabulary.
  virtual Status Sample(int64_t index, std::vector<int32_t>* tokens) const = 0;

  // The same of the validation split, for the fixed evaluation batch.
  virtual Status EvaluationSample(int64_t index, std::vector<int32_t>* tokens) const = 0;

  // Of the dataset: digest of its .idx and size of its .bin.
  virtual Digest identity() const = 0;
};

// The dataset that the recipe names. Errors: those of opening it, and kUsage where it is too short.
Result<std::unique_ptr<BatchSource>> OpenBatchSource(const Recipe& recipe);

// The dataset that the recipe names for training; the evaluation batch is read from `evaluation`.
Result<std::unique_ptr<BatchSource>> OpenTrainingSource(
    const Recipe& recipe, std::shared_ptr<const BatchSource> evaluation);

// Whether two recipes' samples are the same.
bool SameDataset(const DataRecipe& a, const DataRecipe& b);

// first, first + 1, ..., `count` of them.
std::vector<int64_t> Consecutive(int64_t first, int64_t count);

// These samples as one batch, ids and labels.
Result<TokenBatch> ReadBatch(const BatchSource& source, bool evaluation,
                             const std::vector<int64_t>& samples, int64_t length);
// Samples [first, first + count).
Result<TokenBatch> ReadBatch(const BatchSource& source, bool evaluation, int64_t first,
                             int64_t count, int64_t length);

// Digest of the tokens (ids and last labels, int32 little-endian) of a batch.
void AppendTokens(const TokenBatch& batch, DigestStream* stream);

}  // namespace retrace

#endif  // RETRACE_REPLAY_BATCH_SOURCE_H_
