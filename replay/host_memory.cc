#include "replay/host_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "core/digest.h"
#include "formats/run_lock.h"
#include "replay/exchange.h"

namespace retrace {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

int64_t SystemBytes() {
  struct sysinfo info = {};
  if (sysinfo(&info) != 0) return kNoLimit;
  return static_cast<int64_t>((info.totalram + info.totalswap) * info.mem_unit);
}

int64_t AddressSpaceBytes() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoLimit;
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, kNoLimit));
}

// The least memory.max of this process's control group and those around it (version 2).
int64_t ControlGroupBytes() {
  std::ifstream groups("/proc/self/cgroup");
  std::string group;
  while (std::getline(groups, group) && !group.starts_with("0::/")) {
  }
  if (!group.starts_with("0::/")) return kNoLimit;
  group.erase(0, 3);
  int64_t bytes = kNoLimit;
  while (true) {
    std::ifstream file("/sys/fs/cgroup" + group + "/memory.max");
    if (int64_t limit = 0; file >> limit) bytes = std::min(bytes, limit);  // "max": none
    if (group.empty()) return bytes;
    group.resize(group.rfind('/'));
  }
}

struct Need {
  Digest host;
  int64_t bytes = 0, memory = 0;
};

}  // namespace

int64_t HostMemoryBytes() {
  return std::min({SystemBytes(), AddressSpaceBytes(), ControlGroupBytes()});
}

Status CheckHostMemory(Comm& comm, int64_t needed_bytes) {
  const LockHolder here = ThisProcess();
  const Need mine = {DigestOf(here.host + " " + here.boot_id), needed_bytes, HostMemoryBytes()};
  std::vector<Need> all(comm.size(), mine);
  if (comm.size() > 1) {
    RT_RETURN_IF_ERROR(comm.AllGather(comm.World(), &mine, all.data(), sizeof mine));
  }
  for (const Need& host : all) {
    double together = 0;  // of 2^56 bytes each and more
    int ranks = 0;
    for (const Need& other : all) {
      if (other.host != host.host) continue;
      together += static_cast<double>(other.bytes);
      ++ranks;
    }
    if (together <= static_cast<double>(host.memory)) continue;
    return UnsupportedError(fmt::format(
        "this recipe needs about {:.1f} GB of memory on one host, for {} rank{}, and there are "
        "{:.1f}. "
        "'retrace plan' says for what; smaller micro-batches, "
        "execution.recompute_activations or ranks on more hosts need less",
        together / 1e9, ranks, ranks == 1 ? "" : "s", static_cast<double>(host.memory) / 1e9));
  }
  return {};
}

}  // namespace retrace
