// What nvcc made of the kernels, as PTX and as machine code for each architecture: no approximate or
// flushing arithmetic, nothing fused but what is written so, no spills, no additions by atomics, no
// tensor cores. This is what the emulator can not see. Every rule is also shown a planted fault.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/places.h"

namespace retrace {
namespace {

namespace fs = std::filesystem;
using Faults = std::vector<std::string>;

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

bool Has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- PTX ----------------------------------------------------------------------------------------

// "fma.rn.f32" of "\tfma.rn.f32 \t%f1, ..." or of "@%p1 fma.rn.f32 ..."; empty: no instruction.
std::string PtxOpcode(const std::string& line) {
  size_t at = line.find_first_not_of(" \t");
  if (at != std::string::npos && line[at] == '@') {
    at = line.find_first_of(" \t", at);
    at = at == std::string::npos ? at : line.find_first_not_of(" \t", at);
  }
  if (at == std::string::npos || line[at] < 'a' || line[at] > 'z') return "";
  const size_t end = line.find_first_of(" \t;", at);
  return end == std::string::npos ? "" : line.substr(at, end - at);
}

bool IsFloat(const std::string& opcode) {
  return opcode.ends_with(".f32") || opcode.ends_with(".f64");
}

// What is wrong with an instruction; empty: nothing.
std::string PtxFault(const std::string& opcode) {
  static const std::set<std::string> kRounded = {"add", "sub", "mul", "fma", "mad",
                                                 "div", "rcp", "sqrt"};
  static const std::set<std::string> kNever = {"sin", "cos", "ex2", "lg2", "tanh", "rsqrt",
                                               "wmma", "mma", "wgmma"};
  const std::string name = opcode.substr(0, opcode.find('.'));
  if (Has(opcode, ".approx") || Has(opcode, ".ftz") || Has(opcode, ".full")) return opcode;
  if (kNever.contains(name)) return opcode;
  const bool floating = IsFloat(opcode);
  if (kRounded.contains(name) && floating && !Has(opcode, ".rn")) return opcode;
  if ((name == "red" || name == "atom") && floating) return opcode;
  const bool narrows = name == "cvt" && (Has(opcode, ".f32.") || Has(opcode, ".f64.")) &&
                       !Has(opcode, "cvt.f64.f32");
  if (narrows && !Has(opcode, ".rn")) return opcode;
  return "";
}

// Opcodes of each entry function, by mangled name.
std::map<std::string, std::vector<std::string>> PtxEntries(const std::string& ptx) {
  std::map<std::string, std::vector<std::string>> entries;
  std::string entry;
  for (const std::string& line : Split(ptx)) {
    const size_t at = line.find(".entry ");
    if (at != std::string::npos) entry = line.substr(at + 7, line.find('(', at) - at - 7);
    const std::string opcode = PtxOpcode(line);
    if (!entry.empty() && !opcode.empty()) entries[entry].push_back(opcode);
  }
  return entries;
}

int64_t Count(const std::vector<std::string>& opcodes, const std::string& name) {
  return std::count_if(opcodes.begin(), opcodes.end(), [&](const std::string& opcode) {
    return opcode.starts_with(name + ".") && IsFloat(opcode);
  });
}

// Kernels whose clause has no fused multiply-add, and kernels that are nothing but fused ones.
constexpr const char* kUnfused[] = {"11ScaleKernel",      "14AddScaleKernel",  "9AddKernel",
                                    "10RopeKernel",       "11EmbedKernel",     "19EmbedBackwardKernel",
                                    "16RescaleAddKernel", "11AdamWKernel",     "15AdamWSumsKernel",
                                    "16SumSquaresKernel", "15AddGroupsKernel", "15RowDivideKernel"};
constexpr const char* kFused[] = {"10GemmKernel", "12RowDotKernel"};

Faults PtxFaults(const std::string& ptx) {
  Faults faults;
  for (const auto& [entry, opcodes] : PtxEntries(ptx)) {
    for (const std::string& opcode : opcodes) {
      if (!PtxFault(opcode).empty()) faults.push_back(entry + ": " + opcode);
    }
    for (const char* name : kUnfused) {
      // A division of doubles by the compiler's own sequence is no fma of PTX.
      if (Has(entry, name) && Count(opcodes, "fma") > 0) faults.push_back(entry + ": fma");
    }
    for (const char* name : kFused) {
      if (Has(entry, name) && (Count(opcodes, "mul") > 0 || Count(opcodes, "fma") == 0)) {
        faults.push_back(entry + ": a product that is not fused");
      }
    }
  }
  return faults;
}

// ---- Machine code --------------------------------------------------------------------------------

struct SassFunction {
  std::string architecture, name;
  std::vector<std::string> opcodes;
};

// "FFMA" of "        /*0010*/                   @!P0 FFMA R1, R2, R3, R4 ;"; empty: no instruction.
std::string SassOpcode(const std::string& line) {
  size_t at = line.find_first_not_of(' ');
  if (at == std::string::npos || line.compare(at, 2, "/*") != 0) return "";
  at = line.find("*/", at);
  if (at == std::string::npos) return "";
  at = line.find_first_not_of(' ', at + 2);
  if (at != std::string::npos && line[at] == '@') {
    at = line.find(' ', at);
    at = at == std::string::npos ? at : line.find_first_not_of(' ', at);
  }
  if (at == std::string::npos || line[at] < 'A' || line[at] > 'Z') return "";
  return line.substr(at, line.find_first_of(" ;", at) - at);
}

std::vector<SassFunction> SassFunctions(const std::string& sass) {
  std::vector<SassFunction> functions;
  std::string architecture;
  for (const std::string& line : Split(sass)) {
    if (const size_t at = line.find("arch = "); at != std::string::npos) {
      architecture = line.substr(at + 7);
    } else if (const size_t at = line.find("Function : "); at != std::string::npos) {
      functions.push_back({architecture, line.substr(at + 11), {}});
    } else if (std::string opcode = SassOpcode(line); !functions.empty() && !opcode.empty()) {
      functions.back().opcodes.push_back(std::move(opcode));
    }
  }
  return functions;
}

bool Starts(const std::string& opcode, std::initializer_list<const char*> prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const char* prefix) { return opcode.starts_with(prefix); });
}

// `divides`: the function has the compiler's sequences for division, root or reciprocal, which flush
// and approximate where that can not matter, and end in the correctly rounded result.
bool IsSassFault(const std::string& opcode, bool divides) {
  if (Starts(opcode, {"STL", "LDL", "HMMA", "IMMA", "DMMA", "QGMMA", "HGMMA", "UTCHMMA"})) return true;
  const bool atomic = Starts(opcode, {"RED.", "ATOM.", "ATOMG.", "ATOMS.", "REDG."});
  if (atomic && (Has(opcode, ".F32") || Has(opcode, ".F64") || Has(opcode, ".F16"))) return true;
  if (opcode.starts_with("MUFU")) {
    return !Starts(opcode, {"MUFU.RCP", "MUFU.RSQ"});
  }
  if (!Has(opcode, ".FTZ")) return false;
  if (Starts(opcode, {"F2I.FTZ.U32.TRUNC"})) return false;  // of a division of integers
  const bool of_division = Starts(opcode, {"FADD.FTZ", "FMUL.FTZ", "FSETP."});
  return !(divides && of_division);
}

Faults SassFaults(const std::vector<SassFunction>& functions) {
  Faults faults;
  for (const SassFunction& f : functions) {
    const bool divides =
        std::any_of(f.opcodes.begin(), f.opcodes.end(),
                    [](const std::string& opcode) { return opcode.starts_with("MUFU.R"); });
    for (const std::string& opcode : f.opcodes) {
      if (IsSassFault(opcode, divides)) faults.push_back(f.architecture + " " + f.name + ": " + opcode);
    }
  }
  return faults;
}

// What ptxas said of each kernel: those that spill registers to memory or have a stack.
Faults SpillsIn(const std::string& log) {
  static const std::regex kNone(
      R"(\s*0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads.*)");
  Faults faults;
  for (const std::string& line : Split(log)) {
    if (Has(line, "spill stores") && !std::regex_match(line, kNone)) faults.push_back(line);
  }
  return faults;
}

// ---- The plug-in of this build -------------------------------------------------------------------

std::string Output(const std::string& command) {
  std::string text;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return text;
  char buffer[1 << 16];
  while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
  pclose(pipe);
  return text;
}

std::string ReadFile(const fs::path& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

class DeviceCode : public testing::Test {
 protected:
  void SetUp() override {
    plugin_ = fs::path(BinaryDir()) / "libretrace_cuda.so";
    if (!fs::exists(plugin_)) GTEST_SKIP() << "this build has no libretrace_cuda.so";
  }
  // cuobjdump finds nvdisasm beside itself.
  std::string Dump(const std::string& what) const {
    const std::string tool = RETRACE_CUOBJDUMP;
    const std::string folder = tool.substr(0, tool.rfind('/'));
    return Output("PATH='" + folder + "':\"$PATH\" '" + tool + "' " + what + " '" +
                  plugin_.string() + "'");
  }
  static bool HasTool() { return fs::exists(RETRACE_CUOBJDUMP); }
  static constexpr const char* kNoTool =
      "there is no cuobjdump; scripts/setup.sh --for-tests brings it";

  fs::path plugin_;
};

std::string Joined(const Faults& faults) {
  std::string text;
  for (size_t i = 0; i < faults.size() && i < 20; ++i) text += faults[i] + "\n";
  return text;
}

TEST_F(DeviceCode, PtxHasOnlyArithmeticThatRoundsToNearest) {
  if (!HasTool()) GTEST_SKIP() << kNoTool;
  const std::string ptx = Dump("-ptx");
  EXPECT_EQ("", Joined(PtxFaults(ptx)));
  const auto entries = PtxEntries(ptx);
  ASSERT_GE(entries.size(), 50u);
  for (const char* name : kUnfused) {
    EXPECT_TRUE(std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
      return Has(entry.first, name);
    })) << "no kernel " << name << ": the list of this test is out of date";
  }
}

TEST_F(DeviceCode, MachineCodeNeitherFlushesNorSpillsNorAddsByAtomics) {
  if (!HasTool()) GTEST_SKIP() << kNoTool;
  const std::vector<SassFunction> functions = SassFunctions(Dump("-sass"));
  std::map<std::string, int> kernels;
  size_t fused = 0;
  for (const SassFunction& f : functions) {
    ++kernels[f.architecture];
    fused += std::count(f.opcodes.begin(), f.opcodes.end(), "FFMA");
  }
  for (const char* architecture : {"sm_80", "sm_90", "sm_100"}) {
    EXPECT_GE(kernels[architecture], 50) << architecture;
  }
  EXPECT_GT(fused, 1000u);
  EXPECT_EQ("", Joined(SassFaults(functions)));
}

TEST_F(DeviceCode, NoKernelSpillsRegisters) {
  int kernels = 0;
  for (const auto& entry : fs::directory_iterator(fs::path(BinaryDir()) / "cuda")) {
    if (entry.path().extension() != ".log") continue;
    const std::string log = ReadFile(entry.path());
    for (const std::string& line : Split(log)) kernels += Has(line, "spill stores");
    EXPECT_EQ("", Joined(SpillsIn(log))) << entry.path();
  }
  EXPECT_GE(kernels, 150);
}

// ---- Planted faults ------------------------------------------------------------------------------

std::string PtxWith(const std::string& kernel, const std::string& instruction) {
  return ".visible .entry _ZN7retrace4cuda" + kernel + "IfEEv(\n)\n{\n\t" + instruction + "\n}\n";
}

TEST(DeviceCodeRules, WrongPtxIsSeen) {
  EXPECT_TRUE(PtxFaults(PtxWith("11GegluKernel", "fma.rn.f32 \t%f1, %f2, %f3, %f4;")).empty());
  EXPECT_TRUE(PtxFaults(PtxWith("11GegluKernel", "@%p1 bra \t$L__BB0_2;")).empty());
  EXPECT_TRUE(PtxFaults(PtxWith("11GegluKernel", "cvt.f64.f32 \t%fd1, %f1;")).empty());
  for (const char* wrong :
       {"div.approx.f32 \t%f1, %f2, %f3;", "add.ftz.f32 \t%f1, %f2, %f3;",
        "fma.rn.ftz.f32 \t%f1, %f2, %f3, %f4;", "mul.f32 \t%f1, %f2, %f3;",
        "add.rz.f64 \t%fd1, %fd2, %fd3;", "div.full.f32 \t%f1, %f2, %f3;",
        "ex2.approx.f32 \t%f1, %f2;", "cvt.rz.f32.f64 \t%f1, %fd1;",
        "atom.global.add.f32 \t%f1, [%rd1], %f2;", "@%p2 red.global.add.f64 \t[%rd1], %fd2;"}) {
    EXPECT_EQ(1u, PtxFaults(PtxWith("11GegluKernel", wrong)).size()) << wrong;
  }
}

TEST(DeviceCodeRules, FusedAndUnfusedProductsInTheWrongPlaceAreSeen) {
  const std::string fma = "fma.rn.f32 \t%f1, %f2, %f3, %f4;", mul = "mul.rn.f32 \t%f1, %f2, %f3;";
  EXPECT_EQ(1u, PtxFaults(PtxWith("11AdamWKernel", fma)).size());
  EXPECT_TRUE(PtxFaults(PtxWith("11AdamWKernel", mul)).empty());
  EXPECT_EQ(1u, PtxFaults(PtxWith("10GemmKernel", mul)).size());
  EXPECT_TRUE(PtxFaults(PtxWith("10GemmKernel", fma)).empty());
}

std::string SassWith(std::initializer_list<const char*> instructions) {
  std::string sass = "arch = sm_90\n\t\tFunction : Planted\n";
  for (const char* instruction : instructions) {
    sass += std::string("        /*0010*/                   ") + instruction +
            " R1, R2, R3 ;      /* 0x0000000201017220 */\n";
  }
  return sass;
}

TEST(DeviceCodeRules, WrongMachineCodeIsSeen) {
  const auto faults = [](std::initializer_list<const char*> instructions) {
    return SassFaults(SassFunctions(SassWith(instructions))).size();
  };
  EXPECT_EQ(0u, faults({"FFMA", "@!P0 FADD", "F2I.FTZ.U32.TRUNC.NTZ", "DFMA", "LDS.128"}));
  EXPECT_EQ(0u, faults({"MUFU.RCP", "FMUL.FTZ", "@P1 FSETP.GTU.FTZ.AND"}));
  EXPECT_EQ(1u, faults({"FFMA.FTZ"}));
  EXPECT_EQ(1u, faults({"MUFU.RCP", "@P0 FFMA.FTZ"})) << "also where the function divides";
  EXPECT_EQ(1u, faults({"FMUL.FTZ"})) << "without a division";
  EXPECT_EQ(1u, faults({"MUFU.EX2"}));
  EXPECT_EQ(1u, faults({"STL.64"}));
  EXPECT_EQ(1u, faults({"RED.E.ADD.F32.FTZ.RN.STRONG.GPU"}));
  EXPECT_EQ(1u, faults({"HMMA.1688.F32.TF32"}));
}

TEST(DeviceCodeRules, ASpillIsSeen) {
  EXPECT_TRUE(SpillsIn("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n").empty());
  EXPECT_EQ(1u, SpillsIn("    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n").size());
}

}  // namespace
}  // namespace retrace
