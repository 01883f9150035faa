// How much a run's journals take, and how fast they are made. Used by `retrace bench store`.
// Measures only; no file is written. Thread-safety: none needed.
#ifndef RETRACE_FORMATS_STORE_BENCH_H_
#define RETRACE_FORMATS_STORE_BENCH_H_

#include <cstdint>

#include "core/layout.h"
#include "core/status.h"
#include "formats/run_dir.h"

namespace retrace {

// Of the steps that keep a journal and nothing else.
struct JournalSize {
  int64_t steps = 0;
  int64_t parameters = 0;
  int64_t rank_file_bytes = 0, master_bytes = 0;  // of all steps
  int64_t last_step = -1;

  double BytesPerParameter() const {
    return static_cast<double>(rank_file_bytes + master_bytes) /
           (static_cast<double>(steps) * static_cast<double>(parameters));
  }
};

// Errors: those of reading the masters.
Result<JournalSize> MeasureJournals(const RunReader& run, const Layout& layout);

// One journal's gradients, on one thread, the fastest of several passes.
struct JournalSpeed {
  int64_t input_bytes = 0;
  int64_t file_bytes = 0, bare_bytes = 0;  // compressed
  double file_seconds =
      0;  // a finished rank file: digests, shuffle, zstd, HDF5, digest of the file
  double bare_seconds = 0;  // the peer: shuffle and ZSTD_compressCCtx at level 1, nothing else
};

// `seconds`: about how long each of the two is measured. Errors: those of reading the journal.
Result<JournalSpeed> MeasureJournalSpeed(const RunReader& run, const Layout& layout,
                                         int64_t position, double seconds);

}  // namespace retrace

#endif  // RETRACE_FORMATS_STORE_BENCH_H_
