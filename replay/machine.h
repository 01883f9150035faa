// Machine: where updates are computed, as a run's manifest records it, and what a replay elsewhere can
// expect. Used by Job, by all who make runs, and by the commands that replay. Pure values.
#ifndef RETRACE_REPLAY_MACHINE_H_
#define RETRACE_REPLAY_MACHINE_H_

#include <string>

#include "core/recipe.h"
#include "formats/run_dir.h"
#include "kernels/isa.h"

namespace retrace {

const char* LevelName(NumericsLevel level);  // "portable", "native"

struct Machine {
  std::string device;     // "cpu" or "cuda:0", and the processor's model
  std::string driver;     // of GPUs: its version, or "none"
  std::string isa;        // of the portable kernels
  std::string libraries;  // that compute: level native's; else compiler and libc
  std::string level = "portable";
  // The numerics id of runs that are made here; level native's names device, libraries and threads.
  std::string numerics;
};

// This machine, for an engine of that instruction set and device. native_libraries: of the plug-in;
// read at level native alone.
Machine ThisMachine(const NumericsRecipe& numerics, Isa isa, const std::string& native_libraries,
                    const std::string& device = "cpu");

void Stamp(const Machine& machine, RunPlan* plan);

// Of a run's manifest; members that older manifests lack are empty.
Machine RecordedMachine(const RunReader& run);

// One line for the user: what a replay here of a run that was recorded there can expect. Empty where
// nothing is different.
std::string Expectation(const Machine& recorded, const Machine& here);

}  // namespace retrace

#endif  // RETRACE_REPLAY_MACHINE_H_
