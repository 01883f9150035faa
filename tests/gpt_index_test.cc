#include "formats/gpt_index.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/test_data.h"

namespace retrace {
namespace {

std::string DataPath(const std::string& name) { return TestData("dataset/" + name); }

nlohmann::json ReadJson(const std::string& name) {
  return nlohmann::json::parse(std::ifstream(DataPath(name)));
}

Result<GptSamples> Open(const std::string& name, const GptSamplesOptions& options) {
  RT_ASSIGN_OR_RETURN(IndexedDataset dataset, IndexedDataset::Open(DataPath(name), 512));
  return GptSamples::Create(std::move(dataset), options);
}

// The index by its definition: the stream of all tokens' places, cut every T tokens.
std::vector<SamplePosition> SlowSampleIndex(const std::vector<int32_t>& lengths,
                                            const GptIndex& index, int64_t first, int64_t T) {
  std::vector<SamplePosition> stream, rows = {{0, 0}};
  for (size_t d = 0; d < index.document_index.size(); ++d) {
    const int64_t length = lengths[static_cast<size_t>(index.document_index[d] - first)];
    for (int64_t t = 0; t < length; ++t) stream.push_back({static_cast<int64_t>(d), t});
  }
  for (size_t at = static_cast<size_t>(T); at < stream.size(); at += static_cast<size_t>(T)) {
    rows.push_back(stream[at]);
  }
  return rows;
}

TEST(Mt19937, GivesNumpysFirstOutputsAndShuffle) {
  const auto expected = ReadJson("rng_check.json");
  Mt19937 words(1234);
  for (const auto& word : expected["mt19937_seed1234_first_u32"]) EXPECT_EQ(word, words.Next());
  std::vector<int> items = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  Mt19937(1234).Shuffle(items.data(), 10);
  EXPECT_EQ(expected["shuffle_arange10_seed1234"], items);
}

TEST(Mt19937, The10000thOutputOfSeed5489IsThePublishedOne) {
  Mt19937 random(5489);
  for (int i = 1; i < 10000; ++i) random.Next();
  EXPECT_EQ(4123659995u, random.Next());  // ISO C++ [rand.predef]
}

TEST(Mt19937, IntervalAbove32BitsDrawsTheHighWordFirst) {
  Mt19937 words(7), interval(7);
  const uint64_t max = (uint64_t{1} << 40) - 1;
  const uint64_t high = words.Next(), low = words.Next();
  EXPECT_EQ(((high << 32) | low) & max, interval.Interval(max));
  EXPECT_EQ(words.Next(), interval.Interval(0xffffffffu));
  EXPECT_EQ(0u, interval.Interval(0));  // draws nothing
  EXPECT_EQ(words.Next(), interval.Next());
}

TEST(GptSamples, EveryCaseOfMegatronCoreIsReproduced) {
  const auto expected = ReadJson("expected.json");
  ASSERT_EQ(5u, expected["cases"].size());
  for (const auto& [name, c] : expected["cases"].items()) {
    for (const char* file : {"tiny", "tiny_i32"}) {
      SCOPED_TRACE(name + " of " + file);
      auto samples = Open(file, {.split = c["split"],
                                 .index = {.seq_length = expected["seq_len"],
                                           .seed = expected["seed"],
                                           .samples_planned = c["num_samples_requested"]}});
      ASSERT_TRUE(samples.ok()) << samples.status().message();
      EXPECT_EQ(c["num_docs_in_split"], samples->range().size());
      EXPECT_EQ(c["num_samples_requested"], samples->size());
      const GptIndex& index = samples->index();
      EXPECT_EQ(c["num_epochs"], index.epochs);
      EXPECT_EQ(c["separate_final_epoch"], index.separate_last);
      EXPECT_EQ(c["shuffle_index"], index.shuffle_index);
      ASSERT_EQ(c["dataset_len"], index.shuffle_index.size());
      const size_t documents = std::min<size_t>(400, index.document_index.size());
      EXPECT_EQ(c["document_index"],
                std::vector(index.document_index.begin(),
                            index.document_index.begin() + static_cast<long>(documents)));
      for (size_t i = 0; i < 50; ++i) {
        EXPECT_EQ(c["sample_index_first50"][i][0], index.sample_index[i].document);
        EXPECT_EQ(c["sample_index_first50"][i][1], index.sample_index[i].token);
      }
      std::vector<int32_t> tokens;
      for (int64_t i = 0; i < 20; ++i) {
        ASSERT_TRUE(samples->Sample(i, &tokens).ok());
        EXPECT_EQ(c["first20_samples"][static_cast<size_t>(i)], tokens);
      }
    }
  }
}

TEST(GptSamples, EverySampleOfSeveralEpochsIsReadAndComesOnce) {
  auto samples =
      Open("tiny", {.split = "1,0,0", .index = {.seq_length = 32, .samples_planned = 555}});
  ASSERT_TRUE(samples.ok());
  ASSERT_LT(1, samples->index().epochs);
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < samples->size(); ++i) {
    ASSERT_TRUE(samples->Sample(i, &tokens).ok()) << i;
    ASSERT_EQ(33u, tokens.size());
  }
  const std::set<int64_t> distinct(samples->index().shuffle_index.begin(),
                                   samples->index().shuffle_index.end());
  EXPECT_EQ(samples->index().shuffle_index.size(), distinct.size());
}

TEST(GptSamples, PastTheSamplesPlannedIsAnError) {
  auto samples =
      Open("tiny", {.split = "1,0,0", .index = {.seq_length = 32, .samples_planned = 100}});
  ASSERT_TRUE(samples.ok());
  ASSERT_LT(100u, samples->index().shuffle_index.size());
  std::vector<int32_t> tokens;
  EXPECT_TRUE(samples->Sample(99, &tokens).ok());
  for (const int64_t i : {int64_t{100}, int64_t{-1}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(StatusCode::kUsage, samples->Sample(i, &tokens).code()) << i;
  }
}

TEST(GptSamples, WithinOneEpochTheOrderDoesNotDependOnTheSamplesPlanned) {
  auto few = Open("tiny", {.split = "1,0,0", .index = {.seq_length = 32, .samples_planned = 3}});
  auto all = Open("tiny", {.split = "1,0,0", .index = {.seq_length = 32}});
  ASSERT_TRUE(few.ok() && all.ok());
  EXPECT_EQ(few->index().shuffle_index, all->index().shuffle_index);
  EXPECT_EQ(static_cast<int64_t>(all->index().shuffle_index.size()), all->size());
}

TEST(GptSamples, EmptySplitsAndShortSplitsAreErrorsAndNoEndlessLoop) {
  // 8/10009 of 200 documents rounds to none: Megatron loops forever here.
  auto empty = Open("tiny", {.split = "9999,8,2",
                             .part = DataSplit::kValid,
                             .index = {.seq_length = 32, .samples_planned = 5}});
  EXPECT_EQ(StatusCode::kUsage, empty.status().code());
  EXPECT_NE(std::string::npos, empty.status().message().find("valid"));
  EXPECT_FALSE(
      Open("tiny", {.split = "1,0,0", .part = DataSplit::kTest, .index = {.seq_length = 32}}).ok());
  auto small =
      Open("tiny", {.split = "1,0,0", .index = {.seq_length = 1 << 20, .samples_planned = 5}});
  EXPECT_EQ(StatusCode::kUsage, small.status().code());
  EXPECT_NE(std::string::npos, small.status().message().find("too few tokens"));
}

TEST(GptSamples, OptionsOutOfRangeAreErrors) {
  for (const GptIndexOptions& options :
       {GptIndexOptions{.seq_length = 0}, GptIndexOptions{.seq_length = INT64_MAX},
        GptIndexOptions{.seq_length = 8, .seed = -1},
        GptIndexOptions{.seq_length = 8, .seed = int64_t{1} << 32},
        GptIndexOptions{.seq_length = 8, .samples_planned = 0},
        GptIndexOptions{.seq_length = 8, .samples_planned = INT64_MAX}}) {
    EXPECT_EQ(StatusCode::kUsage, BuildGptIndex({9, 9}, {0, 2}, options).status().code());
  }
}

TEST(GptIndex, EqualsTheDefinitionForManyShapesIncludingEmptySequences) {
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{5, 0, 3, 0, 0, 7, 1},
                                              {0, 0, 20, 0},
                                              {1, 1, 1, 1, 1, 1, 1, 1, 1},
                                              {64}}) {
    for (const int64_t T : {1, 2, 3, 7, 8}) {
      for (const int64_t planned : {1, 5, 40, 100}) {
        const SequenceRange range = {10, 10 + static_cast<int64_t>(lengths.size())};
        auto index = BuildGptIndex(lengths, range, {.seq_length = T, .samples_planned = planned});
        ASSERT_TRUE(index.ok()) << index.status().message();
        EXPECT_LE(static_cast<size_t>(planned), index->shuffle_index.size());
        EXPECT_EQ(SlowSampleIndex(lengths, *index, 10, T), index->sample_index);
      }
    }
  }
}

TEST(GptIndex, PositionsAbove32BitsDoNotOverflow) {
  const std::vector<int32_t> lengths(7, INT32_MAX);  // 15e9 tokens
  const int64_t T = int64_t{1} << 31;
  auto index = BuildGptIndex(lengths, {0, 7}, {.seq_length = T, .samples_planned = 50});
  ASSERT_TRUE(index.ok()) << index.status().message();
  EXPECT_EQ(8, index->epochs);
  ASSERT_EQ(56u, index->sample_index.size());
  for (size_t i = 0; i < index->sample_index.size(); ++i) {
    const int64_t place = static_cast<int64_t>(i) * T;  // in the stream of equal documents
    EXPECT_EQ((SamplePosition{place / INT32_MAX, place % INT32_MAX}), index->sample_index[i]);
  }
}

TEST(GptIndex, SequenceIdsAbove31BitsAreRefused) {
  const int64_t first = int64_t{1} << 31;
  EXPECT_EQ(StatusCode::kUnsupported,
            BuildGptIndex({9}, {first, first + 1}, {.seq_length = 8}).status().code());
}

TEST(Split, RoundsHalvesToEvenAsPython) {
  // round(0.5) = 0, round(1.5) = 2, round(2.5) = 2
  EXPECT_EQ((std::array<SequenceRange, 3>{{{0, 0}, {0, 1}, {0, 0}}}), *ParseSplit("1,1,0", 1));
  EXPECT_EQ((std::array<SequenceRange, 3>{{{0, 2}, {2, 3}, {0, 0}}}), *ParseSplit("1,1", 3));
  EXPECT_EQ((std::array<SequenceRange, 3>{{{0, 2}, {2, 5}, {0, 0}}}), *ParseSplit("1,1,0", 5));
  EXPECT_EQ((std::array<SequenceRange, 3>{{{0, 180}, {180, 190}, {190, 200}}}),
            *ParseSplit("900,50,50", 200));
  EXPECT_EQ((std::array<SequenceRange, 3>{{{0, 10}, {0, 0}, {0, 0}}}), *ParseSplit("1", 10));
  EXPECT_EQ((std::array<SequenceRange, 3>{{{0, 5}, {0, 0}, {5, 10}}}),
            *ParseSplit("0.5,0,0.5", 10));
}

TEST(Split, NeverReachesPastTheLastSequence) {
  for (const char* weights : {"0.1,0.2,0.7", "1,1,1", "3,5,7", "0.3,0.3,0.4"}) {
    auto split = ParseSplit(weights, int64_t{1} << 52);
    ASSERT_TRUE(split.ok());
    for (const SequenceRange& range : *split) {
      EXPECT_LE(range.first, range.last);
      EXPECT_LE(range.last, int64_t{1} << 52);
    }
  }
}

TEST(Split, OtherTextIsRefused) {
  for (const char* bad : {"", ",", "1,", "1,,1", "1,1,1,1", "-1,1,1", "0,0,0", "a", "1;1", "nan",
                          "inf", "1e3,1,1", " 1,1,1", "-0,1,1"}) {
    EXPECT_EQ(StatusCode::kUsage, ParseSplit(bad, 100).status().code()) << bad;
  }
}

}  // namespace
}  // namespace retrace
