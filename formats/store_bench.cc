#include "formats/store_bench.h"

#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <memory>
#include <vector>

#include "formats/chunk_codec.h"
#include "formats/step_file.h"

namespace retrace {
namespace {

Seconds Now() {
  const auto wall = std::chrono::steady_clock::now().time_since_epoch();
  timespec processor{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &processor);
  return {std::chrono::duration<double>(wall).count(),
          static_cast<double>(processor.tv_sec) + 1e-9 * static_cast<double>(processor.tv_nsec)};
}

// Keeps the least of each.
template <class F>
void Time(F f, Seconds* least) {
  const Seconds begin = Now();
  f();
  const Seconds end = Now();
  least->wall = std::min(least->wall, end.wall - begin.wall);
  least->processor = std::min(least->processor, end.processor - begin.processor);
}

struct FreeContext {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};

// Shuffle and zstd over chunks as the store cuts them, straight from the library. -> bytes.
class BareCompressor {
 public:
  BareCompressor()
      : context_(ZSTD_createCCtx()),
        shuffled_(kChunkElements * sizeof(float)),
        out_(ZSTD_compressBound(shuffled_.size())) {}

  int64_t Compress(const std::vector<float>& slab) {
    int64_t bytes = 0;
    for (size_t first = 0; first < slab.size(); first += kChunkElements) {
      const size_t count = std::min(kChunkElements, slab.size() - first);
      ShuffleBytes(slab.data() + first, count, shuffled_.data());
      bytes += static_cast<int64_t>(ZSTD_compressCCtx(context_.get(), out_.data(), out_.size(),
                                                      shuffled_.data(), count * sizeof(float), 1));
    }
    return bytes;
  }

 private:
  std::unique_ptr<ZSTD_CCtx, FreeContext> context_;
  std::vector<unsigned char> shuffled_;
  std::vector<char> out_;
};

}  // namespace

double StoreSize::JournalBytes() const {
  const double steps = static_cast<double>(journals), all = static_cast<double>(parameters);
  const double ledger = static_cast<double>(ledger_bytes) / static_cast<double>(positions);
  return (static_cast<double>(journal_rank_bytes + journal_master_bytes) / steps + ledger) / all;
}

double StoreSize::KeyframeBytes() const {
  if (keyframes == 0) return 0;
  const double ledger = static_cast<double>(ledger_bytes) / static_cast<double>(positions);
  return (static_cast<double>(keyframe_bytes) / static_cast<double>(keyframes) + ledger) /
         static_cast<double>(parameters);
}

double StoreSize::AmortisedBytes(int64_t k) const {
  const double steps = static_cast<double>(k);
  return (KeyframeBytes() + (steps - 1) * JournalBytes()) / steps;
}

Result<StoreSize> MeasureStore(const RunReader& run, const Layout& layout) {
  const RunHistory& history = run.history();
  StoreSize size;
  size.parameters = layout.parameters();
  size.ledger_bytes = std::max<int64_t>(0, FileOps().Size(run.dir() + "/" + kLedgerName));
  size.positions = std::ssize(history.positions);
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    const PositionEntry& entry = *history.Find(k);
    if (!entry.master || entry.HasPartial() || entry.HasJournal() == entry.HasKeyframe()) continue;
    RT_ASSIGN_OR_RETURN(const StepIndex index, run.ReadIndex(k));
    int64_t rank_bytes = 0;
    for (const RankFileInfo& file : index.files) rank_bytes += static_cast<int64_t>(file.size);
    const int64_t master_bytes = static_cast<int64_t>(entry.master->size);
    if (entry.HasKeyframe()) {
      ++size.keyframes;
      size.keyframe_bytes += rank_bytes + master_bytes;
      continue;
    }
    ++size.journals;
    size.journal_rank_bytes += rank_bytes;
    size.journal_master_bytes += master_bytes;
    size.last_journal = k;
  }
  return size;
}

Result<JournalSpeed> MeasureJournalSpeed(const RunReader& run, const Layout& layout,
                                         int64_t position, double seconds) {
  Journal journal;
  RT_RETURN_IF_ERROR(run.ReadJournal(layout, position, 0, layout.shards(), &journal));
  JournalSpeed speed;
  speed.file = speed.bare = {1e300, 1e300};
  std::vector<SlabContents> slabs;
  for (int s = 0; s < layout.shards(); ++s) {
    slabs.push_back({{s, SlabKind::kG, {}}, journal.gradients[s].data()});
    speed.input_bytes += layout.slab_numel(s) * static_cast<int64_t>(sizeof(float));
  }
  Status status;
  Bytes spare;  // as RankWriter does
  BareCompressor bare;
  const double begin = Now().wall;
  for (int pass = 0; pass < 3 || Now().wall - begin < 2 * seconds; ++pass) {
    Time([&] {
      Result<RankFile> file =
          BuildRankFile(layout, position, 1, 0, slabs, 1, kChunkLevel, std::move(spare));
      status = file.status();
      if (!file.ok()) return;
      speed.file_bytes = static_cast<int64_t>(file->bytes.size);
      spare = std::move(file->bytes);
    }, &speed.file);
    RT_RETURN_IF_ERROR(status);
    Time([&] {
      speed.bare_bytes = 0;
      for (const std::vector<float>& slab : journal.gradients) {
        speed.bare_bytes += bare.Compress(slab);
      }
    }, &speed.bare);
  }
  return speed;
}

}  // namespace retrace
