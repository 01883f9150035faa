// longjmp between stacks is what fibers do; the checked one takes it for an error.
#undef _FORTIFY_SOURCE
#include "kernels/cuda/emulator.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>

#include "core/check.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace retrace::cuda {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kFaultsKept = 8;  // of a launch
constexpr int kWarp = 32;

enum class Waiting { kNot, kBarrier, kShuffle, kDone };

struct Fiber {
  jmp_buf at;
  ucontext_t start;
  std::unique_ptr<char[]> stack;
  bool started = false;
  Waiting waiting = Waiting::kNot;
  const char* file = nullptr;  // of the barrier or shuffle that it waits at
  unsigned line = 0;
  unsigned mask = 0;
  uint64_t value = 0, received = 0;
  int source = 0;  // lane whose value it gets
};

struct Machine {
  std::mutex launch;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  sigjmp_buf abort;  // out of the launch
  bool running = false;
  const char* kernel = "";
  const emulator::Body* body = nullptr;
  int threads = 0, thread = 0;
  uint64_t block = 0, interval = 0;  // never repeat
  RunOrder order = RunOrder::kAscending;
  std::mt19937 random{1};
  std::vector<std::string> faults;
  size_t faults_before_launch = 0;
  struct Range {
    const unsigned char* mapping;
    size_t mapped_bytes;
    const unsigned char* data;
    size_t size_bytes;
  };
  std::vector<Range> ranges;
};

Machine& machine() {
  static Machine* machine = new Machine;  // outlives every test
  return *machine;
}

std::string Where() {
  const Machine& m = machine();
  if (!m.running) return std::string();
  return std::string(m.kernel) + ", block (" + std::to_string(blockIdx.x) + ", " +
         std::to_string(blockIdx.y) + "), thread " + std::to_string(m.thread) + ": ";
}

void Note(const std::string& what) {
  Machine& m = machine();
  if (m.faults.size() - m.faults_before_launch < kFaultsKept) m.faults.push_back(Where() + what);
}

void Yield() {
  Machine& m = machine();
  if (_setjmp(m.current->at) == 0) _longjmp(m.scheduler, 1);
}

void FiberMain() {
  Machine& m = machine();
  for (;;) {
    m.body->call(m.body->context);
    m.current->waiting = Waiting::kDone;
    Yield();
  }
}

void Resume(int thread) {
  Machine& m = machine();
  m.thread = thread;
  threadIdx = dim3(static_cast<unsigned>(thread), 0, 0);
  m.current = m.fibers[thread].get();
  m.current->waiting = Waiting::kNot;
  if (_setjmp(m.scheduler) != 0) return;
  if (m.current->started) _longjmp(m.current->at, 1);
  Fiber& fiber = *m.current;
  fiber.started = true;
  if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
  getcontext(&fiber.start);
  fiber.start.uc_stack = {fiber.stack.get(), 0, kStackBytes};
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, FiberMain, 0);
  setcontext(&fiber.start);
}

std::vector<int> Order(int64_t count) {
  Machine& m = machine();
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (m.order == RunOrder::kDescending) std::reverse(order.begin(), order.end());
  if (m.order == RunOrder::kShuffled) std::shuffle(order.begin(), order.end(), m.random);
  return order;
}

[[noreturn]] void Abort(const std::string& what) {
  Machine& m = machine();
  Note(what);
  for (auto& fiber : m.fibers) fiber->started = false;  // left in the middle
  siglongjmp(m.abort, 1);
}

// Lets the shuffles go whose lanes are all there. Did any?
bool ReleaseShuffles() {
  Machine& m = machine();
  bool any = false;
  for (int t = 0; t < m.threads; ++t) {
    Fiber& fiber = *m.fibers[t];
    if (fiber.waiting != Waiting::kShuffle) continue;
    const int warp = t / kWarp * kWarp;
    bool all = (fiber.mask >> (t - warp)) & 1;
    for (int lane = 0; lane < kWarp && all; ++lane) {
      if (!((fiber.mask >> lane) & 1)) continue;
      if (warp + lane >= m.threads) { all = false; break; }
      const Fiber& other = *m.fibers[warp + lane];
      all = other.waiting == Waiting::kShuffle && other.mask == fiber.mask &&
            other.line == fiber.line && other.file == fiber.file;
    }
    if (!all) continue;
    for (int lane = 0; lane < kWarp; ++lane) {
      if (!((fiber.mask >> lane) & 1)) continue;
      Fiber& other = *m.fibers[warp + lane];
      if (!((fiber.mask >> other.source) & 1)) Abort("a shuffle asks for a lane outside its mask");
      other.received = m.fibers[warp + other.source]->value;
    }
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((fiber.mask >> lane) & 1) m.fibers[warp + lane]->waiting = Waiting::kNot;
    }
    any = true;
  }
  return any;
}

// All that can not go on stands at a barrier, or the kernel is wrong.
void ReleaseBarrier() {
  Machine& m = machine();
  int first = -1, done = 0;
  for (int t = 0; t < m.threads; ++t) {
    const Fiber& fiber = *m.fibers[t];
    if (fiber.waiting == Waiting::kDone) {
      ++done;
      continue;
    }
    m.thread = t;
    if (fiber.waiting == Waiting::kShuffle) {
      Abort("waits at a shuffle (line " + std::to_string(fiber.line) +
            ") for lanes of its mask that do not come");
    }
    if (first < 0) first = t;
    if (fiber.line != m.fibers[first]->line || fiber.file != m.fibers[first]->file) {
      Abort("waits at a __syncthreads in line " + std::to_string(fiber.line) +
            " where another thread waits in line " + std::to_string(m.fibers[first]->line));
    }
  }
  if (done > 0) {
    m.thread = first;
    Abort("waits at a __syncthreads (line " + std::to_string(m.fibers[first]->line) + ") that " +
          std::to_string(done) + " threads left the kernel without reaching");
  }
  for (int t = 0; t < m.threads; ++t) m.fibers[t]->waiting = Waiting::kNot;
  ++m.interval;
}

void RunBlock() {
  Machine& m = machine();
  ++m.block;
  ++m.interval;
  const std::vector<int> order = Order(m.threads);
  for (int t = 0; t < m.threads; ++t) m.fibers[t]->waiting = Waiting::kNot;
  for (;;) {
    for (int t : order) {
      if (m.fibers[t]->waiting == Waiting::kNot) Resume(t);
    }
    const bool all_done = std::all_of(order.begin(), order.end(), [&](int t) {
      return m.fibers[t]->waiting == Waiting::kDone;
    });
    if (all_done) return;
    if (!ReleaseShuffles()) ReleaseBarrier();
  }
}

// A wild pointer of a kernel ends the launch; any other ends the process, as it would have.
void OnSegv(int, siginfo_t* info, void*) {
  Machine& m = machine();
  if (!m.running) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  const auto* at = static_cast<const unsigned char*>(info->si_addr);
  for (const Machine::Range& range : m.ranges) {
    if (at < range.mapping || at >= range.mapping + range.mapped_bytes) continue;
    Abort("touches byte " + std::to_string(at - range.data) + " of an array of " +
          std::to_string(range.size_bytes) + " bytes");
  }
  Abort("touches memory that is not there");
}

void CatchSegv() {
  static thread_local char* stack = nullptr;
  if (stack != nullptr) return;
  constexpr size_t kBytes = 64 << 10;
  stack = new char[kBytes];
  const stack_t alternate = {.ss_sp = stack, .ss_flags = 0, .ss_size = kBytes};
  RT_CHECK(sigaltstack(&alternate, nullptr) == 0);
  struct sigaction action = {};
  action.sa_sigaction = OnSegv;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  RT_CHECK(sigaction(SIGSEGV, &action, nullptr) == 0);
}

void RunGrid(const std::vector<int>& order) {
  for (int at : order) {
    blockIdx = dim3(static_cast<unsigned>(at) % gridDim.x, static_cast<unsigned>(at) / gridDim.x, 0);
    RunBlock();
  }
}

}  // namespace

namespace emulator {

void SetOrder(RunOrder order, uint32_t seed) {
  machine().order = order;
  machine().random.seed(seed);
}

std::vector<std::string> TakeFaults() { return std::exchange(machine().faults, {}); }

void Run(const char* kernel, dim3 grid, unsigned threads, const Body& body) {
  RT_CHECK(threads > 0 && threads <= 1024 && grid.z == 1);
  Machine& m = machine();
  const std::lock_guard lock(m.launch);
  CatchSegv();
  m.kernel = kernel;
  m.body = &body;
  m.threads = static_cast<int>(threads);
  m.faults_before_launch = m.faults.size();
  while (m.fibers.size() < threads) m.fibers.push_back(std::make_unique<Fiber>());
  blockDim = dim3(threads, 1, 1);
  gridDim = grid;
  const std::vector<int> order = Order(static_cast<int64_t>(grid.x) * grid.y);
  m.running = true;
  if (sigsetjmp(m.abort, 1) == 0) RunGrid(order);
  m.running = false;
}

void Barrier(const std::source_location& where) {
  Fiber* fiber = machine().current;
  fiber->waiting = Waiting::kBarrier;
  fiber->file = where.file_name();
  fiber->line = where.line();
  Yield();
}

uint64_t Exchange(unsigned mask, uint64_t value, int lane_mask, int width,
                  const std::source_location& where) {
  Machine& m = machine();
  Fiber* fiber = m.current;
  const int lane = m.thread % kWarp, group = lane / width * width;
  const int source = (lane - group) ^ lane_mask;
  fiber->waiting = Waiting::kShuffle;
  fiber->file = where.file_name();
  fiber->line = where.line();
  fiber->mask = mask;
  fiber->value = value;
  fiber->source = source < width ? group + source : lane;
  Yield();
  return fiber->received;
}

void Fault(const std::string& what) { Note(what); }

void NoteRead(Touches* element, int64_t index) {
  const Machine& m = machine();
  if (element->block != m.block) {
    return Note("reads element " + std::to_string(index) +
                " of a shared array before anything wrote it");
  }
  if (element->written == m.interval && element->writer != m.thread) {
    Note("reads element " + std::to_string(index) + " of a shared array, which thread " +
         std::to_string(element->writer) + " wrote, with no __syncthreads between");
  }
  const bool first = element->read != m.interval;
  element->reader = first || element->reader == m.thread ? m.thread : -2;
  element->read = m.interval;
}

void NoteWrite(Touches* element, int64_t index) {
  const Machine& m = machine();
  const bool same_block = element->block == m.block;
  if (same_block && element->written == m.interval && element->writer != m.thread) {
    Note("writes element " + std::to_string(index) + " of a shared array, which thread " +
         std::to_string(element->writer) + " wrote too, with no __syncthreads between");
  }
  if (same_block && element->read == m.interval && element->reader != m.thread) {
    Note("writes element " + std::to_string(index) +
         " of a shared array, which another thread reads, with no __syncthreads between");
  }
  element->block = m.block;
  element->written = m.interval;
  element->writer = m.thread;
}

void EndOutside(int64_t index, int64_t size) {
  Abort("touches element " + std::to_string(index) + " of a shared array of " +
        std::to_string(size));
}

}  // namespace emulator

namespace {
constexpr unsigned char kSlack = 0xa5;
}

GuardedMemory::GuardedMemory(size_t size_bytes, Place place) : size_bytes_(size_bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t inner = std::max(page, (size_bytes + page - 1) / page * page);
  mapped_bytes_ = inner + 2 * page;
  void* mapping = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  RT_CHECK(mapping != MAP_FAILED);
  mapping_ = static_cast<unsigned char*>(mapping);
  RT_CHECK(mprotect(mapping_ + page, inner, PROT_READ | PROT_WRITE) == 0);
  std::memset(mapping_ + page, kSlack, inner);
  data_ = mapping_ + page + (place == Place::kAtEnd ? inner - size_bytes : 0);
  machine().ranges.push_back({mapping_, mapped_bytes_, data_, size_bytes});
}

void GuardedMemory::CheckSlack() const {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (unsigned char* at = mapping_ + page; at < mapping_ + mapped_bytes_ - page; ++at) {
    if (at == data_) at += size_bytes_;
    if (at >= mapping_ + mapped_bytes_ - page) break;
    if (*at == kSlack) continue;
    Note("byte " + std::to_string(at - data_) + " of an array of " + std::to_string(size_bytes_) +
         " bytes was written");
    return;
  }
}

GuardedMemory::~GuardedMemory() {
  CheckSlack();
  std::erase_if(machine().ranges, [&](const Machine::Range& r) { return r.mapping == mapping_; });
  munmap(mapping_, mapped_bytes_);
}

}  // namespace retrace::cuda
