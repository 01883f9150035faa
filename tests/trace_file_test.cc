// Files of traces: what is written is read, and what is not whole is refused.
#include "formats/trace_file.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/small_run.h"

namespace retrace {
namespace {

const float kX[] = {1, -2, 3}, kY[] = {0.5f, NAN};

TraceOp OpOf(const std::string& name, const float* x, int64_t cols) {
  TraceOp op;
  op.name = name;
  op.rows = 1;
  op.cols = cols;
  op.digest = TensorDigest(x, cols * sizeof(float));
  op.l2 = x == kY ? NAN : 3.5;
  op.max = 3;
  return op;
}

const TraceHeader kHeader = {"retrace 9", "a \"run\"", 12, "ff", "name = 'x'\n", "identical"};

std::string Write(const std::string& path, bool tensors) {
  const std::vector<TraceOp> ops = {OpOf("z/first", kX, 3), OpOf("a/second", kY, 2)};
  if (!tensors) {
    EXPECT_TRUE(WriteTraceDigests(path, kHeader, ops).ok());
    return ReadFileText(path);
  }
  std::vector<TensorSource> sources = {{"a/second", TensorType::kF32, {1, 2},
                                        [](const TensorSource::Sink& sink) {
                                          return sink(kY, sizeof kY);
                                        }}};
  EXPECT_TRUE(WriteTraceTensors(path, kHeader, ops, std::move(sources)).ok());
  return ReadFileText(path);
}

TEST(TraceFile, WhatIsWrittenIsReadInOrder) {
  const TempDir dir;
  for (const bool tensors : {false, true}) {
    Write(dir / "t", tensors);
    EXPECT_TRUE(TraceFile::IsOne(dir / "t"));
    const TraceFile trace = TraceFile::Open(dir / "t").value();
    EXPECT_EQ(12, trace.header().update);
    EXPECT_EQ("a \"run\"", trace.header().run);
    EXPECT_EQ("name = 'x'\n", trace.header().recipe);
    ASSERT_EQ(2u, trace.ops().size());
    EXPECT_EQ("z/first", trace.ops()[0].name);
    EXPECT_EQ(OpOf("z/first", kX, 3).digest, trace.ops()[0].digest);
    EXPECT_EQ(3.5, trace.ops()[0].l2);
    EXPECT_TRUE(std::isnan(trace.ops()[1].l2));
    EXPECT_EQ(tensors, trace.has_tensors());
    EXPECT_EQ(StatusCode::kUsage, trace.Read(trace.ops()[0]).status().code());
    EXPECT_TRUE(!tensors || trace.Read(trace.ops()[1]).value()[0] == 0.5);
  }
}

TEST(TraceFile, NoPartOfAFilePassesForAWholeOne) {
  const TempDir dir;
  for (const bool tensors : {false, true}) {
    const std::string whole = Write(dir / "t", tensors);
    for (size_t size = 0; size < whole.size(); ++size) {
      WriteFileText(dir / "t", whole.substr(0, size));
      const Result<TraceFile> trace = TraceFile::Open(dir / "t");
      ASSERT_FALSE(trace.ok()) << size;
      EXPECT_TRUE(trace.status().code() == StatusCode::kDamaged ||
                  trace.status().code() == StatusCode::kUsage)
          << trace.status().message();
    }
  }
}

TEST(TraceFile, AFlippedBitNeverCrashesTheReader) {
  const TempDir dir;
  for (const bool tensors : {false, true}) {
    const std::string whole = Write(dir / "t", tensors);
    for (size_t bit = 0; bit < 8 * whole.size(); bit += 3) {
      std::string text = whole;
      text[bit / 8] ^= static_cast<char>(1 << bit % 8);
      WriteFileText(dir / "t", text);
      TraceFile::IsOne(dir / "t");
      const Result<TraceFile> trace = TraceFile::Open(dir / "t");
      EXPECT_TRUE(trace.ok() || trace.status().code() != StatusCode::kFailed);
    }
  }
}

TEST(TraceFile, AFileThatWasCutBetweenTwoOpsIsKnown) {
  const TempDir dir;
  const std::string text = Write(dir / "t", false);
  const size_t last = text.rfind('\n', text.size() - 2);
  std::ofstream(dir / "cut") << text.substr(0, last + 1);
  const Status status = TraceFile::Open(dir / "cut").status();
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_NE(std::string::npos, status.message().find("expected 2 ops")) << status.message();
}

TEST(TraceFile, ElementsThatAreNotOfTheDigestBesideThemAreDamage) {
  const TempDir dir;
  std::string text = Write(dir / "t", true);
  text[text.size() - sizeof kY] ^= 1;
  std::ofstream(dir / "changed") << text;
  const Status status = TraceFile::Open(dir / "changed").status();
  EXPECT_EQ(StatusCode::kDamaged, status.code());
  EXPECT_NE(std::string::npos, status.message().find("a/second")) << status.message();
}

TEST(TraceFile, TheErrorNamesTheLineAndWhatIsWrong) {
  const TempDir dir;
  const std::string whole = Write(dir / "t", false);
  const auto message = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    const size_t at = text.find(from);
    EXPECT_NE(std::string::npos, at) << from;
    WriteFileText(dir / "t", text.replace(at, from.size(), to));
    const Result<TraceFile> trace = TraceFile::Open(dir / "t");
    EXPECT_FALSE(trace.ok());
    return trace.ok() ? "" : trace.status().message();
  };
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(contains(message("a/second", "z/first"), "line 3: the op 'z/first' stands there twice"));
  EXPECT_TRUE(contains(message("[1,3]", "[1,-3]"), "line 2"));
  EXPECT_TRUE(contains(message("\"F32\"", "\"I32\""), "got 'I32'"));
  EXPECT_TRUE(contains(message("\"op\"", "\"type\""), "twice"));
  EXPECT_TRUE(contains(message("\"format\":1", "\"format\":2"), "format 2"));
  EXPECT_TRUE(contains(message("\"update\":12", "\"update\":\"x\""), "'update'"));
}

}  // namespace
}  // namespace retrace
