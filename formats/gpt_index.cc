#include "formats/gpt_index.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>
#include <utility>

namespace retrace {
namespace {

using Wide = __int128;

// What the tables need to know before they are built. All counts are exact 64-bit values.
struct Plan {
  int64_t tokens = 0;  // of one epoch
  int64_t epochs = 1;
  int64_t samples = 0;              // of all epochs
  int64_t samples_before_last = 0;  // that end before the last epoch does; used if separate_last
  bool separate_last = false;
};

int64_t MemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

Result<Plan> MakePlan(int64_t tokens, int64_t documents, const GptIndexOptions& options) {
  const int64_t T = options.seq_length;
  Plan plan;
  plan.tokens = tokens;
  if (tokens < T + 1) {
    return UsageError(
        fmt::format("too few tokens for one sample: expected at least {} (sequence length "
                    "{} + 1), got {}; use a shorter sequence length, another split or "
                    "more text",
                    T + 1, T, tokens));
  }
  Wide epochs = 1;
  if (options.samples_planned) {
    const Wide needed = Wide{*options.samples_planned} * T + 1;
    epochs = (needed + tokens - 1) / tokens;
  }
  const Wide samples = (epochs * tokens - 1) / T;
  const Wide bytes = epochs * documents * static_cast<Wide>(sizeof(int32_t)) +
                     samples * static_cast<Wide>(sizeof(SamplePosition) + sizeof(int64_t));
  if (bytes > MemoryBytes()) {
    return UsageError(
        fmt::format("samples planned: {} samples of {} tokens need {:.1f} GiB of shuffle tables, "
                    "this machine has "
                    "{:.1f} GiB of memory; plan fewer updates",
                    options.samples_planned.value_or(0), T, static_cast<double>(bytes) / (1 << 30),
                    static_cast<double>(MemoryBytes()) / (1 << 30)));
  }
  plan.epochs = static_cast<int64_t>(epochs);
  plan.samples = static_cast<int64_t>(samples);
  if (plan.epochs > 1) {
    plan.samples_before_last = static_cast<int64_t>(((epochs - 1) * tokens - 1) / T);
    const int64_t of_last = *options.samples_planned - plan.samples_before_last;
    const int64_t of_one_epoch = (tokens - 1) / T;
    plan.separate_last = of_last < static_cast<int64_t>(0.80 * static_cast<double>(of_one_epoch));
  }
  return plan;
}

void FillDocumentIndex(const Plan& plan, SequenceRange range, Mt19937* random,
                       std::vector<int32_t>* index) {
  const int64_t n = range.size();
  index->resize(static_cast<size_t>(plan.epochs * n));
  for (int64_t epoch = 0; epoch < plan.epochs; ++epoch) {
    std::iota(index->begin() + epoch * n, index->begin() + (epoch + 1) * n,
              static_cast<int32_t>(range.first));
  }
  if (plan.separate_last) {
    random->Shuffle(index->data(), (plan.epochs - 1) * n);
    random->Shuffle(index->data() + (plan.epochs - 1) * n, n);
  } else {
    random->Shuffle(index->data(), plan.epochs * n);
  }
}

// From one sample's first token to its last, T tokens further, which is the next one's first.
SamplePosition NextPosition(SamplePosition at, int64_t seq_length,
                            const std::vector<int32_t>& lengths, int32_t first_id,
                            const std::vector<int32_t>& document_index) {
  const int64_t documents = static_cast<int64_t>(document_index.size());
  int64_t needed = seq_length + 1;
  for (;;) {
    const int64_t length =
        lengths[static_cast<size_t>(document_index[static_cast<size_t>(at.document)] - first_id)];
    const int64_t left = length - at.token;
    needed -= left;
    if (needed <= 0) return {at.document, at.token + needed + left - 1};
    if (at.document == documents - 1) return {at.document, length - 1};
    at = {at.document + 1, 0};
  }
}

void FillShuffleIndex(const Plan& plan, Mt19937* random, std::vector<int64_t>* index) {
  index->resize(static_cast<size_t>(plan.samples));
  std::iota(index->begin(), index->end(), int64_t{0});
  if (plan.separate_last) {
    random->Shuffle(index->data(), plan.samples_before_last);
    random->Shuffle(index->data() + plan.samples_before_last,
                    plan.samples - plan.samples_before_last);
  } else {
    random->Shuffle(index->data(), plan.samples);
  }
}

Status CheckOptions(const GptIndexOptions& options) {
  if (options.seq_length < 1 || options.seq_length > (int64_t{1} << 40)) {
    return UsageError(fmt::format("sequence length: expected 1..2^40, got {}", options.seq_length));
  }
  if (options.seed < 0 || options.seed > std::numeric_limits<uint32_t>::max()) {
    return UsageError(fmt::format("data seed: expected 0..2^32-1, got {}", options.seed));
  }
  if (options.samples_planned && *options.samples_planned < 1) {
    return UsageError(
        fmt::format("samples planned: expected 1 or more, got {}", *options.samples_planned));
  }
  return {};
}

}  // namespace

Mt19937::Mt19937(uint32_t seed) {
  state_[0] = seed;
  for (uint32_t i = 1; i < 624; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }
}

void Mt19937::Refill() {
  for (size_t k = 0; k < 624; ++k) {
    const uint32_t y = (state_[k] & 0x80000000u) | (state_[(k + 1) % 624] & 0x7fffffffu);
    state_[k] = state_[(k + 397) % 624] ^ (y >> 1) ^ ((y & 1) != 0 ? 0x9908b0dfu : 0u);
  }
  next_ = 0;
}

uint32_t Mt19937::Next() {
  if (next_ == 624) Refill();
  uint32_t y = state_[next_++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

uint64_t Mt19937::Interval(uint64_t max) {
  if (max == 0) return 0;
  const uint64_t mask = ~uint64_t{0} >> std::countl_zero(max);
  for (;;) {
    uint64_t value = Next();
    if (max > 0xffffffffu) value = (value << 32) | Next();
    value &= mask;
    if (value <= max) return value;
  }
}

const char* SplitName(DataSplit split) {
  constexpr const char* kNames[] = {"train", "valid", "test"};
  return kNames[static_cast<int>(split)];
}

Result<std::array<SequenceRange, 3>> ParseSplit(std::string_view weights, int64_t sequences) {
  const Status bad = UsageError(fmt::format(
      "split: expected one to three weights such as 900,50,50, got '{}'", weights.substr(0, 64)));
  std::array<double, 3> weight{};
  const char* at = weights.data();
  const char* end = at + weights.size();
  for (size_t i = 0;; ++i) {
    if (i == weight.size()) return bad;
    const auto [next, error] = std::from_chars(at, end, weight[i], std::chars_format::fixed);
    if (error != std::errc() || !std::isfinite(weight[i]) || std::signbit(weight[i])) return bad;
    at = next;
    if (at == end) break;
    if (*at++ != ',') return bad;
  }
  const double sum = weight[0] + weight[1] + weight[2];
  if (!(sum > 0) || !std::isfinite(sum)) return bad;
  std::array<SequenceRange, 3> ranges;
  double low = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    const double high = low + weight[i] / sum;
    if (weight[i] > 0) {  // as Megatron: a split of weight 0 does not exist
      const auto place = [sequences](double fraction) {
        // nearbyint rounds halves to even, as Python's round does. The sum of the fractions may be
        // an ulp above 1.
        const double rounded = std::nearbyint(fraction * static_cast<double>(sequences));
        return std::min(static_cast<int64_t>(rounded), sequences);
      };
      ranges[i] = {place(low), place(high)};
    }
    low = high;
  }
  return ranges;
}

Result<GptIndex> BuildGptIndex(const std::vector<int32_t>& lengths, SequenceRange range,
                               const GptIndexOptions& options) {
  RT_CHECK_EQ(range.size(), static_cast<int64_t>(lengths.size()));
  RT_RETURN_IF_ERROR(CheckOptions(options));
  if (range.last - 1 > std::numeric_limits<int32_t>::max()) {
    return UnsupportedError(
        fmt::format("sequence ids up to {}: Megatron's document index holds ids "
                    "below 2^31; merge short sequences",
                    range.last - 1));
  }
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  RT_ASSIGN_OR_RETURN(const Plan plan, MakePlan(tokens, range.size(), options));
  GptIndex index;
  index.epochs = plan.epochs;
  index.separate_last = plan.separate_last;
  try {
    Mt19937 random(static_cast<uint32_t>(options.seed));
    FillDocumentIndex(plan, range, &random, &index.document_index);
    index.sample_index.resize(static_cast<size_t>(plan.samples) + 1);
    for (size_t i = 0; i + 1 < index.sample_index.size(); ++i) {
      index.sample_index[i + 1] =
          NextPosition(index.sample_index[i], options.seq_length, lengths,
                       static_cast<int32_t>(range.first), index.document_index);
    }
    FillShuffleIndex(plan, &random, &index.shuffle_index);
  } catch (const std::bad_alloc&) {
    return FailedError(
        fmt::format("not enough memory for the shuffle tables of {} samples", plan.samples));
  }
  return index;
}

Result<GptSamples> GptSamples::Create(IndexedDataset dataset, const GptSamplesOptions& options) {
  RT_ASSIGN_OR_RETURN(const auto ranges, ParseSplit(options.split, dataset.sequences()));
  GptSamples samples;
  samples.options_ = options;
  samples.range_ = ranges[static_cast<size_t>(options.part)];
  const std::string where =
      fmt::format("{}, split {} of '{}'", dataset.prefix(), SplitName(options.part), options.split);
  if (samples.range_.size() == 0) {
    return UsageError(
        fmt::format("{}: expected at least one of the {} sequences, got none; give this "
                    "split a larger weight or use more documents",
                    where, dataset.sequences()));
  }
  RT_RETURN_IF_ERROR(
      dataset.ReadLengths(samples.range_.first, samples.range_.size(), &samples.lengths_));
  auto index = BuildGptIndex(samples.lengths_, samples.range_, options.index);
  if (!index.ok()) return index.status().Within(where);
  samples.index_ = std::move(index).value();
  samples.size_ = options.index.samples_planned.value_or(
      static_cast<int64_t>(samples.index_.shuffle_index.size()));
  samples.dataset_ = std::move(dataset);
  return samples;
}

Status GptSamples::Sample(int64_t i, std::vector<int32_t>* tokens) const {
  if (i < 0 || i >= size_) {
    return UsageError(
        fmt::format("{}: sample {}: expected 0..{}, the samples planned; a longer run "
                    "needs a recipe that plans more",
                    dataset_.prefix(), i, size_ - 1));
  }
  const int64_t place = index_.shuffle_index[static_cast<size_t>(i)];
  const SamplePosition begin = index_.sample_index[static_cast<size_t>(place)];
  const SamplePosition end = index_.sample_index[static_cast<size_t>(place) + 1];
  const int64_t wanted = options_.index.seq_length + 1;
  tokens->resize(static_cast<size_t>(wanted));
  int64_t done = 0;
  for (int64_t d = begin.document; d <= end.document; ++d) {
    const int64_t sequence = index_.document_index[static_cast<size_t>(d)];
    const int64_t first = d == begin.document ? begin.token : 0;
    const int64_t last =
        d == end.document ? end.token + 1 : lengths_[static_cast<size_t>(sequence - range_.first)];
    RT_CHECK(last - first <= wanted - done);
    RT_RETURN_IF_ERROR(dataset_.Read(sequence, first, last - first, tokens->data() + done));
    done += last - first;
  }
  RT_CHECK_EQ(wanted, done);
  return {};
}

}  // namespace retrace
