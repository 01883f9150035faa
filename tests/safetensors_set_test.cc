// Safetensors as they are written, what is said of damaged ones, and models over several files.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "formats/safetensors.h"
#include "tests/small_run.h"

namespace retrace {
namespace {

std::string File(const std::string& header, size_t data_bytes) {
  const uint64_t size = header.size();
  std::string text(reinterpret_cast<const char*>(&size), 8);
  return text + header + std::string(data_bytes, '\1');
}

// What opening a file of this text says; "": it opens.
std::string Complaint(const std::string& text) {
  const TempDir temp;
  WriteFileText(temp / "x.safetensors", text);
  const Result<SafetensorsFile> file = SafetensorsFile::Open(temp / "x.safetensors");
  if (file.ok()) return "";
  EXPECT_EQ(StatusCode::kDamaged, file.status().code());
  EXPECT_NE(std::string::npos, file.status().message().find("x.safetensors"));
  return file.status().message();
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TensorSource Bytes4(const std::string& name, std::vector<float> values) {
  const int64_t count = std::ssize(values);
  return {name, TensorType::kF32, {count}, [values](const TensorSource::Sink& sink) {
            return sink(values.data(), values.size() * sizeof(float));
          }};
}

TEST(SafetensorsWriter, WhatIsWrittenReadsBackToTheBit) {
  const TempDir temp;
  const std::vector<float> odd = {-0.0f, NAN, INFINITY, 1e-45f, 0.1f, -3.0f};
  const TensorView view(2, 3, odd.data());
  ASSERT_TRUE(WriteSafetensors(temp / "x", {SourceOf("b", {2, 3}, view), Bytes4("a", {7})},
                               {{"format", "pt"}, {"why", "a \"test\""}})
                  .ok());
  const SafetensorsFile file = SafetensorsFile::Open(temp / "x").value();
  EXPECT_EQ("a \"test\"", file.metadata().at("why"));
  EXPECT_EQ((std::vector<int64_t>{2, 3}), file.tensors().at("b").shape);
  EXPECT_EQ(0u, file.tensors().at("b").offset_bytes % 8) << "readers map tensors in place";
  const std::vector<float> read = file.ReadFloat("b").value();
  EXPECT_EQ(0, std::memcmp(odd.data(), read.data(), 24));
  EXPECT_EQ(7, file.ReadFloat("a").value()[0]);
  const Status absent = file.ReadFloat("c").status();
  EXPECT_EQ(StatusCode::kUsage, absent.code());
  EXPECT_TRUE(Contains(absent.message(), "nearest")) << absent.message();
}

TEST(SafetensorsReader, EveryHalfReadsAsTheNumberItIs) {
  const TempDir temp;
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  ASSERT_TRUE(WriteSafetensors(temp / "x",
                               {{"h",
                                 TensorType::kF16,
                                 {65536},
                                 [&](const TensorSource::Sink& sink) {
                                   return sink(halves.data(), 2 * halves.size());
                                 }}},
                               {})
                  .ok());
  const std::vector<float> read = SafetensorsFile::Open(temp / "x").value().ReadFloat("h").value();
  for (uint32_t i = 0; i < 65536; ++i) {
    const int exponent = static_cast<int>(i >> 10 & 31);
    const double fraction = i & 1023;
    const double size =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31) {
      ASSERT_EQ(fraction != 0, std::isnan(read[i])) << i;
      ASSERT_EQ(fraction == 0, std::isinf(read[i])) << i;
    } else {
      ASSERT_EQ(i >> 15 ? -size : size, read[i]) << i;
    }
    ASSERT_EQ(i >> 15 != 0, std::signbit(read[i])) << i;
  }
}

TEST(SafetensorsReader, DamageIsNamed) {
  const std::string one = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  EXPECT_EQ("", Complaint(File(one, 8)));
  EXPECT_TRUE(Contains(Complaint(""), "header length"));
  EXPECT_TRUE(Contains(Complaint("1234567"), "header length"));
  EXPECT_TRUE(Contains(Complaint(std::string(8, '\xff')), "header length"));
  std::string oversized = File(one, 8);
  oversized[4] = 1;  // 4 GiB of header
  EXPECT_TRUE(Contains(Complaint(oversized), "header length"));
  EXPECT_TRUE(Contains(Complaint(File("[1, 2]", 0)), "JSON object"));
  EXPECT_TRUE(Contains(Complaint(File("{\"a\":", 0)), "JSON object"));
  EXPECT_TRUE(Contains(Complaint(File(one, 9)), "1 bytes after the last tensor"));
  EXPECT_TRUE(Contains(Complaint(File(one, 7)), "data_offsets [0, 8]"));
  EXPECT_TRUE(
      Contains(Complaint(File(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8)),
               "hold 8 bytes"));
  EXPECT_TRUE(Contains(Complaint(File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                                      R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                      8)),
                       "'a' twice"));
  EXPECT_TRUE(Contains(Complaint(File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                                      R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                                      8)),
                       "used twice"));
  EXPECT_TRUE(
      Contains(Complaint(File(R"({"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", 8)),
               "unknown dtype"));
  EXPECT_TRUE(Contains(
      Complaint(
          File(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8)),
      "shape"));
  EXPECT_TRUE(Contains(Complaint(File(R"({"__metadata__":{"a":1}})", 0)), "__metadata__"));
}

class SafetensorsSets : public testing::Test {
 protected:
  // Two tensors to a file.
  void SetUp() override {
    const Result<std::vector<std::string>> names = WriteSafetensorsSet(
        temp_.path(), "model",
        {Bytes4("a", {1}), Bytes4("b", {2}), Bytes4("c", {3}), Bytes4("d", {4, 5, 6})},
        {{"format", "pt"}}, 8);
    ASSERT_TRUE(names.ok());
    ASSERT_EQ((std::vector<std::string>{
                  "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                  "model-00003-of-00003.safetensors", "model.safetensors.index.json"}),
              *names);
  }
  std::string Refused() {
    const Result<SafetensorsSet> set = SafetensorsSet::Open(temp_.path());
    return set.ok() ? "" : set.status().message();
  }
  void EditIndex(const std::string& from, const std::string& to) {
    const std::string path = temp_ / "model.safetensors.index.json";
    std::string text = ReadFileText(path);
    ASSERT_TRUE(Contains(text, from));
    WriteFileText(path, text.replace(text.find(from), from.size(), to));
  }
  TempDir temp_;
};

TEST_F(SafetensorsSets, AModelOverSeveralFilesReadsAsOne) {
  for (const std::string& path : {temp_.path(), temp_ / "model.safetensors.index.json"}) {
    const SafetensorsSet set = SafetensorsSet::Open(path).value();
    ASSERT_EQ(4u, set.tensors().size());
    EXPECT_EQ(3, set.ReadExactFloat("c").value()[0]);
    EXPECT_EQ(6, set.ReadExactFloat("d").value()[2]);
  }
}

TEST_F(SafetensorsSets, AnIndexThatDoesNotFitItsFilesIsRefused) {
  EditIndex("\"b\": \"model-00001", "\"b\": \"model-00002");
  EXPECT_TRUE(Contains(Refused(), "expected tensor 'b' in model-00002")) << Refused();
}

TEST_F(SafetensorsSets, AnIndexNamesNoFileOutsideItsFolder) {
  EditIndex("model-00001-of-00003", "../model-00001-of-00003");
  EXPECT_TRUE(Contains(Refused(), "same folder")) << Refused();
}

TEST_F(SafetensorsSets, AnIndexThatNamesATensorTwiceIsRefused) {
  EditIndex("\"b\":", "\"a\":");
  EXPECT_TRUE(Contains(Refused(), "'a' twice")) << Refused();
}

TEST_F(SafetensorsSets, AMissingFileIsNamed) {
  std::filesystem::remove(temp_ / "model-00002-of-00003.safetensors");
  EXPECT_TRUE(Contains(Refused(), "model-00002-of-00003.safetensors")) << Refused();
}

TEST_F(SafetensorsSets, NothingIsRoundedSilently) {
  const std::vector<double> exact = {0.5, -0.0}, inexact = {0.1};
  const auto source = [](const char* name, const std::vector<double>& x) {
    return TensorSource{
        name, TensorType::kF64, {std::ssize(x)}, [&x](const TensorSource::Sink& sink) {
          return sink(x.data(), 8 * x.size());
        }};
  };
  ASSERT_TRUE(WriteSafetensors(temp_ / "f64.safetensors",
                               {source("exact", exact), source("inexact", inexact)}, {})
                  .ok());
  const SafetensorsSet set = SafetensorsSet::Open(temp_ / "f64.safetensors").value();
  const std::vector<float> read = set.ReadExactFloat("exact").value();
  EXPECT_EQ(0.5f, read[0]);
  EXPECT_TRUE(std::signbit(read[1]));
  const Status refused = set.ReadExactFloat("inexact").status();
  EXPECT_EQ(StatusCode::kUnsupported, refused.code());
  EXPECT_TRUE(Contains(refused.message(), "element 0 = 0.1")) << refused.message();
}

}  // namespace
}  // namespace retrace
