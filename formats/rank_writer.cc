#include "formats/rank_writer.h"

#include <chrono>
#include <cstring>

#include "core/check.h"
#include "formats/run_dir.h"
#include "formats/run_lock.h"

namespace retrace {

struct RankWriter::Staging {
  std::unique_ptr<float[]> values;
  int64_t capacity = 0;
  std::vector<SlabContents> slabs;
};

namespace {

constexpr int kStagingBuffers = 2;

// Copies the pieces of `source` to `to`. -> elements.
int64_t CopyPieces(const Layout& layout, const SlabSource& source, float* to) {
  if (!IsPartial(source.id.kind)) {
    const int64_t numel = layout.slab_numel(source.id.shard);
    std::memcpy(to, source.slab, numel * sizeof(float));
    return numel;
  }
  int64_t numel = 0;
  for (int index : source.id.pieces) {
    const Piece& piece = layout.pieces(source.id.shard)[index];
    std::memcpy(to + numel, source.slab + piece.offset, piece.numel() * sizeof(float));
    numel += piece.numel();
  }
  return numel;
}

}  // namespace

Result<std::unique_ptr<RankWriter>> RankWriter::Open(const Layout& layout,
                                                     const std::string& run_dir, int64_t attempt,
                                                     int rank, int threads, FileOps ops) {
  RT_CHECK(threads >= 1);
  std::unique_ptr<RankWriter> writer(
      new RankWriter(layout, run_dir, attempt, rank, threads, ops));
  RT_RETURN_IF_ERROR(writer->CheckAttempt());
  return writer;
}

RankWriter::RankWriter(const Layout& layout, const std::string& run_dir, int64_t attempt, int rank,
                       int threads, FileOps ops)
    : layout_(layout), run_dir_(run_dir), attempt_(attempt), rank_(rank), threads_(threads),
      ops_(ops) {
  for (int i = 0; i < kStagingBuffers; ++i) {
    staging_.push_back(std::make_unique<Staging>());
    free_.push_back(staging_.back().get());
  }
}

RankWriter::~RankWriter() = default;

// The name of a late rank's file could never be taken for one of a later attempt; this tells the
// rank so, before it wastes the disk.
Status RankWriter::CheckAttempt() const {
  const std::string path = run_dir_ + "/" + kLockName;
  RT_ASSIGN_OR_RETURN(const int64_t current, ReadLockAttempt(ops_, path));
  if (current == attempt_) return {};
  return FailedError(path + ": rank " + std::to_string(rank_) + " belongs to attempt " +
                     std::to_string(attempt_) + ", but the run is at attempt " +
                     std::to_string(current) +
                     " (0: none). Another process took the run over, or " + run_dir_ +
                     " is not the same shared directory on every host");
}

RankWriter::Staging* RankWriter::TakeStaging() {
  std::unique_lock lock(mutex_);
  given_back_.wait(lock, [this] { return !free_.empty(); });
  Staging* staging = free_.back();
  free_.pop_back();
  return staging;
}

void RankWriter::GiveBack(Staging* staging) {
  const std::lock_guard lock(mutex_);
  free_.push_back(staging);
  given_back_.notify_one();
}

double RankWriter::Snapshot(int64_t position, const std::vector<SlabSource>& slabs) {
  const auto start = std::chrono::steady_clock::now();
  Staging* staging = TakeStaging();
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;

  int64_t numel = 0;
  for (const SlabSource& source : slabs) {
    RT_CHECK(FitsLayout(layout_, source.id));
    numel += SlabNumel(layout_, source.id);
  }
  if (staging->capacity < numel) {
    staging->values = std::make_unique_for_overwrite<float[]>(numel);
    staging->capacity = numel;
  }
  staging->slabs.clear();
  float* to = staging->values.get();
  for (const SlabSource& source : slabs) {
    staging->slabs.push_back({source.id, to});
    to += CopyPieces(layout_, source, to);
  }

  auto outcome = std::make_shared<std::promise<Result<RankFileInfo>>>();
  pending_.push_back(outcome->get_future());
  writer_.Post([this, position, staging, outcome] {
    Result<RankFileInfo> result = Publish(position, staging->slabs);
    GiveBack(staging);
    outcome->set_value(std::move(result));
  });
  return waited.count();
}

Result<RankFileInfo> RankWriter::Publish(int64_t position,
                                         const std::vector<SlabContents>& slabs) try {
  RT_RETURN_IF_ERROR(CheckAttempt());
  RT_ASSIGN_OR_RETURN(RankFile file, BuildRankFile(layout_, position, attempt_, rank_, slabs,
                                                   threads_, kChunkLevel, std::move(spare_)));
  const Status published =
      PublishFile(ops_, run_dir_ + "/" + kStepsName, file.info.name, file.bytes.view());
  spare_ = std::move(file.bytes);
  RT_RETURN_IF_ERROR(published);
  return std::move(file.info);
} catch (...) {
  return CaughtError(run_dir_ + "/" + kStepsName + "/" + RankFileName(position, attempt_, rank_));
}

std::optional<Result<RankFileInfo>> RankWriter::Poll() {
  if (pending_.empty()) return std::nullopt;
  if (pending_.front().wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    return std::nullopt;
  }
  return Wait();
}

Result<RankFileInfo> RankWriter::Wait() {
  RT_CHECK(!pending_.empty());
  Result<RankFileInfo> result = pending_.front().get();
  pending_.pop_front();
  return result;
}

}  // namespace retrace
