// GptSamples: the training samples of a Megatron GPTDataset, token for token: which T+1 tokens are
// sample i of a split of an indexed dataset. Used by the update (batches), the recorder (digests of
// the tokens) and the commands.
// The three tables are those of megatron-core 0.19: the *document index* (sequence ids, repeated
// once per epoch, shuffled), the *sample index* (where each sample begins in that stream), the
// *shuffle index* (the order of samples). They are a function of (sequence lengths, split, T, seed,
// samples planned) and are built once, by MT19937; no generator state lives on.
// Invariants: consecutive samples of the unshuffled stream share one token (the last label of one
// is the first token of the next). All positions are 64-bit.
// Thread-safety: const after Create. Clause: 14.
#ifndef RETRACE_FORMATS_GPT_INDEX_H_
#define RETRACE_FORMATS_GPT_INDEX_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "formats/indexed_dataset.h"

namespace retrace {

// MT19937 (Matsumoto and Nishimura 1998) with the draws that numpy's RandomState makes from it.
class Mt19937 {
 public:
  explicit Mt19937(uint32_t seed);  // the reference's init_genrand
  uint32_t Next();
  // Uniform in [0, max]: draws masked to the bits of max until one is not above it. Above 2^32 - 1
  // a draw is two words, the high one first.
  uint64_t Interval(uint64_t max);
  // Fisher-Yates from the top, as RandomState.shuffle.
  template <class T>
  void Shuffle(T* items, int64_t count) {
    for (int64_t i = count - 1; i > 0; --i) {
      std::swap(items[i], items[Interval(static_cast<uint64_t>(i))]);
    }
  }

 private:
  void Refill();
  std::array<uint32_t, 624> state_;
  size_t next_ = 624;
};

// The sequences [first, last) of a dataset.
struct SequenceRange {
  int64_t first = 0, last = 0;
  int64_t size() const { return last - first; }
  bool operator==(const SequenceRange&) const = default;
};

enum class DataSplit { kTrain = 0, kValid = 1, kTest = 2 };
const char* SplitName(DataSplit split);

// "a,b,c" (one to three weights, missing ones 0) over N sequences: weights are divided by their sum
// and cumulated; a split covers round(low*N) .. round(high*N) - 1, halves to even. kUsage where the
// text is no such list. A split may come out empty; GptSamples::Create refuses to use an empty one.
Result<std::array<SequenceRange, 3>> ParseSplit(std::string_view weights, int64_t sequences);

struct GptIndexOptions {
  int64_t seq_length = 0;                                 // T
  int64_t seed = 1234;                                    // 0..2^32-1
  std::optional<int64_t> samples_planned = std::nullopt;  // updates * batch size; none: one epoch
};

struct SamplePosition {
  int64_t document = 0;  // place in the document index
  int64_t token = 0;     // offset in that sequence
  bool operator==(const SamplePosition&) const = default;
};

struct GptIndex {
  int64_t epochs = 1;
  bool separate_last = false;  // the last epoch is shuffled on its own, behind the others
  std::vector<int32_t> document_index;
  std::vector<SamplePosition> sample_index;  // one more than samples
  std::vector<int64_t> shuffle_index;
};

// `lengths` are those of the sequences range.first .. range.last - 1. Errors: kUsage for options
// out of range, fewer than T+1 tokens, or tables that do not fit into this machine's memory;
// kUnsupported for sequence ids of 2^31 and more, which Megatron's document index can not hold.
// (Megatron would fill a sample of a split shorter than T+1 tokens with repeats; it is refused
// here.)
Result<GptIndex> BuildGptIndex(const std::vector<int32_t>& lengths, SequenceRange range,
                               const GptIndexOptions& options);

struct GptSamplesOptions {
  std::string split = "900,50,50";
  DataSplit part = DataSplit::kTrain;
  GptIndexOptions index;
};

class GptSamples {
 public:
  // Errors: those of ParseSplit and BuildGptIndex, and kUsage for an empty split.
  static Result<GptSamples> Create(IndexedDataset dataset, const GptSamplesOptions& options);

  // Samples that Sample() gives: the planned ones, or one epoch's where none were planned.
  int64_t size() const { return size_; }
  int64_t seq_length() const { return options_.index.seq_length; }
  const SequenceRange& range() const { return range_; }
  const GptIndex& index() const { return index_; }
  const IndexedDataset& dataset() const { return dataset_; }

  // The T+1 token ids of sample i: inputs are the first T, labels the last T.
  // Errors: kUsage for i outside [0, size()); those of IndexedDataset::Read.
  Status Sample(int64_t i, std::vector<int32_t>* tokens) const;

 private:
  GptSamples() = default;

  IndexedDataset dataset_;
  GptSamplesOptions options_;
  SequenceRange range_;
  std::vector<int32_t> lengths_;
  GptIndex index_;
  int64_t size_ = 0;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_GPT_INDEX_H_
