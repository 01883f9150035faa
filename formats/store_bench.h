// How much a run's steps take, and how fast they are made. Used by `retrace bench store`.
// Measures only; no file is written. Thread-safety: none needed.
#ifndef RETRACE_FORMATS_STORE_BENCH_H_
#define RETRACE_FORMATS_STORE_BENCH_H_

#include <cstdint>

#include "core/layout.h"
#include "core/status.h"
#include "formats/run_dir.h"

namespace retrace {

// All files of a run's steps. A step counts as a journal where it keeps one and nothing else, as a
// keyframe where it keeps that and nothing else.
struct StoreSize {
  int64_t parameters = 0;
  int64_t journals = 0, keyframes = 0;                          // steps
  int64_t journal_rank_bytes = 0, journal_master_bytes = 0;     // of all of them
  int64_t keyframe_bytes = 0;                                   // rank files and masters
  int64_t ledger_bytes = 0, positions = 0;                      // of the run
  int64_t last_journal = -1;                                    // position

  // Bytes a parameter and step, with the step's share of the ledger.
  double JournalBytes() const;
  double KeyframeBytes() const;  // 0: none
  // With a keyframe every k steps and journals in between.
  double AmortisedBytes(int64_t k) const;
};

// Errors: those of reading the masters.
Result<StoreSize> MeasureStore(const RunReader& run, const Layout& layout);

// Wall-clock and processor seconds (of all threads): the latter are steady where others use the
// machine too.
struct Seconds {
  double wall = 0, processor = 0;
};

// One journal's gradients, on one thread, the fastest of several passes that take turns.
struct JournalSpeed {
  int64_t input_bytes = 0;
  int64_t file_bytes = 0, bare_bytes = 0;  // compressed
  // A finished rank file: digests, shuffle, zstd, HDF5, digest of the file.
  Seconds file;
  // The peer: shuffle and ZSTD_compressCCtx at level 1, nothing else.
  Seconds bare;
};

// `seconds`: about how long each of the two is measured. Errors: those of reading the journal.
Result<JournalSpeed> MeasureJournalSpeed(const RunReader& run, const Layout& layout,
                                         int64_t position, double seconds);

}  // namespace retrace

#endif  // RETRACE_FORMATS_STORE_BENCH_H_
