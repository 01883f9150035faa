// The architecture as tests: which folder may include which, where third-party headers may stand,
// and what the files of an instruction set may define. Each check is also shown a planted fault.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/places.h"

namespace retrace {
namespace {

namespace fs = std::filesystem;

// core <- kernels, formats <- replay <- surgery <- cmd. What a folder may include, itself apart.
const std::map<std::string, std::set<std::string>> kLayers = {
    {"core", {}},
    {"kernels", {"core"}},
    {"formats", {"core"}},
    {"replay", {"core", "kernels", "formats"}},
    {"surgery", {"core", "kernels", "formats", "replay"}},
    {"cmd", {"core", "kernels", "formats", "replay", "surgery"}},
};

// Third-party headers of a folder: its .cc and .cu files may include what begins like this.
const std::map<std::string, std::vector<std::string>> kThirdParty = {
    {"core", {"fmt/", "nlohmann/", "toml++/", "xxhash.h", "xxh_x86dispatch.h"}},
    {"kernels", {"cuda", "cooperative_groups"}},
    {"formats", {"fmt/", "nlohmann/", "hdf5.h", "zstd.h", "zlib.h", "sentencepiece_", "xxhash.h"}},
    {"replay", {"fmt/", "nlohmann/", "torch/", "ATen/", "c10/", "gloo/", "nccl.h", "cuda"}},
    {"surgery", {"fmt/", "nlohmann/", "toml++/"}},
    {"cmd", {"fmt/", "nlohmann/", "CLI/", "indicators/"}},
};

// The C++ standard library has no dot or slash in its names; these are C, POSIX and the compiler's.
bool IsSystemHeader(const std::string& name) {
  static const std::set<std::string> kNames = {
      "stdint.h", "string.h",    "stddef.h",    "unistd.h",    "fcntl.h",
      "sched.h",  "dirent.h",    "dlfcn.h",     "time.h",      "signal.h",
      "errno.h",  "immintrin.h", "xmmintrin.h", "emmintrin.h", "poll.h",
      "netdb.h",  "pthread.h",   "setjmp.h",    "ucontext.h",  "gnu/libc-version.h"};
  return name.find_first_of("./") == std::string::npos || name.starts_with("sys/") ||
         name.starts_with("linux/") || name.starts_with("arpa/") || name.starts_with("netinet/") ||
         kNames.contains(name);
}

// What is wrong with `line` standing in file `path` ("folder/name.h"); empty: nothing.
std::string Violation(const std::string& path, const std::string& line) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"].*)");
  std::smatch match;
  if (!std::regex_match(line, match, kInclude)) return "";
  const std::string name = match[2], folder = path.substr(0, path.find('/'));
  if (match[1] == "\"") {
    const std::string from = name.substr(0, name.find('/'));
    if (from == folder || kLayers.at(folder).contains(from)) return "";
    return path + " includes \"" + name + "\": " + folder + " may not include " + from;
  }
  if (IsSystemHeader(name)) return "";
  if (path.ends_with(".h")) {
    return path + " includes <" + name + ">: third-party headers stand in .cc and .cu files only";
  }
  for (const std::string& prefix : kThirdParty.at(folder)) {
    if (name.starts_with(prefix)) return "";
  }
  return path + " includes <" + name + ">, which is not in " + folder +
         "'s list of third-party headers";
}

std::vector<std::string> SourceFiles(const std::string& folder) {
  std::vector<std::string> files;
  const fs::path root = fs::path(SourceDir()) / folder;
  if (!fs::exists(root)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    const std::string extension = entry.path().extension();
    if (extension == ".h" || extension == ".cc" || extension == ".cu" || extension == ".cuh") {
      files.push_back(fs::relative(entry.path(), SourceDir()));
    }
  }
  return files;
}

TEST(Layering, EveryIncludeFollowsTheLayers) {
  int files = 0;
  for (const auto& [folder, allowed] : kLayers) {
    for (const std::string& path : SourceFiles(folder)) {
      ++files;
      std::ifstream in(fs::path(SourceDir()) / path);
      for (std::string line; std::getline(in, line);) EXPECT_EQ("", Violation(path, line));
    }
  }
  EXPECT_GT(files, 50) << "the scan found hardly any source under " << SourceDir();
}

TEST(Layering, AWrongIncludeIsSeen) {
  EXPECT_EQ("", Violation("kernels/a.h", "#include \"core/status.h\""));
  EXPECT_EQ("", Violation("kernels/a.h", "#include \"kernels/b.h\"  // why"));
  EXPECT_EQ("", Violation("core/a.cc", "#include <fmt/format.h>"));
  EXPECT_EQ("", Violation("core/a.h", "#include <sys/stat.h>"));
  EXPECT_NE("", Violation("kernels/a.h", "#include \"formats/b.h\""));
  EXPECT_NE("", Violation("formats/a.cc", "  #  include \"kernels/b.h\""));
  EXPECT_NE("", Violation("core/a.cc", "#include \"replay/b.h\""));
  EXPECT_NE("", Violation("replay/a.cc", "#include \"surgery/b.h\""));
  EXPECT_NE("", Violation("core/a.h", "#include <fmt/format.h>"));
  EXPECT_NE("", Violation("kernels/a.cc", "#include <fmt/format.h>"));
  EXPECT_NE("", Violation("core/a.cc", "#include \"b.h\"")) << "paths start at the root";
}

// Commands and interventions are named for their verb, whatever the layers below call theirs.
// fmt::print throws where standard error is closed or full, which once ended trainings.
TEST(Layering, CommandsWriteToStandardErrorThroughTheConsole) {
  for (const std::string& path : SourceFiles("cmd")) {
    if (path == "cmd/console.cc") continue;
    std::ifstream in(fs::path(SourceDir()) / path);
    for (std::string line; std::getline(in, line);) {
      EXPECT_EQ(std::string::npos, line.find("print(stderr")) << path << ": use SayError: " << line;
    }
  }
}

TEST(Layering, FileNamesAreUnique) {
  std::map<std::string, std::string> seen;
  for (const char* folder : {"core", "kernels", "formats", "replay"}) {
    for (const std::string& path : SourceFiles(folder)) {
      const auto [first, inserted] = seen.emplace(fs::path(path).filename(), path);
      EXPECT_TRUE(inserted) << path << " has the name of " << first->second;
    }
  }
}

// ---- Instruction sets --------------------------------------------------------------------------

// Objects in the build tree of the files named *SUFFIX.cc.
std::vector<fs::path> Objects(const std::string& suffix) {
  std::vector<fs::path> objects;
  for (const auto& entry : fs::recursive_directory_iterator(BinaryDir())) {
    if (entry.path().string().ends_with(suffix + ".cc.o")) objects.push_back(entry.path());
  }
  return objects;
}

std::vector<std::string> Lines(const std::string& command) {
  std::vector<std::string> lines;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return lines;
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe)) lines.emplace_back(buffer);
  pclose(pipe);
  return lines;
}
bool Have(const std::string& program) {
  return std::system(("command -v " + program + " > /dev/null 2>&1").c_str()) == 0;
}

// A line of nm (address, type, name): is it a definition that another file could share? The linker
// keeps one of such, perhaps that of the greater instruction set, for all processors.
bool IsShared(const std::string& line) {
  static const std::regex kShared(R"(^[0-9a-fA-F]+ [WwVvuC] .*\n?)");
  return std::regex_match(line, kShared);
}

class IsaObjects : public testing::TestWithParam<std::string> {};

TEST_P(IsaObjects, DefineNoSymbolThatAnotherFileCouldShare) {
  if (!Have("nm")) GTEST_SKIP() << "there is no nm to read symbol tables with";
  const std::vector<fs::path> objects = Objects(GetParam());
  ASSERT_GE(objects.size(), 4u) << "objects of *" << GetParam() << ".cc in " << BinaryDir();
  for (const fs::path& object : objects) {
    const std::vector<std::string> symbols = Lines("nm --defined-only '" + object.string() + "'");
    EXPECT_FALSE(symbols.empty()) << object;
    for (const std::string& line : symbols) EXPECT_FALSE(IsShared(line)) << object << ": " << line;
  }
}

TEST_P(IsaObjects, UseTheRegistersOfTheirInstructionSet) {
  if (!Have("objdump")) GTEST_SKIP() << "there is no objdump to disassemble with";
  const std::string register_name = GetParam() == "_avx512" ? "%zmm" : "%ymm";
  for (const fs::path& object : Objects(GetParam())) {
    const std::string command = "objdump -d '" + object.string() + "' | grep -c " + register_name;
    const std::vector<std::string> count = Lines(command);
    ASSERT_EQ(1u, count.size());
    EXPECT_GT(std::stoi(count[0]), 10) << object << " hardly uses " << register_name;
  }
}

INSTANTIATE_TEST_SUITE_P(All, IsaObjects, testing::Values("_avx2", "_avx512"),
                         [](const auto& info) { return info.param.substr(1); });

TEST(IsaObjects, AnAvx512FileStandsBesideEachAvx2File) {
  for (const auto& entry : fs::directory_iterator(fs::path(SourceDir()) / "kernels")) {
    std::string name = entry.path().filename();
    const size_t at = name.find("_avx2.cc");
    if (at == std::string::npos) continue;
    name.replace(at, 8, "_avx512.cc");
    EXPECT_TRUE(fs::exists(entry.path().parent_path() / name)) << name;
  }
}

TEST(IsaObjects, AWeakDefinitionIsSeen) {
  EXPECT_TRUE(IsShared("0000000000000000 W _ZSt3minIlERKT_S2_S2_\n"));
  EXPECT_TRUE(IsShared("0000000000000000 V _ZTVN7retrace4GemmE\n"));
  EXPECT_TRUE(IsShared("0000000000000000 u _ZGVZN7retrace1fEvE1x\n"));
  EXPECT_FALSE(IsShared("0000000000000000 T _ZN7retrace9AdamWAvx2E\n"));
  EXPECT_FALSE(IsShared("0000000000000000 t _ZN7retrace4avx212_GLOBAL__N_1L3AddE\n"));
  EXPECT_FALSE(IsShared("                 U memcpy\n"));
}

}  // namespace
}  // namespace retrace
