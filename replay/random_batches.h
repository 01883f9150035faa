// RandomBatches: a dataset of random tokens in memory, for the self-test and for timing a recipe
// whose dataset is not at hand. Never the data of a run: a recipe names a dataset. Thread-safe.
#ifndef RETRACE_REPLAY_RANDOM_BATCHES_H_
#define RETRACE_REPLAY_RANDOM_BATCHES_H_

#include <cstdint>
#include <vector>

#include "core/philox.h"
#include "core/random_streams.h"
#include "replay/batch_source.h"

namespace retrace {

class RandomBatches : public BatchSource {
 public:
  // Samples of length + 1 ids of [0, vocab); as many as anybody asks for.
  RandomBatches(int64_t vocab, int64_t length, uint64_t seed)
      : vocab_(vocab), length_(length), seed_(seed) {}

  Status Sample(int64_t index, std::vector<int32_t>* tokens) const override {
    return Draw(2 * static_cast<uint64_t>(index), tokens);
  }
  Status EvaluationSample(int64_t index, std::vector<int32_t>* tokens) const override {
    return Draw(2 * static_cast<uint64_t>(index) + 1, tokens);
  }
  Digest identity() const override { return DigestOf("random tokens"); }

 private:
  Status Draw(uint64_t stream, std::vector<int32_t>* tokens) const {
    const RandomStream random =
        MakeRandomStream(seed_, static_cast<uint32_t>(RandomPurpose::kSelftest), stream);
    tokens->resize(length_ + 1);
    for (int64_t i = 0; i <= length_; ++i) {
      (*tokens)[i] = static_cast<int32_t>(RandomU32(random, i) % static_cast<uint32_t>(vocab_));
    }
    return {};
  }

  const int64_t vocab_, length_;
  const uint64_t seed_;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_RANDOM_BATCHES_H_
