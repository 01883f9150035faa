#include "replay/shm_comm.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>

#include "kernels/thread_pool.h"

namespace retrace {
namespace {

constexpr int kSlots = 4;      // of staging per rank
constexpr int kRing = kSlots;  // messages per channel
constexpr size_t kLine = 64;   // bytes; no two writers share a line
constexpr size_t kSlotBytesMin = 256;
constexpr int kPhaseWords = 20;  // of 8 bytes
constexpr size_t kAbortTextMax = 4000;
constexpr double kSliceSeconds = 0.1;  // a sleeper looks at the clock this often

enum AbortState : uint32_t { kRunning = 0, kAborting = 1, kAborted = 2 };
enum RankState : uint32_t { kAbsent = 0, kJoined = 1, kFinished = 2 };

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Not FUTEX_PRIVATE: the word may lie in several address spaces.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec limit{};
  limit.tv_nsec = static_cast<long>(seconds * 1e9);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Counters wrap; what is compared is never more than a ring apart.
bool Reached(const std::atomic<uint32_t>& counter, uint32_t target) {
  return static_cast<int32_t>(counter.load(std::memory_order_seq_cst) - target) >= 0;
}

size_t RoundUp(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

struct alignas(kLine) ShmJob::Message {
  CommCall call;
  uint64_t piece;
  uint64_t offset;  // in the sender's staging
};

struct ShmJob::Channel {
  alignas(kLine) std::atomic<uint32_t> posted;    // written by the sender
  alignas(kLine) std::atomic<uint32_t> consumed;  // written by the receiver
  Message ring[kRing];
};

// What others may look at: written by the rank itself, except `bell` and `sleeping`.
struct alignas(kLine) ShmJob::RankBlock {
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> state;
  // For messages only, so words without an order among them will do.
  std::atomic<uint32_t> call_kind;
  std::atomic<int32_t> call_first, call_stride, call_size;
  std::atomic<uint64_t> call_bytes;
  std::atomic<uint64_t> phase[kPhaseWords];
  // A sleeper sets `sleeping`, looks once more at what it waits for, and sleeps on `bell`. Who
  // changes something it could wait for takes `sleeping` away and rings.
  alignas(kLine) std::atomic<uint32_t> sleeping;
  std::atomic<uint32_t> bell;
};

struct alignas(kLine) ShmJob::Shared {
  std::atomic<uint32_t> abort_state;
  int32_t abort_rank;
  int32_t abort_pid;
  int32_t abort_code;
  char abort_text[kAbortTextMax];
};

// ---------------------------------------------------------------------------------------- ShmJob

Result<std::shared_ptr<ShmJob>> ShmJob::Create(int ranks, const ShmOptions& options) {
  if (ranks < 1 || ranks > kShmRanksMax) {
    return UsageError(fmt::format("{} ranks on one host: expected 1 to {}", ranks, kShmRanksMax));
  }
  std::shared_ptr<ShmJob> job(new ShmJob);
  job->ranks_ = ranks;
  job->options_ = options;
  job->options_.slot_bytes = RoundUp(std::max(options.slot_bytes, kSlotBytesMin), kLine);
  const size_t n = static_cast<size_t>(ranks);
  job->map_bytes_ = sizeof(Shared) + n * sizeof(RankBlock) + n * n * sizeof(Channel) +
                    n * kSlots * job->options_.slot_bytes;
  void* map = mmap(nullptr, job->map_bytes_, PROT_READ | PROT_WRITE,
                   MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) {
    return FailedError(fmt::format("can not map {} bytes of shared memory for {} ranks: {}",
                                   job->map_bytes_, ranks, std::strerror(errno)));
  }
  job->shared_ = new (map) Shared{};
  for (int rank = 0; rank < ranks; ++rank) {
    new (&job->rank_block(rank)) RankBlock{};
    for (int to = 0; to < ranks; ++to) new (&job->channel(rank, to)) Channel{};
  }
  return job;
}

ShmJob::~ShmJob() {
  if (shared_ != nullptr) munmap(shared_, map_bytes_);
}

ShmJob::RankBlock& ShmJob::rank_block(int rank) const {
  return reinterpret_cast<RankBlock*>(shared_ + 1)[rank];
}

ShmJob::Channel& ShmJob::channel(int from, int to) const {
  return reinterpret_cast<Channel*>(&rank_block(ranks_))[from * ranks_ + to];
}

std::byte* ShmJob::staging(int rank) const {
  return reinterpret_cast<std::byte*>(&channel(ranks_, 0)) +
         static_cast<size_t>(rank) * kSlots * options_.slot_bytes;
}

void ShmJob::Wake(int rank) const {
  RankBlock& block = rank_block(rank);
  if (block.sleeping.load(std::memory_order_seq_cst) == 0) return;
  if (block.sleeping.exchange(0) == 0) return;
  block.bell.fetch_add(1);
  FutexWakeAll(block.bell);
}

void ShmJob::Abort(int rank, const Status& why) {
  RT_CHECK(!why.ok());
  uint32_t expected = kRunning;
  if (!shared_->abort_state.compare_exchange_strong(expected, kAborting)) return;
  shared_->abort_rank = rank;
  shared_->abort_pid = rank_block(rank).pid.load();
  shared_->abort_code = static_cast<int32_t>(why.code());
  const size_t length = std::min(why.message().size(), kAbortTextMax - 1);
  std::memcpy(shared_->abort_text, why.message().data(), length);
  shared_->abort_text[length] = '\0';
  shared_->abort_state.store(kAborted);
  for (int other = 0; other < ranks_; ++other) Wake(other);
}

std::optional<ShmAbort> ShmJob::aborted() const {
  if (shared_->abort_state.load() == kRunning) return std::nullopt;
  // The writer is between two stores, or was killed there.
  for (int i = 0; i < 1000 && shared_->abort_state.load() != kAborted; ++i) usleep(100);
  if (shared_->abort_state.load() != kAborted) {
    return ShmAbort{0, 0, FailedError("a rank was killed while it gave up; its reason is lost")};
  }
  return ShmAbort{shared_->abort_rank, shared_->abort_pid,
                  Status(static_cast<StatusCode>(shared_->abort_code), shared_->abort_text)};
}

void ShmJob::SetFinished(int rank) { rank_block(rank).state.store(kFinished); }

bool ShmJob::finished(int rank) const { return rank_block(rank).state.load() == kFinished; }

std::string ShmJob::Describe(int rank) const {
  const RankBlock& block = rank_block(rank);
  std::string text = fmt::format("rank {}", rank);
  if (block.state.load() == kAbsent) return text + " (not started)";
  text += fmt::format(" (pid {})", block.pid.load());
  if (block.state.load() == kFinished) return text + ", finished";
  const CommCall call = {static_cast<CommKind>(block.call_kind.load()),
                         {block.call_first.load(), std::max(1, block.call_stride.load()),
                          std::max(1, block.call_size.load())},
                         block.call_bytes.load()};
  text += call.kind == CommKind::kNone ? ", between calls" : ", in " + CallText(call);
  char phase[kPhaseWords * 8 + 1] = {};
  for (int i = 0; i < kPhaseWords; ++i) {
    const uint64_t word = block.phase[i].load(std::memory_order_relaxed);
    std::memcpy(phase + 8 * i, &word, 8);
  }
  if (phase[0] != '\0') text += fmt::format(", phase '{}'", phase);
  return text;
}

// --------------------------------------------------------------------------------------- ShmComm

ShmComm::ShmComm(std::shared_ptr<ShmJob> job, int rank)
    : job_(std::move(job)), rank_(rank), slot_readers_(kSlots) {
  RT_CHECK(rank >= 0 && rank < job_->ranks());
  spin_us_ = job_->options().spin_us;
  if (spin_us_ < 0) spin_us_ = job_->ranks() <= AvailableCpus() ? 20 : 0;
  ShmJob::RankBlock& block = job_->rank_block(rank_);
  block.pid.store(getpid());
  RT_CHECK_EQ(uint32_t{kAbsent}, block.state.exchange(kJoined));
}

Status ShmComm::AllToAll(const RankGroup& group, const void* send, void* recv, size_t block_bytes) {
  const auto* from = static_cast<const std::byte*>(send);
  auto* to = static_cast<std::byte*>(recv);
  const CommCall call = {CommKind::kAllToAll, group, block_bytes};
  RT_RETURN_IF_ERROR(Begin(call));
  const size_t own = static_cast<size_t>(group.IndexOf(rank_)) * block_bytes;
  if (block_bytes > 0) std::memcpy(to + own, from + own, block_bytes);
  return End(Exchange(call, from, block_bytes, to));
}

Status ShmComm::AllGather(const RankGroup& group, const void* mine, void* all, size_t bytes) {
  const auto* from = static_cast<const std::byte*>(mine);
  auto* to = static_cast<std::byte*>(all);
  const CommCall call = {CommKind::kAllGather, group, bytes};
  RT_RETURN_IF_ERROR(Begin(call));
  std::byte* own = to + static_cast<size_t>(group.IndexOf(rank_)) * bytes;
  if (bytes > 0 && own != from) std::memcpy(own, from, bytes);
  return End(Exchange(call, from, 0, to));
}

Status ShmComm::Broadcast(const RankGroup& group, void* data, size_t bytes) {
  const CommCall call = {CommKind::kBroadcast, group, bytes};
  RT_RETURN_IF_ERROR(Begin(call));
  auto* at = static_cast<std::byte*>(data);
  const bool root = group.IndexOf(rank_) == 0;
  const size_t slot_bytes = job_->options().slot_bytes;
  const uint64_t pieces = std::max<uint64_t>(1, (bytes + slot_bytes - 1) / slot_bytes);
  for (uint64_t piece = 0; piece < pieces && group.size > 1; ++piece) {
    const size_t begin = piece * slot_bytes;
    const size_t n = std::min(slot_bytes, bytes - begin);
    if (root) {
      RT_RETURN_IF_ERROR(AcquireSlot(call));
      const size_t offset = slot_ * slot_bytes;
      if (n > 0) std::memcpy(job_->staging(rank_) + offset, at + begin, n);
      for (int i = 1; i < group.size; ++i) {
        RT_RETURN_IF_ERROR(Post(call, group.RankAt(i), piece, offset));
      }
    } else {
      const std::byte* source = nullptr;
      RT_RETURN_IF_ERROR(Take(call, group.first, piece, &source));
      if (n > 0) std::memcpy(at + begin, source, n);
      Release(group.first);
    }
  }
  return End({});
}

// Dissemination: in round k each tells the one 2^k further and hears from the one 2^k before.
Status ShmComm::Barrier(const RankGroup& group) {
  const CommCall call = {CommKind::kBarrier, group, 0};
  RT_RETURN_IF_ERROR(Begin(call));
  const int me = group.IndexOf(rank_);
  uint64_t round = 0;
  for (int step = 1; step < group.size; step *= 2, ++round) {
    const std::byte* nothing = nullptr;
    const int before = group.RankAt((me + group.size - step) % group.size);
    RT_RETURN_IF_ERROR(Post(call, group.RankAt((me + step) % group.size), round, 0));
    RT_RETURN_IF_ERROR(Take(call, before, round, &nothing));
    Release(before);
  }
  return End({});
}

// Each member sends its piece to all others: one copy for all (send_stride 0) or one for each.
Status ShmComm::Exchange(const CommCall& call, const std::byte* send, size_t send_stride,
                         std::byte* recv) {
  const RankGroup& group = call.group;
  if (group.size == 1) return {};
  const int me = group.IndexOf(rank_);
  const bool gather = send_stride == 0;
  const size_t slot_bytes = job_->options().slot_bytes;
  size_t piece_bytes = gather ? slot_bytes : slot_bytes / (group.size - 1);
  if (piece_bytes > kLine) piece_bytes = piece_bytes / kLine * kLine;
  const uint64_t pieces = std::max<uint64_t>(1, (call.bytes + piece_bytes - 1) / piece_bytes);
  for (uint64_t piece = 0; piece < pieces; ++piece) {
    const size_t begin = piece * piece_bytes;
    const size_t n = std::min(piece_bytes, call.bytes - begin);
    RT_RETURN_IF_ERROR(AcquireSlot(call));
    const size_t slot = slot_ * slot_bytes;
    if (gather && n > 0) std::memcpy(job_->staging(rank_) + slot, send + begin, n);
    for (int step = 1; step < group.size; ++step) {
      const int index = (me + step) % group.size;
      const size_t offset = gather ? slot : slot + (step - 1) * piece_bytes;
      if (!gather && n > 0) {
        std::memcpy(job_->staging(rank_) + offset, send + index * send_stride + begin, n);
      }
      RT_RETURN_IF_ERROR(Post(call, group.RankAt(index), piece, offset));
    }
    for (int step = 1; step < group.size; ++step) {
      const int index = (me + group.size - step) % group.size;
      const std::byte* source = nullptr;
      RT_RETURN_IF_ERROR(Take(call, group.RankAt(index), piece, &source));
      if (n > 0) std::memcpy(recv + index * call.bytes + begin, source, n);
      Release(group.RankAt(index));
    }
  }
  return {};
}

// ----------------------------------------------------------------------------- one piece, one wait

Status ShmComm::Begin(const CommCall& call) {
  CheckGroup(call.group, rank_, size());
  ShmJob::RankBlock& block = job_->rank_block(rank_);
  if (published_phase_ != phase()) {
    published_phase_ = phase();
    char text[kPhaseWords * 8] = {};
    std::memcpy(text, phase().data(), std::min(phase().size(), sizeof text - 1));
    for (int i = 0; i < kPhaseWords; ++i) {
      uint64_t word;
      std::memcpy(&word, text + 8 * i, 8);
      block.phase[i].store(word, std::memory_order_relaxed);
    }
  }
  block.call_first.store(call.group.first, std::memory_order_relaxed);
  block.call_stride.store(call.group.stride, std::memory_order_relaxed);
  block.call_size.store(call.group.size, std::memory_order_relaxed);
  block.call_bytes.store(call.bytes, std::memory_order_relaxed);
  block.call_kind.store(static_cast<uint32_t>(call.kind), std::memory_order_relaxed);
  waited_s_ = 0;
  if (job_->shared_->abort_state.load(std::memory_order_acquire) != kRunning) {
    return AbortedStatus(call);
  }
  return {};
}

Status ShmComm::End(Status status) {
  if (!status.ok()) return status;
  job_->rank_block(rank_).call_kind.store(static_cast<uint32_t>(CommKind::kNone),
                                          std::memory_order_relaxed);
  return {};
}

// An error that this rank found: everyone gets it.
Status ShmComm::Fail(const CommCall& call, const std::string& what) {
  job_->Abort(rank_, FailedError(fmt::format("{}: {}", Where(call), what)));
  return AbortedStatus(call);
}

Status ShmComm::AbortedStatus(const CommCall& call) const {
  const ShmAbort reason = *job_->aborted();
  if (reason.rank == rank_) return FailedError(reason.status.message());
  return FailedError(fmt::format("{}: the job was ended by rank {} (pid {}): {}", Where(call),
                                 reason.rank, reason.pid, reason.status.message()));
}

std::string ShmComm::Where(const CommCall& call) const {
  std::string where =
      fmt::format("rank {} of {} (pid {}), {}", rank_, size(), getpid(), CallText(call));
  if (!phase().empty()) where += fmt::format(", phase '{}'", phase());
  return where;
}

// Returns when `counter`, which `peer` advances, has reached `target`.
Status ShmComm::Wait(const CommCall& call, int peer, const std::atomic<uint32_t>& counter,
                     uint32_t target) {
  if (Reached(counter, target)) return {};
  if (spin_us_ > 0) {
    const double end = Now() + spin_us_ * 1e-6;
    do {
      for (int i = 0; i < 16; ++i) {
        if (Reached(counter, target)) return {};
        Pause();
      }
    } while (Now() < end);
  }
  return WaitAsleep(call, peer, counter, target);
}

Status ShmComm::WaitAsleep(const CommCall& call, int peer, const std::atomic<uint32_t>& counter,
                           uint32_t target) {
  ShmJob::RankBlock& me = job_->rank_block(rank_);
  double last = Now();
  while (true) {
    me.sleeping.store(1, std::memory_order_seq_cst);
    const uint32_t bell = me.bell.load(std::memory_order_seq_cst);
    const bool reached = Reached(counter, target);
    const bool aborted = job_->shared_->abort_state.load(std::memory_order_seq_cst) != kRunning;
    if (!reached && !aborted) {
      const double left = job_->options().time_limit_s - waited_s_;
      FutexWait(me.bell, bell, std::clamp(left, 1e-4, kSliceSeconds));
    }
    me.sleeping.store(0, std::memory_order_seq_cst);
    if (reached) return {};
    if (aborted) return AbortedStatus(call);
    // A job stopped by its terminal goes on after it: at most two slices count.
    const double now = Now();
    waited_s_ += std::min(now - last, 2 * kSliceSeconds);
    last = now;
    if (waited_s_ >= job_->options().time_limit_s && !Reached(counter, target)) {
      return TimedOut(call, peer);
    }
  }
}

Status ShmComm::TimedOut(const CommCall& call, int peer) {
  return Fail(call,
              fmt::format("waited {:g} s, the time limit, for {}. Raise the limit if that rank "
                          "is only slow",
                          job_->options().time_limit_s, job_->Describe(peer)));
}

// Moves on to the next slot, when all who were sent a piece of it have read it.
Status ShmComm::AcquireSlot(const CommCall& call) {
  slot_ = (slot_ + 1) % kSlots;
  for (const auto& [peer, count] : slot_readers_[slot_]) {
    RT_RETURN_IF_ERROR(Wait(call, peer, job_->channel(rank_, peer).consumed, count));
  }
  slot_readers_[slot_].clear();
  return {};
}

Status ShmComm::Post(const CommCall& call, int peer, uint64_t piece, size_t offset) {
  ShmJob::Channel& channel = job_->channel(rank_, peer);
  const uint32_t posted = channel.posted.load(std::memory_order_relaxed);
  RT_RETURN_IF_ERROR(Wait(call, peer, channel.consumed, posted - kRing + 1));
  ShmJob::Message& message = channel.ring[posted % kRing];
  message.call = call;
  message.piece = piece;
  message.offset = offset;
  channel.posted.store(posted + 1, std::memory_order_seq_cst);
  if (call.kind != CommKind::kBarrier) slot_readers_[slot_].emplace_back(peer, posted + 1);
  job_->Wake(peer);
  return {};
}

// The next piece from `peer`, valid until Release(peer).
Status ShmComm::Take(const CommCall& call, int peer, uint64_t piece, const std::byte** data) {
  ShmJob::Channel& channel = job_->channel(peer, rank_);
  const uint32_t consumed = channel.consumed.load(std::memory_order_relaxed);
  RT_RETURN_IF_ERROR(Wait(call, peer, channel.posted, consumed + 1));
  const ShmJob::Message& message = channel.ring[consumed % kRing];
  if (!SameCall(message.call, call) || message.piece != piece) {
    return Fail(call,
                fmt::format("calls disagree: rank {} sent piece {} of {} where piece {} of {} "
                            "was expected; it is now {}",
                            peer, message.piece, CallText(message.call), piece, CallText(call),
                            job_->Describe(peer)));
  }
  *data = job_->staging(peer) + message.offset;
  return {};
}

void ShmComm::Release(int peer) {
  ShmJob::Channel& channel = job_->channel(peer, rank_);
  channel.consumed.store(channel.consumed.load(std::memory_order_relaxed) + 1,
                         std::memory_order_seq_cst);
  job_->Wake(peer);
}

}  // namespace retrace
