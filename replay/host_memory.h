// Whether a job's ranks fit into the memory of the hosts that they are on. Used by Job, before it
// allocates or writes anything: else a recipe that is too large ends in the kernel's killing some
// process of this machine, or in a run directory without a state.
#ifndef RETRACE_REPLAY_HOST_MEMORY_H_
#define RETRACE_REPLAY_HOST_MEMORY_H_

#include <cstdint>

#include "core/status.h"
#include "replay/comm.h"

namespace retrace {

// What this process may come to hold: memory and swap, or less where its control groups or ulimit
// -v say so.
int64_t HostMemoryBytes();

// Adds up what the ranks of each host need. Collective: all ranks get an error where it is more
// than one host has. Errors: kUnsupported.
Status CheckHostMemory(Comm& comm, int64_t needed_bytes);

}  // namespace retrace

#endif  // RETRACE_REPLAY_HOST_MEMORY_H_
