#include "formats/indexed_dataset.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/test_data.h"

namespace retrace {
namespace {

namespace fs = std::filesystem;
using Documents = std::vector<std::vector<int32_t>>;

std::string DataPath(const std::string& name) { return TestData("dataset/" + name); }

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void WriteAll(const std::string& path, const std::string& bytes) {
  fs::remove(path);  // truncating instead makes some file systems flush
  std::ofstream(path, std::ios::binary) << bytes;
}

class IndexedDatasetFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() /
              ("retrace_idx_" + std::to_string(getpid()) + "_" + info->name());
    fs::create_directories(folder_);
    prefix_ = (folder_ / "d").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  Status WriteDocuments(
      const Documents& documents, int64_t vocab_size,
      IndexedDatasetWriter::Existing existing = IndexedDatasetWriter::Existing::kRefuse) {
    auto writer = IndexedDatasetWriter::Create(prefix_, vocab_size);
    if (!writer.ok()) return writer.status();
    for (const auto& document : documents) RT_RETURN_IF_ERROR(writer->AddDocument(document));
    auto outcome = writer->Publish(existing);
    outcome_ = outcome.ok() ? *outcome : IndexedDatasetWriter::Outcome::kWritten;
    return outcome.status();
  }

  size_t FilesInFolder() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  // A header and arrays by hand, to build files that no writer would.
  void WriteRaw(uint8_t code, const std::vector<int32_t>& lengths,
                const std::vector<int64_t>& offsets, const std::vector<int64_t>& boundaries,
                const std::string& bin, const std::string& tail = "") {
    std::string idx("MMIDIDX\0\0", 9);
    const auto append = [&idx](auto value) {
      idx.append(reinterpret_cast<const char*>(&value), sizeof value);
    };
    append(uint64_t{1});
    append(code);
    append(uint64_t{lengths.size()});
    append(uint64_t{boundaries.size()});
    for (int32_t length : lengths) append(length);
    for (int64_t offset : offsets) append(offset);
    for (int64_t boundary : boundaries) append(boundary);
    WriteAll(prefix_ + ".idx", idx + tail);
    WriteAll(prefix_ + ".bin", bin);
  }

  std::string OpenError(StatusCode expected = StatusCode::kDamaged) {
    auto dataset = IndexedDataset::Open(prefix_);
    if (dataset.ok()) return "opened";
    EXPECT_EQ(expected, dataset.status().code()) << dataset.status().message();
    return dataset.status().message();
  }

  fs::path folder_;
  std::string prefix_;
  IndexedDatasetWriter::Outcome outcome_ = IndexedDatasetWriter::Outcome::kWritten;
};

// What a reader sees of a dataset, or the error.
Result<Documents> ReadDocuments(const std::string& prefix) {
  RT_ASSIGN_OR_RETURN(const IndexedDataset dataset, IndexedDataset::Open(prefix));
  Documents documents(static_cast<size_t>(dataset.sequences()));
  for (int64_t i = 0; i < dataset.sequences(); ++i) {
    RT_RETURN_IF_ERROR(dataset.Read(i, &documents[static_cast<size_t>(i)]));
  }
  return documents;
}

TEST(IndexedDataset, BothFilesOfMegatronHoldTheExpectedDocuments) {
  const auto expected = nlohmann::json::parse(ReadAll(DataPath("expected.json")));
  auto narrow = ReadDocuments(DataPath("tiny")), wide = ReadDocuments(DataPath("tiny_i32.idx"));
  ASSERT_TRUE(narrow.ok()) << narrow.status().message();
  ASSERT_TRUE(wide.ok()) << wide.status().message();
  EXPECT_EQ(*narrow, *wide);
  const auto lengths = expected["doc_lengths"].get<std::vector<size_t>>();
  ASSERT_EQ(lengths.size(), narrow->size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    ASSERT_EQ(lengths[i], (*narrow)[i].size());
    EXPECT_EQ(511, (*narrow)[i].back());  // each ends in eod
  }
  auto dataset = IndexedDataset::Open(DataPath("tiny"));
  EXPECT_EQ(expected["num_tokens"].get<int64_t>(), dataset->tokens());
  EXPECT_EQ(expected["num_docs"].get<int64_t>(), dataset->documents());
  EXPECT_EQ(TokenType::kU16, dataset->token_type());
  EXPECT_EQ(TokenType::kI32, IndexedDataset::Open(DataPath("tiny_i32"))->token_type());
}

TEST_F(IndexedDatasetFiles, WriterReproducesMegatronsBytes) {
  const Documents documents = ReadDocuments(DataPath("tiny")).value();
  ASSERT_TRUE(WriteDocuments(documents, 512).ok());
  EXPECT_EQ(ReadAll(DataPath("tiny.idx")), ReadAll(prefix_ + ".idx"));
  EXPECT_EQ(ReadAll(DataPath("tiny.bin")), ReadAll(prefix_ + ".bin"));
  ASSERT_TRUE(WriteDocuments(documents, 262144, IndexedDatasetWriter::Existing::kReplace).ok());
  EXPECT_EQ(ReadAll(DataPath("tiny_i32.idx")), ReadAll(prefix_ + ".idx"));
  EXPECT_EQ(ReadAll(DataPath("tiny_i32.bin")), ReadAll(prefix_ + ".bin"));
  EXPECT_EQ(2u, FilesInFolder());
}

TEST_F(IndexedDatasetFiles, IdentityIsTheIndexAndTheSizeOfTheBin) {
  ASSERT_TRUE(WriteDocuments({{1, 2}, {3}}, 10).ok());
  std::string bytes = ReadAll(prefix_ + ".idx");
  const uint64_t size = ReadAll(prefix_ + ".bin").size();
  bytes.append(reinterpret_cast<const char*>(&size), 8);
  EXPECT_EQ(DigestOf(bytes), IndexedDataset::Open(prefix_)->identity());
}

TEST_F(IndexedDatasetFiles, VocabularyOf65500NeedsFourBytes) {
  ASSERT_TRUE(WriteDocuments({{65498}}, 65499).ok());
  EXPECT_EQ(TokenType::kU16, IndexedDataset::Open(prefix_)->token_type());
  ASSERT_TRUE(WriteDocuments({{65499}}, 65500, IndexedDatasetWriter::Existing::kReplace).ok());
  EXPECT_EQ(TokenType::kI32, IndexedDataset::Open(prefix_)->token_type());
  EXPECT_EQ(Documents{{65499}}, ReadDocuments(prefix_).value());
}

TEST_F(IndexedDatasetFiles, EmptyDocumentsAndEmptyDatasetsRoundTrip) {
  for (const Documents& documents :
       {Documents{}, Documents{{}}, Documents{{}, {5}, {}, {6, 7}, {}}}) {
    ASSERT_TRUE(WriteDocuments(documents, 10, IndexedDatasetWriter::Existing::kReplace).ok());
    auto read = ReadDocuments(prefix_);
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_EQ(documents, *read);
  }
}

TEST_F(IndexedDatasetFiles, EveryIntegerTypeIsRead) {
  const auto bytes = [](auto... values) {
    std::string text;
    (text.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
    return text;
  };
  const struct {
    uint8_t code;
    std::string bin;
    int32_t big;
  } cases[] = {{1, bytes(uint8_t{7}, uint8_t{255}), 255},
               {2, bytes(int8_t{7}, int8_t{127}), 127},
               {3, bytes(int16_t{7}, int16_t{32767}), 32767},
               {4, bytes(int32_t{7}, int32_t{2147483647}), 2147483647},
               {5, bytes(int64_t{7}, int64_t{2147483647}), 2147483647},
               {8, bytes(uint16_t{7}, uint16_t{65535}), 65535}};
  for (const auto& c : cases) {
    const int64_t width = static_cast<int64_t>(c.bin.size() / 2);
    WriteRaw(c.code, {1, 1}, {0, width}, {0, 2}, c.bin);
    auto read = ReadDocuments(prefix_);
    ASSERT_TRUE(read.ok()) << read.status().message();
    EXPECT_EQ((Documents{{7}, {c.big}}), *read) << int{c.code};
    EXPECT_EQ(1, IndexedDataset::Open(prefix_)->documents());
  }
}

TEST_F(IndexedDatasetFiles, ModesOfMultimodalFilesAreAllowedAndNothingElseIs) {
  WriteRaw(1, {1, 1}, {0, 1}, {0, 1, 2}, "ab", "\x01\x02");
  auto dataset = IndexedDataset::Open(prefix_);
  ASSERT_TRUE(dataset.ok()) << dataset.status().message();
  EXPECT_TRUE(dataset->has_modes());
  for (const char* tail : {"x", "xyz"}) {
    WriteRaw(1, {1, 1}, {0, 1}, {0, 1, 2}, "ab", tail);
    EXPECT_NE(std::string::npos, OpenError().find("end of the file"));
  }
}

TEST_F(IndexedDatasetFiles, FloatingPointTokensAreRefusedByName) {
  WriteRaw(6, {1}, {0}, {0, 1}, "12345678");
  EXPECT_NE(std::string::npos, OpenError(StatusCode::kUnsupported).find("float64"));
  WriteRaw(7, {1}, {0}, {0, 1}, "1234");
  EXPECT_NE(std::string::npos, OpenError(StatusCode::kUnsupported).find("float32"));
  WriteRaw(9, {1}, {0}, {0, 1}, "1");
  EXPECT_NE(std::string::npos, OpenError().find("dtype"));
}

TEST_F(IndexedDatasetFiles, EachBadFieldIsNamedInTheError) {
  const std::vector<int64_t> good_boundaries = {0, 1, 2};
  WriteRaw(3, {1, -1}, {0, 2}, good_boundaries, "abcd");
  EXPECT_NE(std::string::npos, OpenError().find("length of sequence 1"));
  for (const int64_t offset :
       {int64_t{-2}, int64_t{1}, int64_t{0}, int64_t{4}, INT64_MAX, INT64_MIN}) {
    WriteRaw(3, {1, 1}, {0, offset}, good_boundaries, "abcd");
    EXPECT_NE(std::string::npos, OpenError().find("offset of sequence 1")) << offset;
  }
  WriteRaw(3, {1, INT32_MAX}, {0, 2}, good_boundaries, "abcd");
  EXPECT_NE(std::string::npos, OpenError().find("truncated"));
  WriteRaw(3, {1, 1}, {0, 2}, good_boundaries, "abc");
  EXPECT_NE(std::string::npos, OpenError().find("truncated"));
  WriteRaw(3, {1, 1}, {0, 2}, good_boundaries, "abcdef");
  EXPECT_NE(std::string::npos, OpenError().find("another .idx"));
  for (const std::vector<int64_t>& boundaries :
       {std::vector<int64_t>{1, 1, 2}, {0, 1, 1}, {0, 3, 2}, {0, -1, 2}, {0, 2, 1, 2}, {2}}) {
    WriteRaw(3, {1, 1}, {0, 2}, boundaries, "abcd");
    EXPECT_NE(std::string::npos, OpenError().find("document boundary"));
  }
}

TEST_F(IndexedDatasetFiles, HugeCountsAreRefusedWithoutOverflow) {
  ASSERT_TRUE(WriteDocuments({{1}, {2}}, 10).ok());
  const std::string good = ReadAll(prefix_ + ".idx");
  for (const uint64_t count : {~uint64_t{0}, uint64_t{1} << 63, (uint64_t{1} << 62) + 2,
                               uint64_t{0x1555555555555556}, uint64_t{1} << 61}) {
    for (const size_t at : {size_t{18}, size_t{26}}) {
      std::string bad = good;
      std::memcpy(bad.data() + at, &count, 8);
      WriteAll(prefix_ + ".idx", bad);
      EXPECT_NE("opened", OpenError()) << count;
    }
  }
}

TEST_F(IndexedDatasetFiles, TokensOutsideTheVocabularyAreErrorsWhenRead) {
  WriteRaw(4, {2}, {0}, {0, 1}, std::string("\x05\0\0\0\xff\xff\xff\xff", 8));
  auto dataset = IndexedDataset::Open(prefix_, 6);
  ASSERT_TRUE(dataset.ok());
  int32_t token = 0;
  EXPECT_TRUE(dataset->Read(0, 0, 1, &token).ok());
  EXPECT_EQ(5, token);
  const Status negative = dataset->Read(0, 1, 1, &token);
  EXPECT_EQ(StatusCode::kDamaged, negative.code());
  EXPECT_NE(std::string::npos, negative.message().find("byte 4"));
  EXPECT_NE(std::string::npos, negative.message().find("got -1"));
  EXPECT_EQ(StatusCode::kDamaged, IndexedDataset::Open(prefix_, 5)->Read(0, 0, 1, &token).code());
  EXPECT_EQ(StatusCode::kUsage, dataset->Read(0, 1, 2, &token).code());
  WriteRaw(5, {1}, {0}, {0, 1}, std::string("\0\0\0\0\x01\0\0\0", 8));  // 2^32
  EXPECT_EQ(StatusCode::kDamaged, IndexedDataset::Open(prefix_)->Read(0, 0, 1, &token).code());
}

TEST_F(IndexedDatasetFiles, FileThatShrinksUnderTheMapGivesAnError) {
  std::vector<int32_t> long_document(100000, 1);
  for (const char* suffix : {".bin", ".idx"}) {
    ASSERT_TRUE(WriteDocuments({long_document}, 10, IndexedDatasetWriter::Existing::kReplace).ok());
    auto dataset = IndexedDataset::Open(prefix_);
    ASSERT_TRUE(dataset.ok());
    fs::resize_file(prefix_ + suffix, 0);
    std::vector<int32_t> tokens;
    const Status status = dataset->Read(0, &tokens);
    EXPECT_EQ(StatusCode::kDamaged, status.code());
    EXPECT_NE(std::string::npos, status.message().find("truncated while in use"));
  }
}

TEST_F(IndexedDatasetFiles, ReplacedDatasetStaysReadableToWhoeverHasItOpen) {
  ASSERT_TRUE(WriteDocuments({{1, 2, 3}}, 10).ok());
  auto dataset = IndexedDataset::Open(prefix_);
  ASSERT_TRUE(WriteDocuments({{4}}, 10, IndexedDatasetWriter::Existing::kReplace).ok());
  std::vector<int32_t> tokens;
  ASSERT_TRUE(dataset->Read(0, &tokens).ok());
  EXPECT_EQ((std::vector<int32_t>{1, 2, 3}), tokens);
}

TEST_F(IndexedDatasetFiles, ExistingDatasetIsKeptUnlessAskedAndIdenticalOneIsNoError) {
  ASSERT_TRUE(WriteDocuments({{1}}, 10).ok());
  EXPECT_EQ(IndexedDatasetWriter::Outcome::kWritten, outcome_);
  ASSERT_TRUE(WriteDocuments({{1}}, 10).ok());
  EXPECT_EQ(IndexedDatasetWriter::Outcome::kIdentical, outcome_);
  EXPECT_EQ(StatusCode::kUsage, WriteDocuments({{2}}, 10).code());
  EXPECT_EQ(Documents{{1}}, ReadDocuments(prefix_).value());
  EXPECT_EQ(2u, FilesInFolder());  // no partial files
}

TEST_F(IndexedDatasetFiles, BinLeftByACrashBetweenTheRenamesIsCompleted) {
  ASSERT_TRUE(WriteDocuments({{1, 2}}, 10).ok());
  fs::remove(prefix_ + ".idx");
  EXPECT_TRUE(WriteDocuments({{1, 2}}, 10).ok());
  EXPECT_TRUE(ReadDocuments(prefix_).ok());
}

TEST_F(IndexedDatasetFiles, SecondWriterOfOneNameIsRefusedAndLeftoversAreTakenOver) {
  WriteAll(prefix_ + ".bin.partial", "left by a crash");
  auto first = IndexedDatasetWriter::Create(prefix_, 10);
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_EQ(StatusCode::kFailed, IndexedDatasetWriter::Create(prefix_, 10).status().code());
  ASSERT_TRUE(first->AddDocument({3}).ok());
  EXPECT_EQ(StatusCode::kUsage, first->AddDocument({10}).code());
  EXPECT_EQ(StatusCode::kUsage, first->AddDocument({-1}).code());
  ASSERT_TRUE(first->Publish(IndexedDatasetWriter::Existing::kRefuse).ok());
  EXPECT_EQ(Documents{{3}}, ReadDocuments(prefix_).value());
}

TEST_F(IndexedDatasetFiles, MissingFilesAndFoldersGiveErrors) {
  EXPECT_EQ(StatusCode::kUsage, IndexedDataset::Open(prefix_).status().code());
  WriteAll(prefix_ + ".idx", "x");
  EXPECT_EQ(StatusCode::kUsage, IndexedDataset::Open(prefix_).status().code());
  fs::remove(prefix_ + ".idx");
  fs::create_directory(prefix_ + ".idx");
  EXPECT_EQ(StatusCode::kDamaged, IndexedDataset::Open(prefix_).status().code());
  EXPECT_FALSE(IndexedDatasetWriter::Create(prefix_ + "/no/such/folder", 10).ok());
}

TEST_F(IndexedDatasetFiles, EveryTruncationOfTheIndexIsRefused) {
  for (const Documents& documents :
       {Documents{{1, 2, 3}, {}, {4}, {5, 6}}, Documents(13, {1}), Documents(8, {1, 2})}) {
    ASSERT_TRUE(WriteDocuments(documents, 10, IndexedDatasetWriter::Existing::kReplace).ok());
    const std::string good = ReadAll(prefix_ + ".idx");
    for (size_t size = 0; size < good.size(); ++size) {
      WriteAll(prefix_ + ".idx", good.substr(0, size));
      EXPECT_NE("opened", OpenError()) << size;
    }
    fs::remove(prefix_ + ".idx");
  }
}

TEST_F(IndexedDatasetFiles, EveryTruncationOfTheBinIsRefused) {
  ASSERT_TRUE(WriteDocuments({{1, 2, 3}, {}, {4}}, 10).ok());
  const std::string good = ReadAll(prefix_ + ".bin");
  for (size_t size = 0; size < good.size(); ++size) {
    WriteAll(prefix_ + ".bin", good.substr(0, size));
    EXPECT_NE("opened", OpenError()) << size;
  }
}

TEST_F(IndexedDatasetFiles, EverySingleBitFlipOfTheIndexIsRefusedOrReadsTheSame) {
  // Only the grouping into documents and the modes, which no sample depends on, can change
  // unnoticed.
  const auto flip_all = [this](size_t boundaries_at) {
    const std::string good = ReadAll(prefix_ + ".idx");
    const Documents expected = ReadDocuments(prefix_).value();
    for (size_t bit = 0; bit < good.size() * 8; ++bit) {
      std::string bad = good;
      bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
      WriteAll(prefix_ + ".idx", bad);
      auto read = ReadDocuments(prefix_);
      if (!read.ok()) continue;
      EXPECT_LE(boundaries_at, bit / 8);
      EXPECT_EQ(expected, *read) << "bit " << bit;
    }
  };
  // Lengths 0, 1, 2, many; 13 and 8 sequences make counts and the optional modes look alike.
  for (const Documents& documents :
       {Documents{{1, 2, 3}, {}, {4}, {5, 6}}, Documents(13, {1}), Documents(8, {1, 2})}) {
    ASSERT_TRUE(WriteDocuments(documents, 10, IndexedDatasetWriter::Existing::kReplace).ok());
    flip_all(34 + 12 * documents.size());
  }
  WriteRaw(1, {1, 2, 1, 1}, {0, 1, 3, 4}, {0, 2, 4}, "abcde", "\x01\x01\x01\x01");
  flip_all(34 + 12 * 4);
}

}  // namespace
}  // namespace retrace
