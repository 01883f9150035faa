#include "formats/store_bench.h"

#include <zstd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "formats/chunk_codec.h"
#include "formats/step_file.h"

namespace retrace {
namespace {

// The fastest of several calls of f, which last about `seconds` in all.
template <class F>
double Fastest(double seconds, F f) {
  double fastest = 1e300, spent = 0;
  for (int pass = 0; pass < 3 || spent < seconds; ++pass) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    const double took =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    fastest = std::min(fastest, took);
    spent += took;
  }
  return fastest;
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

Result<JournalSize> MeasureJournals(const RunReader& run, const Layout& layout) {
  const RunHistory& history = run.history();
  JournalSize size;
  size.parameters = layout.parameters();
  for (int64_t k = history.first_position(); k <= history.last_position(); ++k) {
    const PositionEntry& entry = *history.Find(k);
    if (!entry.HasJournal() || entry.HasKeyframe() || entry.HasPartial()) continue;
    RT_ASSIGN_OR_RETURN(const StepIndex index, run.ReadIndex(k));
    ++size.steps;
    size.last_step = k;
    size.master_bytes += static_cast<int64_t>(entry.master->size);
    for (const RankFileInfo& file : index.files) {
      size.rank_file_bytes += static_cast<int64_t>(file.size);
    }
  }
  return size;
}

Result<JournalSpeed> MeasureJournalSpeed(const RunReader& run, const Layout& layout,
                                         int64_t position, double seconds) {
  Journal journal;
  RT_RETURN_IF_ERROR(run.ReadJournal(layout, position, 0, layout.shards(), &journal));
  JournalSpeed speed;
  std::vector<SlabContents> slabs;
  for (int s = 0; s < layout.shards(); ++s) {
    slabs.push_back({{s, SlabKind::kG, {}}, journal.gradients[s].data()});
    speed.input_bytes += layout.slab_numel(s) * static_cast<int64_t>(sizeof(float));
  }
  Status status;
  speed.file_seconds = Fastest(seconds, [&] {
    const Result<RankFile> file = BuildRankFile(layout, position, 1, 0, slabs, 1);
    if (!file.ok())
      status = file.status();
    else
      speed.file_bytes = static_cast<int64_t>(file->bytes.size);
  });
  RT_RETURN_IF_ERROR(status);
  BareCompressor bare;
  speed.bare_seconds = Fastest(seconds, [&] {
    speed.bare_bytes = 0;
    for (const std::vector<float>& slab : journal.gradients) {
      speed.bare_bytes += bare.Compress(slab);
    }
  });
  return speed;
}

}  // namespace retrace
