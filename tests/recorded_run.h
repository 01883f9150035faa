// A small recorded run, the program's answers, and other programs that read its files. Used by
// tests of export, import, trace and diff.
#ifndef RETRACE_TESTS_RECORDED_RUN_H_
#define RETRACE_TESTS_RECORDED_RUN_H_

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/places.h"
#include "tests/process.h"
#include "tests/test_data.h"

namespace retrace {

using Json = nlohmann::json;

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline Json ParseJson(const Finished& done) {
  Json json = Json::parse(done.out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << done.out << done.err;
  return json;
}

// Has this Python these packages? Else *why tells.
inline bool HasPackages(const std::string& python, const std::string& packages, std::string* why) {
  const TempFolder folder;
  const std::string find =
      "import importlib.util as u, sys; sys.exit(any(u.find_spec(p) is None for p in '" + packages +
      "'.split()))";
  if (!std::filesystem::exists(python)) {
    *why = "there is no " + python;
  } else if (Process({python, "-c", find}, folder / "log").Wait().code != 0) {
    *why = python + " lacks some of: " + packages;
  }
  return why->empty();
}

inline Finished RunPython(const std::string& python, std::vector<std::string> words) {
  const TempFolder folder;
  words.insert(words.begin(), python);
  return Process(words, folder / "log").Wait();
}

// run: examples/tiny.toml, 6 updates, every state kept.
class RecordedRun : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TempFolder;
    run_ = *folder_ / "run";
    const Finished done = RunProgram(
        {"train", SourceDir() + "/examples/tiny.toml", "-o", run_, "--set",
         "data.path=" + TestData("dataset/tiny"), "--until", "6", "--threads", "1", "--quiet"});
    ASSERT_EQ(0, done.code) << done.err;
  }
  static void TearDownTestSuite() { delete folder_; }

  static void Export(const std::string& address, const std::string& out,
                     std::vector<std::string> more = {}) {
    std::vector<std::string> words = {"export", address, "--out", out, "--quiet"};
    words.insert(words.end(), more.begin(), more.end());
    const Finished done = RunProgram(words);
    ASSERT_EQ(0, done.code) << done.err;
  }
  static std::string Refused(const std::vector<std::string>& words, int code) {
    const Finished done = RunProgram(words);
    EXPECT_EQ(code, done.code) << done.out << done.err;
    return done.err;
  }
  std::string Path(const std::string& name) { return *folder_ / name; }

  static inline TempFolder* folder_ = nullptr;
  static inline std::string run_;
};

}  // namespace retrace

#endif  // RETRACE_TESTS_RECORDED_RUN_H_
