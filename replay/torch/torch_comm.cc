// TorchComm: the Comm of ranks on several hosts, over c10d's TCPStore and ProcessGroupGloo.
//
// It uses only point-to-point messages. A call exchanges frames (the call itself and, if small, its
// payload) with the same partners as ShmComm, compares them, and only then moves larger payloads,
// so calls that disagree never reach a receive of the wrong size. c10d's own collectives would need
// a process group per rank group, and its all-to-all of lists does not exist for Gloo.
//
// A rank that gives up writes its reason to the store and closes its connections; the others see
// those close, and look the reason up.
#include "replay/torch/torch_comm.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "core/version.h"
#include "replay/comm_call.h"
#include "replay/torch/native_level.h"

namespace retrace {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kFrameTag = 1;
constexpr int kPayloadTag = 2;
constexpr size_t kFrameBytes = 1024;
constexpr size_t kPhaseBytes = 96;
constexpr char kReasonKey[] = "reason";
constexpr char kLeftKey[] = "ranks that need the store no more";
constexpr auto kPollPeriod = milliseconds(20);
constexpr auto kReasonWait = milliseconds(500);  // for the one who gave up to have said why
constexpr auto kStoreWait = milliseconds(2000);  // for any answer of the store
constexpr auto kLingerMax = milliseconds(2000);  // for the others to read it from rank 0's store

struct Frame {
  CommCall call;
  uint64_t piece = 0;
  char phase[kPhaseBytes] = {};  // the sender's, for messages
  std::byte data[kFrameBytes - sizeof(CommCall) - sizeof(uint64_t) - kPhaseBytes];
};
static_assert(sizeof(Frame) == kFrameBytes);

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

milliseconds Milliseconds(double seconds) {
  return milliseconds(std::max<int64_t>(1, static_cast<int64_t>(seconds * 1000)));
}

at::Tensor Bytes(const void* data, size_t bytes) {
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

// c10 adds a C++ backtrace to what(): its first line says it all.
std::string FirstLine(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

// Runs fn in a thread, for at most `limit`; throws what fn throws. False: it has not come back.
// c10d's calls on a store have no time limit of their own: one whose host is stopped or cut off
// would hold them for ever. The thread is left behind then, so fn owns all that it uses.
bool Within(milliseconds limit, std::function<void()> fn) {
  auto promise = std::make_shared<std::promise<void>>();
  std::future<void> done = promise->get_future();
  std::thread([promise, fn = std::move(fn)]() mutable {
    try {
      fn();
      fn = nullptr;  // before anybody goes on: it may hold the last reference
      promise->set_value();
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (done.wait_for(limit) != std::future_status::ready) return false;
  done.get();
  return true;
}

bool IsLoopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// The address of this host that packets to `host` leave from; "": none. Nothing is sent.
std::string SourceAddress(const std::string& host, int port) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return "";
  std::string address;
  for (const addrinfo* at = found; at != nullptr && address.empty(); at = at->ai_next) {
    const int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    if (fd < 0) continue;
    sockaddr_storage source = {};
    socklen_t length = sizeof source;
    char text[NI_MAXHOST] = "";
    if (connect(fd, at->ai_addr, at->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&source), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&source), length, text, sizeof text, nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      address = text;
    }
    close(fd);
  }
  freeaddrinfo(found);
  return address;
}

// By the way to rank 0. Gloo's default, the address of this host's name, is 127.0.1.1 wherever
// /etc/hosts says so, as Debian's does: other hosts can not reach that. The same file may hide rank
// 0's own address from it; then the way out decides.
std::string AddressForOthers(const std::string& master, int port) {
  const std::string address = SourceAddress(master, port);
  constexpr char kSomewhere[] = "192.0.2.1";  // set aside for documentation (RFC 5737)
  return IsLoopback(address) ? SourceAddress(kSomewhere, port) : address;
}

std::shared_ptr<gloo::transport::Device> MakeDevice(const std::string& host, int port) {
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface != nullptr && *interface != '\0') {
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  }
  if (IsLoopback(host)) return c10d::ProcessGroupGloo::createDeviceForHostname(host);
  const std::string address = AddressForOthers(host, port);
  if (!address.empty()) return c10d::ProcessGroupGloo::createDeviceForHostname(address);
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

class TorchComm final : public Comm {
 public:
  explicit TorchComm(const TorchCommRequest& request) : request_(request) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(request.port);
    options.isServer = request.serve_store;
    options.waitWorkers = false;
    options.timeout = Milliseconds(request.join_limit_s);
    options.multiTenant = true;
    const auto tcp = c10::make_intrusive<c10d::TCPStore>(request.host, options);
    store_ = c10::make_intrusive<c10d::PrefixStore>("retrace/" + request.attempt, tcp);
    auto group_options =
        c10d::ProcessGroupGloo::Options::create(Milliseconds(request.join_limit_s));
    group_options->devices.push_back(MakeDevice(request.host, request.port));
    group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store_, request.rank, request.size,
                                                         group_options);
    frames_out_.resize(request.size);
    frames_in_.resize(request.size);
  }

  ~TorchComm() override { Close(); }

  int rank() const override { return request_.rank; }
  int size() const override { return request_.size; }

  Status AllToAll(const RankGroup& group, const void* send, void* recv,
                  size_t block_bytes) override {
    const auto* from = static_cast<const std::byte*>(send);
    auto* to = static_cast<std::byte*>(recv);
    const CommCall call = {CommKind::kAllToAll, group, block_bytes};
    return Guarded(call, [&] {
      const size_t own = static_cast<size_t>(group.IndexOf(rank())) * block_bytes;
      if (block_bytes > 0) std::memcpy(to + own, from + own, block_bytes);
      Exchange(call, from, block_bytes, to);
    });
  }

  Status AllGather(const RankGroup& group, const void* mine, void* all, size_t bytes) override {
    const auto* from = static_cast<const std::byte*>(mine);
    auto* to = static_cast<std::byte*>(all);
    const CommCall call = {CommKind::kAllGather, group, bytes};
    return Guarded(call, [&] {
      std::byte* own = to + static_cast<size_t>(group.IndexOf(rank())) * bytes;
      if (bytes > 0 && own != from) std::memcpy(own, from, bytes);
      Exchange(call, from, 0, to);
    });
  }

  Status Broadcast(const RankGroup& group, void* data, size_t bytes) override {
    auto* at = static_cast<std::byte*>(data);
    const CommCall call = {CommKind::kBroadcast, group, bytes};
    return Guarded(call, [&] {
      std::vector<Transfer> sends, receives;
      for (int i = 1; i < group.size; ++i) {
        if (rank() == group.first) sends.push_back({group.RankAt(i), at});
      }
      if (rank() != group.first) receives.push_back({group.first, at});
      Move(call, 0, sends, receives);
    });
  }

  // Dissemination, as in ShmComm.
  Status Barrier(const RankGroup& group) override {
    const CommCall call = {CommKind::kBarrier, group, 0};
    return Guarded(call, [&] {
      const int me = group.IndexOf(rank());
      uint64_t round = 0;
      for (int step = 1; step < group.size; step *= 2, ++round) {
        Move(call, round, {{group.RankAt((me + step) % group.size), nullptr}},
             {{group.RankAt((me + group.size - step) % group.size), nullptr}});
      }
    });
  }

  void Abort(const Status& why) override {
    if (failure_.empty()) GiveUp(why.message());
    LingerForReaders();
  }

 private:
  // One message to or from `peer`; `data` is in the caller's memory.
  struct Transfer {
    int peer;
    std::byte* data;
  };
  struct Pending {
    int peer;
    c10::intrusive_ptr<c10d::Work> work;
  };
  // What this rank found wrong itself, so that no other reason need be looked for.
  struct Disagreement : std::exception {
    explicit Disagreement(std::string text_in) : text(std::move(text_in)) {}
    const char* what() const noexcept override { return text.c_str(); }
    std::string text;
  };

  milliseconds Left() const {
    return Milliseconds(request_.time_limit_s - SecondsSince(call_start_));
  }

  std::string Where(const CommCall& call) const {
    std::string where =
        fmt::format("rank {} of {} (pid {}), {}", rank(), size(), getpid(), CallText(call));
    if (!phase().empty()) where += fmt::format(", phase '{}'", phase());
    return where;
  }

  // Runs one call; no exception of c10d's leaves it.
  template <class Body>
  Status Guarded(const CommCall& call, const Body& body) {
    CheckGroup(call.group, rank(), size());
    if (!failure_.empty()) {
      return FailedError(Where(call) + ": the job was ended before: " + failure_);
    }
    call_start_ = Clock::now();
    waiting_for_ = -1;
    try {
      body();
      return {};
    } catch (const Disagreement& error) {
      GiveUp(fmt::format("{}: {}", Where(call), error.text));
      return FailedError(failure_);
    } catch (const std::exception& error) {
      return Failed(call, FirstLine(error));
    } catch (...) {
      return Failed(call, "an exception of unknown type");
    }
  }

  Status Failed(const CommCall& call, const std::string& text) {
    const std::string peer =
        waiting_for_ < 0 ? "the other ranks" : fmt::format("rank {}", waiting_for_);
    const bool late = SecondsSince(call_start_) >= 0.99 * request_.time_limit_s;
    std::string what;
    if (late) {
      what = fmt::format(
          "waited {:g} s, the time limit, for {} ({}). Raise the limit if that rank is "
          "only slow",
          request_.time_limit_s, peer, text);
    } else if (const std::optional<std::string> reason = ReasonOfOthers()) {
      what = "the job was ended: " + *reason;
    } else {
      what = fmt::format("lost {}, which died or closed its connection ({})", peer, text);
    }
    GiveUp(fmt::format("{}: {}", Where(call), what));
    return FailedError(failure_);
  }

  // Each member sends its block (stride 0: the same) to all others.
  void Exchange(const CommCall& call, const std::byte* send, size_t send_stride, std::byte* recv) {
    const RankGroup& group = call.group;
    const int me = group.IndexOf(rank());
    std::vector<Transfer> sends, receives;
    for (int step = 1; step < group.size; ++step) {
      const int to = (me + step) % group.size;
      const int from = (me + group.size - step) % group.size;
      sends.push_back({group.RankAt(to), const_cast<std::byte*>(send) + to * send_stride});
      receives.push_back({group.RankAt(from), recv + from * call.bytes});
    }
    Move(call, 0, sends, receives);
  }

  void Move(const CommCall& call, uint64_t piece, const std::vector<Transfer>& sends,
            const std::vector<Transfer>& receives) {
    const bool in_frame = call.bytes <= sizeof(Frame::data);
    std::vector<Pending> pending;
    for (const Transfer& transfer : sends) {
      Frame& frame = frames_out_[transfer.peer];
      frame.call = call;
      frame.piece = piece;
      std::memset(frame.phase, 0, kPhaseBytes);
      std::memcpy(frame.phase, phase().data(), std::min(phase().size(), kPhaseBytes - 1));
      if (in_frame && call.bytes > 0) std::memcpy(frame.data, transfer.data, call.bytes);
      Send(transfer.peer, kFrameTag, &frame, sizeof frame, &pending);
    }
    for (const Transfer& transfer : receives) {
      Receive(transfer.peer, kFrameTag, &frames_in_[transfer.peer], sizeof(Frame), &pending);
    }
    // Received frames first: what they disagree on explains why a send may wait in vain.
    std::rotate(pending.begin(), pending.begin() + sends.size(), pending.end());
    for (size_t i = 0; i < pending.size(); ++i) {
      WaitFor(pending[i]);
      if (i < receives.size()) CheckFrame(call, piece, receives[i].peer);
    }
    if (in_frame) {
      for (const Transfer& transfer : receives) {
        if (call.bytes > 0) {
          std::memcpy(transfer.data, frames_in_[transfer.peer].data, call.bytes);
        }
      }
      return;
    }
    pending.clear();
    for (const Transfer& transfer : receives) {
      Receive(transfer.peer, kPayloadTag, transfer.data, call.bytes, &pending);
    }
    for (const Transfer& transfer : sends) {
      Send(transfer.peer, kPayloadTag, transfer.data, call.bytes, &pending);
    }
    for (const Pending& one : pending) WaitFor(one);
  }

  void CheckFrame(const CommCall& call, uint64_t piece, int peer) const {
    const Frame& frame = frames_in_[peer];
    if (SameCall(frame.call, call) && frame.piece == piece) return;
    const std::string sender_phase(frame.phase, strnlen(frame.phase, kPhaseBytes));
    throw Disagreement(
        fmt::format("calls disagree: rank {} (phase '{}') sent piece {} of {} where "
                    "piece {} of {} was expected",
                    peer, sender_phase, frame.piece, CallText(frame.call), piece, CallText(call)));
  }

  void Send(int peer, int tag, const void* data, size_t bytes, std::vector<Pending>* pending) {
    waiting_for_ = peer;
    std::vector<at::Tensor> tensors = {Bytes(data, bytes)};
    pending->push_back({peer, group_->send(tensors, peer, tag)});
  }

  void Receive(int peer, int tag, void* data, size_t bytes, std::vector<Pending>* pending) {
    waiting_for_ = peer;
    std::vector<at::Tensor> tensors = {Bytes(data, bytes)};
    pending->push_back({peer, group_->recv(tensors, peer, tag)});
  }

  void WaitFor(const Pending& pending) {
    waiting_for_ = pending.peer;
    pending.work->wait(Left());
  }

  // Once. The first rank's reason stands; closing the connections tells the others that there is
  // one.
  void GiveUp(const std::string& reason) {
    failure_ = reason;
    try {
      const std::vector<uint8_t> text(reason.begin(), reason.end());
      Within(kStoreWait, [store = store_, text] {
        store->compareSet(kReasonKey, std::vector<uint8_t>(), text);
        store->add(kLeftKey, 1);
      });
    } catch (const std::exception&) {
      // The store is gone with rank 0; the closing connections are all that is left to say.
    }
    Close();
  }

  void Close() {
    try {
      group_.reset();
    } catch (const std::exception&) {
      // Nothing depends on how a connection ends.
    }
  }

  // Polls: a blocking read that runs into its time limit makes c10d print warnings.
  std::optional<std::string> ReasonOfOthers() {
    auto reason = std::make_shared<std::optional<std::string>>();
    try {
      const bool answered = Within(kReasonWait + kStoreWait, [store = store_, reason] {
        const Clock::time_point start = Clock::now();
        while (!store->check({kReasonKey})) {
          if (Clock::now() - start > kReasonWait) return;
          std::this_thread::sleep_for(kPollPeriod);
        }
        const std::vector<uint8_t> text = store->get(kReasonKey);
        *reason = std::string(text.begin(), text.end());
      });
      return answered ? *reason : std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }

  // The store dies with the rank that serves it, and the reason with the store.
  void LingerForReaders() {
    if (!request_.serve_store) return;
    const Clock::time_point start = Clock::now();
    try {
      while (Clock::now() - start < kLingerMax && store_->add(kLeftKey, 0) < size()) {
        std::this_thread::sleep_for(kPollPeriod);
      }
    } catch (const std::exception&) {
      // Nobody can read it then.
    }
  }

  TorchCommRequest request_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::vector<Frame> frames_out_, frames_in_;  // by peer; outlive the transfers that use them
  Clock::time_point call_start_;
  int waiting_for_ = -1;
  std::string failure_;
};

Comm* MakeTorchComm(const TorchCommRequest& request, std::string* error) {
  // The store and the group have the limit each, and keep to it where the store answers.
  const milliseconds limit = 2 * Milliseconds(request.join_limit_s) + kStoreWait;
  auto comm = std::make_shared<std::unique_ptr<TorchComm>>();
  try {
    if (Within(limit, [request, comm] { *comm = std::make_unique<TorchComm>(request); })) {
      return comm->release();
    }
    *error = "the store of rank 0 accepts connections but does not answer";
  } catch (const std::exception& caught) {
    *error = FirstLine(caught);
  } catch (...) {
    *error = "an exception of unknown type";
  }
  return nullptr;
}

}  // namespace
}  // namespace retrace

extern "C" __attribute__((visibility("default"))) const retrace::TorchPlugin*
retrace_torch_plugin() {
  static const retrace::TorchPlugin plugin = {retrace::kTorchPluginAbi, retrace::kVersion,
                                              retrace::MakeTorchComm, retrace::OpenNativeKernels};
  c10::initLogging();  // reads TORCH_CPP_LOG_LEVEL, which c10 otherwise leaves to Python
  return &plugin;
}
