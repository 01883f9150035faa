#include "formats/text_source.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace retrace {
namespace {

namespace fs = std::filesystem;
using Texts = std::vector<std::string>;

// A gzip stream of stored (uncompressed) blocks, by its specification (RFC 1951, 1952), with the
// extra header field that dictzip uses if `extra` is not empty.
std::string Gzip(const std::string& text, const std::string& extra = "") {
  std::string out("\x1f\x8b\x08\x00\0\0\0\0\0\x03", 10);
  if (!extra.empty()) {
    out[3] = 4;
    out.push_back(static_cast<char>(extra.size()));
    out.push_back(0);
    out += extra;
  }
  const size_t size = text.size();
  const auto word = [&out](uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
  };
  word(1, 1);
  word(size, 2);
  word(~size, 2);
  out += text;
  uint32_t crc = ~0u;
  for (unsigned char c : text) {
    crc ^= c;
    for (int k = 0; k < 8; ++k) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0u);
  }
  word(~crc, 4);
  word(size, 4);
  return out;
}

class TextSourceFiles : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() /
              ("retrace_text_" + std::to_string(getpid()) + "_" + info->name());
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string File(const std::string& name, const std::string& bytes) {
    const std::string path = (folder_ / name).string();
    fs::remove(path);  // truncating instead makes some file systems flush
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }

  fs::path folder_;
};

Result<Texts> ReadTexts(const TextSourceOptions& options, int64_t* replaced = nullptr) {
  RT_ASSIGN_OR_RETURN(TextSource source, TextSource::Open(options));
  Texts texts;
  std::string text;
  double fraction = 0;
  for (;;) {
    RT_ASSIGN_OR_RETURN(const bool more, source.Next(&text));
    if (!more) break;
    texts.push_back(text);
    EXPECT_LE(fraction, source.Fraction());
    fraction = source.Fraction();
  }
  EXPECT_EQ(1.0, source.Fraction());
  EXPECT_EQ(static_cast<int64_t>(texts.size()), source.documents());
  if (replaced != nullptr) *replaced = source.replaced_sequences();
  return texts;
}

TEST_F(TextSourceFiles, MarginAfterABlankLineStartsADocument) {
  const std::string path =
      File("a.txt",
           "\n\nLarge \\Large\\, n.\n   A note.\n\n   {At large}.\n   Syn: Big.\n"
           "\nLargely\n   In a large manner.\n \nLast\n\n");
  auto texts = ReadTexts({.inputs = {path}, .min_document_bytes = 1});
  ASSERT_TRUE(texts.ok()) << texts.status().message();
  EXPECT_EQ((Texts{"Large \\Large\\, n.\n   A note.\n\n   {At large}.\n   Syn: Big.\n",
                   "Largely\n   In a large manner.\n", "Last\n"}),
            *texts);
}

TEST_F(TextSourceFiles, ShortDocumentsAreGroupedUpToTheMinimum) {
  const std::string path = File("a.txt", "aa\n\nbb\n\ncc\n\ndd\n\nee");
  auto texts = ReadTexts({.inputs = {path}, .min_document_bytes = 6});
  ASSERT_TRUE(texts.ok());
  EXPECT_EQ((Texts{"aa\n\nbb\n", "cc\n\ndd\n", "ee\n"}), *texts);
}

TEST_F(TextSourceFiles, LongDocumentsEndAtTheNextBestPlace) {
  // 8 bytes: at an indented paragraph; 16: at a line end; 32: anywhere.
  auto texts = ReadTexts({.inputs = {File("a", "12345678\n\n  x\n")},
                          .min_document_bytes = 1,
                          .max_document_bytes = 8});
  EXPECT_EQ((Texts{"12345678\n", "  x\n"}), *texts);
  texts = ReadTexts({.inputs = {File("b", "1234567\n1234567\n1234567\n")},
                     .min_document_bytes = 1,
                     .max_document_bytes = 8});
  EXPECT_EQ((Texts{"1234567\n1234567\n", "1234567\n"}), *texts);
  texts = ReadTexts({.inputs = {File("c", std::string(70, 'x'))},
                     .min_document_bytes = 1,
                     .max_document_bytes = 8});
  EXPECT_EQ((Texts{std::string(32, 'x'), std::string(32, 'x'), std::string(6, 'x') + "\n"}), *texts);
}

TEST_F(TextSourceFiles, CutsOfLongLinesDoNotSplitCharacters) {
  std::string line;
  for (int i = 0; i < 50; ++i) line += "\xe2\x82\xac";  // 3 bytes each; 32 is no multiple
  int64_t replaced = -1;
  auto texts = ReadTexts(
      {.inputs = {File("a", line)}, .min_document_bytes = 1, .max_document_bytes = 8}, &replaced);
  ASSERT_TRUE(texts.ok());
  EXPECT_EQ(0, replaced);
  std::string joined;
  for (const auto& text : *texts) joined += text;
  EXPECT_EQ(line + "\n", joined);
  EXPECT_EQ(5u, texts->size());
}

TEST_F(TextSourceFiles, LineEndsAndByteOrderMarksAreMadeUniform) {
  auto texts = ReadTexts(
      {.inputs = {File("a", "\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")}, .min_document_bytes = 1});
  EXPECT_EQ((Texts{"one\ntwo\n", "three\n"}), *texts);
}

TEST_F(TextSourceFiles, DocumentsDoNotSpanFilesAndTheLimitStopsBehindADocument) {
  const Texts paths = {File("a", "aa\nbb\n"), File("b", ""), File("c", "cc\n\ndd\n\nee\n")};
  EXPECT_EQ((Texts{"aa\nbb\n", "cc\n\ndd\n\nee\n"}), *ReadTexts({.inputs = paths}));
  EXPECT_EQ((Texts{"aa\nbb\n", "cc\n"}),
            *ReadTexts({.inputs = paths, .min_document_bytes = 1, .max_text_bytes = 7}));
}

TEST_F(TextSourceFiles, BlocksOfTheReaderDoNotShowInTheText) {
  std::string text;
  for (int i = 0; text.size() < 300000; ++i) {
    text += "line " + std::to_string(i) + (i % 97 == 0 ? "\n\n" : "\n");
  }
  auto texts = ReadTexts({.inputs = {File("a", text)}, .min_document_bytes = 1});
  std::string joined;
  for (size_t i = 0; i < texts->size(); ++i) joined += (i > 0 ? "\n" : "") + (*texts)[i];
  if (text.ends_with("\n\n")) text.pop_back();
  EXPECT_EQ(text, joined);
}

TEST_F(TextSourceFiles, GzipAndDictzipAreReadAsTheirText) {
  const std::string text = "Hello\n\nWorld\n";
  const Texts expected = {"Hello\n", "World\n"};
  for (const std::string& path :
       {File("a.gz", Gzip(text)), File("a.dict.dz", Gzip(text, "RA\x04zzzz")),
        File("noname", Gzip(text)), File("a.txt", text)}) {
    auto texts = ReadTexts({.inputs = {path}, .min_document_bytes = 1});
    ASSERT_TRUE(texts.ok()) << texts.status().message();
    EXPECT_EQ(expected, *texts) << path;
  }
}

TEST_F(TextSourceFiles, DamagedGzipIsAnErrorAtEveryTruncationAndFlip) {
  const std::string text = "Hello\n\nWorld\n", good = Gzip(text);
  for (size_t size = 1; size < good.size(); ++size) {
    auto texts =
        ReadTexts({.inputs = {File("a.gz", good.substr(0, size))}, .min_document_bytes = 1});
    EXPECT_EQ(StatusCode::kDamaged, texts.status().code()) << size;
  }
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    auto texts = ReadTexts({.inputs = {File("a.gz", bad)}, .min_document_bytes = 1});
    if (texts.ok()) {
      EXPECT_EQ((Texts{"Hello\n", "World\n"}), *texts) << bit;  // time, OS: not data
      EXPECT_LT(bit / 8, 10u + 1);                              // or padding of the block header
    }
  }
}

TEST_F(TextSourceFiles, MissingFilesFoldersAndBadOptionsAreUsageErrors) {
  const std::string good = File("a", "a");
  for (const TextSourceOptions& options :
       {TextSourceOptions{}, TextSourceOptions{.inputs = {(folder_ / "none").string()}},
        TextSourceOptions{.inputs = {folder_.string()}},
        TextSourceOptions{.inputs = {good}, .min_document_bytes = 0},
        TextSourceOptions{.inputs = {good}, .min_document_bytes = 9, .max_document_bytes = 8},
        TextSourceOptions{.inputs = {good}, .max_text_bytes = -1}}) {
    EXPECT_EQ(StatusCode::kUsage, TextSource::Open(options).status().code());
  }
}

TEST(Utf8, IllFormedSequencesAreReplacedAsUnicodeRecommends) {
  const struct {
    std::string in, out;
    int64_t replaced;
  } cases[] = {
      {"", "", 0},
      {"plain \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80",
       "plain \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", 0},
      {"a\xff"
       "b",
       "a\xef\xbf\xbd"
       "b",
       1},
      {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd", 2},                                  // overlong
      {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 3},                  // surrogate
      {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 4},  // > U+10FFFF
      {"\xe2\x82", "\xef\xbf\xbd", 1},                                              // cut short
      {"\xf0\x9f\x98"
       "z",
       "\xef\xbf\xbdz", 1},
      {"\xe2\x82\xe2\x82\xac", "\xef\xbf\xbd\xe2\x82\xac", 1},
  };
  for (const auto& c : cases) {
    std::string text = c.in;
    EXPECT_EQ(c.replaced, MakeUtf8WellFormed(&text));
    EXPECT_EQ(c.out, text);
  }
}

TEST(Gcide, EntriesOfTheDictionaryBecomeDocuments) {
  const std::string path = "/usr/share/dictd/gcide.dict.dz";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is not installed (Debian package dict-gcide)";
  auto texts = ReadTexts({.inputs = {path}, .min_document_bytes = 1, .max_text_bytes = 200000});
  ASSERT_TRUE(texts.ok()) << texts.status().message();
  size_t entries = 0;
  for (const auto& text : *texts) {
    EXPECT_NE(' ', text[0]);
    const std::string head = text.substr(0, text.find('\n'));
    if (head.find('\\') != std::string::npos) ++entries;
  }
  EXPECT_GT(entries, texts->size() * 9 / 10);  // "Word \Word\, n."
}

}  // namespace
}  // namespace retrace
