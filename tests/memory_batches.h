// A BatchSource whose samples lie in memory, for tests that need tokens of their own.
#ifndef RETRACE_TESTS_MEMORY_BATCHES_H_
#define RETRACE_TESTS_MEMORY_BATCHES_H_

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "replay/batch_source.h"

namespace retrace {

class MemoryBatches : public BatchSource {
 public:
  // Samples of length + 1 tokens.
  explicit MemoryBatches(std::vector<std::vector<int32_t>> samples)
      : samples_(std::move(samples)) {}

  // `count` samples of tokens in [0, vocab).
  static MemoryBatches Random(int64_t count, int64_t length, int64_t vocab, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::vector<int32_t>> samples(count, std::vector<int32_t>(length + 1));
    for (auto& sample : samples) {
      for (int32_t& id : sample) id = static_cast<int32_t>(random() % vocab);
    }
    return MemoryBatches(std::move(samples));
  }

  Status Sample(int64_t index, std::vector<int32_t>* tokens) const override {
    if (index < 0 || index >= std::ssize(samples_)) {
      return UsageError("sample " + std::to_string(index) + ": past the samples planned, " +
                        std::to_string(samples_.size()));
    }
    *tokens = samples_[index];
    return {};
  }
  Status EvaluationSample(int64_t index, std::vector<int32_t>* tokens) const override {
    return Sample(index, tokens);
  }
  Digest identity() const override { return {}; }

 private:
  std::vector<std::vector<int32_t>> samples_;
};

}  // namespace retrace

#endif  // RETRACE_TESTS_MEMORY_BATCHES_H_
