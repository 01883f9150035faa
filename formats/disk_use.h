// Where the bytes of a run's steps are: by step, by kind of slab, by tensor. Used by `retrace du`.
#ifndef RETRACE_FORMATS_DISK_USE_H_
#define RETRACE_FORMATS_DISK_USE_H_

#include <array>
#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "core/status.h"
#include "formats/run_dir.h"

namespace retrace {

// Bytes of compressed chunks by kind. A chunk that several tensors share is divided by their
// elements.
using KindBytes = std::array<double, kSlabKinds.size()>;

struct StepUse {
  int64_t position = 0;
  KindBytes kinds{};
  double container = 0;  // of rank files, around the chunks
  double master = 0;

  double total() const;
};

struct DiskUse {
  std::vector<StepUse> steps;      // ascending
  std::vector<KindBytes> tensors;  // in the order of the layout
  double ledger = 0, frozen = 0;   // recipe and manifest
  double unnamed = 0;              // files in steps/ that belong to no step

  double total() const;
  KindBytes kinds() const;  // of all steps
};

// From the masters alone. Errors: those of reading them.
Result<DiskUse> MeasureDiskUse(const RunReader& run, const Layout& layout, FileOps ops = FileOps());

}  // namespace retrace

#endif  // RETRACE_FORMATS_DISK_USE_H_
