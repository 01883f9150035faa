#include "replay/machine.h"

#include <fmt/format.h>
#include <gnu/libc-version.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/version.h"

namespace retrace {
namespace {

std::string ProcessorModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  ..." -> its version
std::string GpuDriver() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word;
  while (file >> word) {
    if (word.find_first_not_of("0123456789.") == std::string::npos &&
        word.find('.') != std::string::npos) {
      return "nvidia " + word;
    }
  }
  return "none";
}

// The part of a numerics id that names the arithmetic of NUMERICS.md.
std::string BaseId(const std::string& numerics) { return numerics.substr(0, numerics.find(' ')); }

}  // namespace

const char* LevelName(NumericsLevel level) {
  return level == NumericsLevel::kNative ? "native" : "portable";
}

Machine ThisMachine(const NumericsRecipe& numerics, Isa isa, const std::string& native_libraries,
                    const std::string& device) {
  Machine machine;
  machine.device = device + ", " + ProcessorModel();
  machine.driver = GpuDriver();
  machine.isa = IsaName(isa);
  machine.level = LevelName(numerics.level);
  machine.numerics = kNumericsId;
  machine.libraries = fmt::format("GCC {}, glibc {}", __VERSION__, gnu_get_libc_version());
  if (numerics.level == NumericsLevel::kNative) {
    machine.libraries = native_libraries;
    machine.numerics = fmt::format("{} native ({}; {}; {} thread{})", kNumericsId, machine.device,
                                   native_libraries, numerics.native_threads,
                                   numerics.native_threads == 1 ? "" : "s");
  }
  return machine;
}

void Stamp(const Machine& machine, RunPlan* plan) {
  plan->device = machine.device;
  plan->driver = machine.driver;
  plan->isa = machine.isa;
  plan->libraries = machine.libraries;
  plan->level = machine.level;
  plan->numerics = machine.numerics;
}

Machine RecordedMachine(const RunReader& run) {
  const nlohmann::json manifest = nlohmann::json::parse(run.manifest_text(), nullptr, false);
  const auto text = [&](const char* name) -> std::string {
    if (!manifest.is_object() || !manifest.contains(name) || !manifest[name].is_string()) return "";
    return manifest[name].get<std::string>();
  };
  Machine machine;
  machine.device = text("device");
  machine.driver = text("driver");
  machine.isa = text("isa");
  machine.libraries = text("libraries");
  machine.level = text("level").empty() ? "portable" : text("level");
  machine.numerics = run.history().header.numerics;
  return machine;
}

std::string Expectation(const Machine& recorded, const Machine& here) {
  if (BaseId(recorded.numerics) != BaseId(here.numerics)) {
    return fmt::format("recorded under {}, this program computes {}: expect the bits to part",
                       recorded.numerics, here.numerics);
  }
  if (recorded.level == "native" && recorded.numerics != here.numerics) {
    return fmt::format("recorded at level native ({}), computed here by {}: nothing is promised; the "
                       "first difference is reported",
                       recorded.numerics, here.numerics);
  }
  if (recorded.level != here.level) {
    return fmt::format("recorded at level {}, computed here at level {}: expect the bits to part",
                       recorded.level, here.level);
  }
  if (recorded.level == "native") return "";
  std::vector<std::string> others;
  const bool named = recorded.device.find(", ") != std::string::npos;  // older runs say "cpu" alone
  if (named && recorded.device != here.device) {
    others.push_back(fmt::format("on {}, here is {}", recorded.device, here.device));
  }
  if (!recorded.isa.empty() && recorded.isa != here.isa) {
    others.push_back(fmt::format("with {} instructions, here {}", recorded.isa, here.isa));
  }
  if (others.empty()) return "";
  return fmt::format("recorded {}: level portable promises the same bits", fmt::join(others, "; "));
}

}  // namespace retrace
