#include "formats/tokenizer.h"

#include <gtest/gtest.h>
#include <sentencepiece_trainer.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace retrace {
namespace {

namespace fs = std::filesystem;

std::string Corpus() {
  const char* words[] = {"the",    "gradient", "norm",     "of",     "a",   "layer",
                         "grows",  "before",   "it",       "spikes", "and", "every",
                         "update", "is",       "recorded", "again"};
  std::string text;
  uint32_t x = 12345;
  for (int i = 0; i < 4000; ++i) {
    x = x * 1664525u + 1013904223u;
    text += words[x >> 28];
    text += i % 11 == 10 ? "\n   " : " ";
  }
  return text;
}

Result<std::string> TrainOn(const std::string& text, const TokenizerTraining& options) {
  TrainingSample sample(options);
  sample.AddDocument(text);
  return sample.Train();
}

const std::string& SmallModel() {
  static const std::string model = TrainOn(Corpus(), {.vocab_size = 320}).value();
  return model;
}

// A model as SentencePiece makes by default: unigram, with NFKC normalization (a character map).
std::string DefaultUnigramModel() {
  class Lines : public sentencepiece::SentenceIterator {
   public:
    Lines() {
      const std::string text = Corpus();
      for (size_t at = 0; at < text.size();) {
        const size_t end = text.find('\n', at);
        lines_.push_back(text.substr(at, end - at));
        at = end == std::string::npos ? text.size() : end + 1;
      }
    }
    bool done() const override { return at_ == lines_.size(); }
    void Next() override { ++at_; }
    const std::string& value() const override { return lines_[at_]; }
    sentencepiece::util::Status status() const override { return {}; }

   private:
    std::vector<std::string> lines_;
    size_t at_ = 0;
  } lines;
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train({{"vocab_size", "60"},
                                                                  {"minloglevel", "3"},
                                                                  {"num_threads", "1"},
                                                                  {"hard_vocab_limit", "false"}},
                                                                 &lines, &model);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return model;
}

TEST(Tokenizer, AnyTextRoundTripsToTheByte) {
  auto tokenizer = Tokenizer::FromModel(SmallModel(), "small");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(320, tokenizer->vocab_size());
  EXPECT_EQ(1, tokenizer->eos_id());
  EXPECT_EQ(2, tokenizer->bos_id());
  for (const std::string& text :
       {std::string(""), std::string("the gradient norm"),
        std::string("  two  spaces\n\n\n   indent\t\n"),
        std::string("\xe2\x82\xac 5, na\xc3\xafve \xf0\x9f\x98\x80 \xef\xac\x81"), Corpus()}) {
    std::vector<int32_t> ids;
    ASSERT_TRUE(tokenizer->Encode(text, &ids).ok());
    for (int32_t id : ids) EXPECT_TRUE(id >= 4 && id < 320) << id;  // no special token, no <unk>
    EXPECT_EQ(text, tokenizer->Decode(ids).value());
  }
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->Encode(Corpus(), &ids).ok());
  EXPECT_LT(ids.size(), Corpus().size() * 2 / 3);  // it has learnt something
}

TEST(Tokenizer, TrainingTwiceGivesTheSameBytesAndOtherTextGivesOthers) {
  EXPECT_EQ(SmallModel(), TrainOn(Corpus(), {.vocab_size = 320}).value());
  std::string other = Corpus();
  for (char& c : other) c = c == 'g' ? 'q' : c;
  EXPECT_NE(SmallModel(), TrainOn(other, {.vocab_size = 320}).value());
}

TEST(Tokenizer, DocumentsBeyondTheSampleAreThinnedEvenlyAndDeterministically) {
  const TokenizerTraining options = {.vocab_size = 320, .max_sample_bytes = 20000};
  const auto sample_of = [](const TokenizerTraining& o) {
    TrainingSample sample(o);
    for (int i = 0; i < 20; ++i) sample.AddDocument(Corpus());
    return sample;
  };
  const TrainingSample sample = sample_of(options);
  EXPECT_LE(sample.size_bytes(), 20000);
  EXPECT_GT(sample.size_bytes(), 20000 / 4);
  const std::string model = sample.Train().value();
  EXPECT_EQ(model, sample_of(options).Train().value());
  EXPECT_NE(model,
            sample_of({.vocab_size = 320, .max_sample_bytes = 20000, .seed = 5}).Train().value());
}

TEST(Tokenizer, LinesOfAnyLengthAreLearntFrom) {
  std::string line;
  while (line.size() < 50000) line += "caf\xc3\xa9 ";
  TrainingSample sample({.vocab_size = 270});
  sample.AddDocument(line);
  EXPECT_EQ(static_cast<int64_t>(line.size()), sample.size_bytes());
  auto tokenizer = Tokenizer::FromModel(sample.Train().value(), "long");
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->Encode("caf\xc3\xa9", &ids).ok());
  EXPECT_LE(ids.size(), 4u);
}

TEST(Tokenizer, ImpossibleVocabulariesAreUsageErrors) {
  for (const int64_t size : {int64_t{-1}, int64_t{0}, int64_t{261}, int64_t{1} << 40}) {
    EXPECT_EQ(StatusCode::kUsage, TrainOn(Corpus(), {.vocab_size = size}).status().code()) << size;
  }
  const Status too_large = TrainOn("the gradient\n", {.vocab_size = 4096}).status();
  EXPECT_EQ(StatusCode::kUsage, too_large.code());
  EXPECT_NE(std::string::npos, too_large.message().find("Vocabulary size"));
  EXPECT_EQ(StatusCode::kUsage, TrainOn("the gradient\n", {.vocab_size = 262}).status().code());
  EXPECT_EQ(StatusCode::kUsage, TrainOn("", {.vocab_size = 320}).status().code());
  EXPECT_EQ(StatusCode::kUsage,
            TrainOn(Corpus(), {.vocab_size = 320, .character_coverage = 0.5}).status().code());
}

TEST(Tokenizer, ModelsOfOtherKindsWork) {
  auto tokenizer = Tokenizer::FromModel(DefaultUnigramModel(), "unigram");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  std::vector<int32_t> ids;
  ASSERT_TRUE(tokenizer->Encode("the  gradient \xef\xbc\xa1", &ids).ok());
  EXPECT_EQ(2, tokenizer->eos_id());  // the library's default
  EXPECT_EQ(0u, tokenizer->Decode(ids).value().find("the gradient"));
}

TEST(Tokenizer, IdsOutsideTheVocabularyCanNotBeDecoded) {
  auto tokenizer = Tokenizer::FromModel(SmallModel(), "small");
  for (const int32_t id : {-1, 320, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(StatusCode::kUsage, tokenizer->Decode({id}).status().code());
  }
}

TEST(Tokenizer, LoadReadsTheFileAndSaysWhatIsWrongWithOthers) {
  const fs::path path =
      fs::temp_directory_path() / ("retrace_tokenizer_" + std::to_string(getpid()) + ".model");
  EXPECT_EQ(StatusCode::kUsage, Tokenizer::Load(path.string()).status().code());
  std::ofstream(path, std::ios::binary) << SmallModel();
  auto tokenizer = Tokenizer::Load(path.string());
  ASSERT_TRUE(tokenizer.ok());
  EXPECT_EQ(DigestOf(SmallModel()), tokenizer->digest());
  std::ofstream(path, std::ios::binary | std::ios::trunc) << "not a model";
  const Status status = Tokenizer::Load(path.string()).status();
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_NE(std::string::npos, status.message().find(path.string()));
  std::ofstream(path, std::ios::binary | std::ios::trunc) << "";
  EXPECT_EQ(StatusCode::kDamaged, Tokenizer::Load(path.string()).status().code());
  fs::remove(path);
}

// Loads or refuses; what loads must encode and decode without falling over.
void UseIfItLoads(const std::string& model) {
  auto tokenizer = Tokenizer::FromModel(model, "damaged");
  if (!tokenizer.ok()) {
    EXPECT_EQ(StatusCode::kDamaged, tokenizer.status().code());
    return;
  }
  std::vector<int32_t> ids;
  const std::string text = "the gradient 12  \xef\xbc\xa1\xe2\x82\xac\n\xff of";
  if (tokenizer->Encode(text, &ids).ok()) (void)tokenizer->Decode(ids);
}

TEST(Tokenizer, DamagedModelsNeverCrash) {
  for (size_t size = 0; size < SmallModel().size(); size += 3) {
    UseIfItLoads(SmallModel().substr(0, size));
  }
  for (size_t bit = 0; bit < SmallModel().size() * 8; bit += 7) {
    std::string bad = SmallModel();
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    UseIfItLoads(bad);
  }
  const std::string unigram = DefaultUnigramModel();
  for (size_t bit = 0; bit < unigram.size() * 8; bit += 2003) {
    std::string bad = unigram;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    UseIfItLoads(bad);
  }
}

}  // namespace
}  // namespace retrace
