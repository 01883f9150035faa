// SafetensorsFile against files that are not what they say: every truncation, every bit, and
// headers that were written to mislead.
#include "formats/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/small_run.h"

namespace retrace {
namespace {

constexpr char kHeader[] =
    R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},)"
    R"("c":{"dtype":"I32","shape":[],"data_offsets":[32,36]},)"
    R"("d":{"dtype":"F64","shape":[0,7],"data_offsets":[36,36]},"__metadata__":{"from":"a test"}})";

std::string FileText(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  text += header;
  for (size_t i = 0; i < data_bytes; ++i) text += static_cast<char>(i * 37 + 1);
  return text;
}

// Whatever can be read of a file; reading it may fail but not crash.
std::map<std::string, std::vector<float>> Readable(const SafetensorsFile& file) {
  std::map<std::string, std::vector<float>> values;
  for (const auto& [name, tensor] : file.tensors()) {
    (void)file.ReadDouble(name);
    (void)file.ReadInt32(name);
    if (auto floats = file.ReadFloat(name); floats.ok()) values[name] = *floats;
  }
  return values;
}

class Safetensors : public testing::Test {
 protected:
  Result<SafetensorsFile> Open(const std::string& text) {
    WriteFileText(path_, text);
    return SafetensorsFile::Open(path_);
  }

  TempDir folder_;
  const std::string path_ = folder_ / "file.safetensors";
  const std::string whole_ = FileText(kHeader, 36);
};

TEST_F(Safetensors, AWholeFileIsReadByNameAndType) {
  const SafetensorsFile file = Open(whole_).value();
  ASSERT_EQ(4u, file.tensors().size());
  EXPECT_EQ((std::vector<int64_t>{2, 3}), file.tensors().at("a").shape);
  const std::vector<float> a = file.ReadFloat("a").value();
  ASSERT_EQ(6u, a.size());
  EXPECT_EQ(0, std::memcmp(a.data(), whole_.data() + whole_.size() - 36, 24));
  EXPECT_EQ(4u, file.ReadFloat("b").value().size());
  EXPECT_EQ(1u, file.ReadInt32("c").value().size());
  EXPECT_EQ(0u, file.ReadDouble("d").value().size());
  EXPECT_EQ(StatusCode::kDamaged, file.ReadFloat("c").status().code());
  EXPECT_EQ(StatusCode::kUsage, file.ReadFloat("e").status().code());
  EXPECT_EQ(StatusCode::kUsage, SafetensorsFile::Open(path_ + ".none").status().code());
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
  for (size_t size = 0; size < whole_.size(); ++size) {
    EXPECT_EQ(StatusCode::kDamaged, Open(whole_.substr(0, size)).status().code()) << size;
  }
}

TEST_F(Safetensors, EveryFlippedBitIsRefusedOrStaysInBounds) {
  const auto good = Readable(Open(whole_).value());
  for (size_t at = 0; at < whole_.size() * 8; ++at) {
    std::string text = whole_;
    text[at / 8] ^= static_cast<char>(1 << at % 8);
    const Result<SafetensorsFile> file = Open(text);
    if (!file.ok()) {
      EXPECT_EQ(StatusCode::kDamaged, file.status().code()) << at;
      EXPECT_NE(std::string::npos, file.status().message().find(path_)) << at;
      continue;
    }
    size_t bytes = 0;
    for (const auto& [name, tensor] : file->tensors()) bytes += tensor.size_bytes;
    EXPECT_EQ(36u, bytes) << at;  // a changed name, type or value; never another extent
    (void)Readable(*file);
  }
}

TEST_F(Safetensors, MisleadingHeadersAreRefused) {
  const auto one = [](const std::string& entry) { return "{\"a\":" + entry + "}"; };
  for (const std::string& header :
       {std::string("[]"), std::string("{"), std::string(), std::string("null"), one("5"),
        one("{}"), one("[]"), one(R"({"dtype":"F32","shape":[1],"data_offsets":[0]})"),
        one(R"({"dtype":"F32","shape":[1],"data_offsets":[-4,0]})"),
        one(R"({"dtype":"F32","shape":[1],"data_offsets":[0.0,4.0]})"),
        one(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})"),
        one(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"),
        one(R"({"dtype":"F32","shape":[1e0],"data_offsets":[0,4]})"),
        one(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})"),
        one(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"),
        one(R"({"dtype":4,"shape":[1],"data_offsets":[0,4]})"),
        one(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"),
        one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4000]})"),
        // 2^62 elements of 4 bytes are 0 bytes in 64 bits; so are 2^32 x 2^32.
        one(R"({"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]})"),
        one(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]})"),
        one(R"({"dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4]})"),
        one(R"({"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]})"),
        std::string(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                    R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})"),
        std::string(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                    R"("b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})"),
        std::string(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                    R"("a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})"),
        std::string(100000, '[')}) {
    EXPECT_EQ(StatusCode::kDamaged, Open(FileText(header, 4)).status().code())
        << header.substr(0, 100);
  }
}

}  // namespace
}  // namespace retrace
