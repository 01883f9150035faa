#include "formats/data_build.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace retrace {
namespace {

namespace fs = std::filesystem;

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string Corpus(uint32_t x) {
  const char* words[] = {"loss", "spike", "moment", "clip",   "warm-up", "embedding", "head", "of",
                         "the",  "a",     "update", "replay", "state",   "norm",      "is",   "in"};
  std::string text;
  for (int i = 0; i < 3000; ++i) {
    x = x * 1664525u + 1013904223u;
    text += words[x >> 28];
    text += i % 60 == 59 ? "\n\n" : i % 12 == 11 ? "\n" : " ";
  }
  return text;
}

class DataBuild : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() /
              ("retrace_build_" + std::to_string(getpid()) + "_" + info->name());
    fs::create_directories(folder_);
    options_.text.inputs = {Write("a.txt", Corpus(1)), Write("b.txt", Corpus(2))};
    options_.text.min_document_bytes = 200;
    options_.output_prefix = Path("out");
    options_.training.vocab_size = 300;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(Path(name), std::ios::binary | std::ios::trunc) << bytes;
    return Path(name);
  }
  std::vector<std::string> Outputs(const std::string& prefix) const {
    return {ReadAll(prefix + ".bin"), ReadAll(prefix + ".idx"), ReadAll(prefix + ".model")};
  }
  size_t Files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
  DataBuildOptions options_;
};

TEST_F(DataBuild, DecodedDatasetIsTheText) {
  auto built = BuildDataset(options_, nullptr);
  ASSERT_TRUE(built.ok()) << built.status().message();
  auto tokenizer = Tokenizer::Load(built->tokenizer_path);
  auto dataset = IndexedDataset::Open(options_.output_prefix, built->vocab_size);
  ASSERT_TRUE(tokenizer.ok() && dataset.ok());
  EXPECT_EQ(built->identity, dataset->identity());
  EXPECT_EQ(built->tokenizer_digest, tokenizer->digest());
  EXPECT_EQ(built->documents, dataset->documents());
  EXPECT_EQ(built->tokens, dataset->tokens());
  auto text = TextSource::Open(options_.text);
  std::string document;
  int64_t documents = 0;
  while (text->Next(&document).value()) {
    std::vector<int32_t> ids;
    ASSERT_TRUE(dataset->Read(documents++, &ids).ok());
    ASSERT_EQ(built->eos_id, ids.back());
    ids.pop_back();
    EXPECT_EQ(document, tokenizer->Decode(ids).value());
  }
  EXPECT_EQ(documents, built->documents);
  EXPECT_EQ(text->text_bytes(), built->text_bytes);
  EXPECT_LT(20, documents);
}

TEST_F(DataBuild, SameInputGivesTheSameBytes) {
  ASSERT_TRUE(BuildDataset(options_, nullptr).ok());
  const auto first = Outputs(options_.output_prefix);
  options_.output_prefix = Path("other");
  ASSERT_TRUE(BuildDataset(options_, nullptr).ok());
  EXPECT_EQ(first, Outputs(options_.output_prefix));
  EXPECT_EQ(2u + 6u, Files());
}

TEST_F(DataBuild, ExistingDatasetIsReplacedOnlyWhenAsked) {
  auto first = BuildDataset(options_, nullptr);
  ASSERT_TRUE(first.ok());
  EXPECT_FALSE(first->identical);
  auto again = BuildDataset(options_, nullptr);
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_TRUE(again->identical);
  EXPECT_EQ(first->identity, again->identity);
  const auto bytes = Outputs(options_.output_prefix);
  Write("b.txt", Corpus(3) + "zebra quartz");
  EXPECT_EQ(StatusCode::kUsage, BuildDataset(options_, nullptr).status().code());
  options_.tokenizer = options_.output_prefix + ".model";  // then only the dataset differs
  EXPECT_EQ(StatusCode::kUsage, BuildDataset(options_, nullptr).status().code());
  EXPECT_EQ(bytes, Outputs(options_.output_prefix));
  EXPECT_EQ(2u + 3u, Files());
  options_.tokenizer.clear();
  options_.overwrite = true;
  auto replaced = BuildDataset(options_, nullptr);
  ASSERT_TRUE(replaced.ok());
  EXPECT_NE(first->identity, replaced->identity);
  EXPECT_EQ(2u + 3u, Files());
}

TEST_F(DataBuild, GivenTokenizerIsUsed) {
  auto first = BuildDataset(options_, nullptr);
  ASSERT_TRUE(first.ok());
  options_.tokenizer = first->tokenizer_path;
  options_.output_prefix = Path("second");
  auto second = BuildDataset(options_, nullptr);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(first->identity, second->identity);
  EXPECT_FALSE(fs::exists(Path("second.model")));
  options_.tokenizer = Write("bad.model", "nothing");
  EXPECT_EQ(StatusCode::kDamaged, BuildDataset(options_, nullptr).status().code());
}

TEST_F(DataBuild, LimitsAreObserved) {
  auto all = BuildDataset(options_, nullptr);
  options_.tokenizer = all->tokenizer_path;
  options_.output_prefix = Path("part");
  options_.text.max_text_bytes = 5000;
  auto part = BuildDataset(options_, nullptr);
  ASSERT_TRUE(part.ok());
  EXPECT_GE(part->text_bytes, 5000);
  EXPECT_LT(part->text_bytes, 5000 + 1000);
  options_.text.max_text_bytes = 0;
  options_.output_prefix = Path("long");
  options_.text.min_document_bytes = 1;
  Write("a.txt", "x\n\n" + Corpus(1));
  options_.min_document_tokens = 4;
  auto without_short = BuildDataset(options_, nullptr);
  ASSERT_TRUE(without_short.ok());
  EXPECT_EQ(1, without_short->documents_left_out);
  options_.min_document_tokens = 1000000;
  EXPECT_EQ(StatusCode::kUsage, BuildDataset(options_, nullptr).status().code());
}

TEST_F(DataBuild, ProgressGoesForwardWithinEachPhase) {
  std::vector<std::string> phases;
  double last = 0;
  ASSERT_TRUE(BuildDataset(options_, [&](std::string_view phase, double fraction) {
                if (phases.empty() || phases.back() != phase) {
                  phases.emplace_back(phase);
                  last = 0;
                }
                EXPECT_TRUE(fraction >= last && fraction <= 1);
                last = fraction;
              }).ok());
  EXPECT_EQ(
      (std::vector<std::string>{"reading", "training the tokenizer", "tokenizing", "writing"}),
      phases);
}

TEST_F(DataBuild, FailuresLeaveNothingBehind) {
  const size_t before = Files();
  options_.training.vocab_size = 100000;  // more than the text gives
  EXPECT_EQ(StatusCode::kUsage, BuildDataset(options_, nullptr).status().code());
  options_.training.vocab_size = 300;
  options_.min_document_tokens = 1000000;
  EXPECT_FALSE(BuildDataset(options_, nullptr).ok());
  options_.text.inputs.push_back(Path("none.txt"));
  EXPECT_EQ(StatusCode::kUsage, BuildDataset(options_, nullptr).status().code());
  options_.output_prefix = "";
  EXPECT_EQ(StatusCode::kUsage, BuildDataset(options_, nullptr).status().code());
  EXPECT_EQ(before, Files());
}

TEST_F(DataBuild, InspectCountsWhatIsThere) {
  auto writer = IndexedDatasetWriter::Create(Path("tiny"), 70000);
  ASSERT_TRUE(writer->AddDocument({5, 6, 7, 5}).ok());
  ASSERT_TRUE(writer->AddDocument({69999}).ok());
  ASSERT_TRUE(writer->AddDocument({5, 5, 5}).ok());
  ASSERT_TRUE(writer->Publish(IndexedDatasetWriter::Existing::kRefuse).ok());
  auto summary = InspectDataset(Path("tiny"), {.first_sequences = 2, .tokens_each = 3}, nullptr);
  ASSERT_TRUE(summary.ok()) << summary.status().message();
  EXPECT_EQ(3, summary->documents);
  EXPECT_EQ(8, summary->tokens);
  EXPECT_EQ(TokenType::kI32, summary->token_type);
  EXPECT_EQ(32u, summary->bin_size_bytes);
  EXPECT_EQ(1, summary->min_length);
  EXPECT_EQ(3, summary->median_length);
  EXPECT_EQ(4, summary->max_length);
  EXPECT_EQ(5, summary->min_token);
  EXPECT_EQ(69999, summary->max_token);
  EXPECT_EQ(4, summary->distinct_tokens);
  EXPECT_NEAR(-(5 * std::log(5 / 8.) + 3 * std::log(1 / 8.)) / 8, summary->unigram_entropy_nats,
              1e-12);
  EXPECT_EQ((std::vector<std::vector<int32_t>>{{5, 6, 7}, {69999}}), summary->first_sequences);
  EXPECT_FALSE(InspectDataset(Path("none"), {}, nullptr).ok());
}

TEST_F(DataBuild, InspectAndBuildAgree) {
  auto built = BuildDataset(options_, nullptr);
  auto summary = InspectDataset(options_.output_prefix, {}, nullptr);
  ASSERT_TRUE(built.ok() && summary.ok());
  EXPECT_EQ(built->tokens, summary->tokens);
  EXPECT_EQ(built->identity, summary->identity);
  EXPECT_EQ(built->unigram_entropy_nats, summary->unigram_entropy_nats);
  EXPECT_EQ(built->eos_id, summary->min_token);
}

TEST_F(DataBuild, DictionaryIsBuiltFromItsCompressedFile) {
  const std::string path = "/usr/share/dictd/gcide.dict.dz";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is not installed (Debian package dict-gcide)";
  options_.text = {.inputs = {path}, .max_text_bytes = 200000};
  options_.training.vocab_size = 512;
  auto built = BuildDataset(options_, nullptr);
  ASSERT_TRUE(built.ok()) << built.status().message();
  EXPECT_GT(built->documents, 100);
  EXPECT_LT(built->unigram_entropy_nats, std::log(512));
  EXPECT_GT(built->tokens, 200000 / 6);
}

}  // namespace
}  // namespace retrace
