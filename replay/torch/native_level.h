// The native level's part of libretrace_torch.so. Used by torch_comm.cc, which hands it out.
#ifndef RETRACE_REPLAY_TORCH_NATIVE_LEVEL_H_
#define RETRACE_REPLAY_TORCH_NATIVE_LEVEL_H_

#include <string>

#include "kernels/native_kernels.h"

namespace retrace {

// Pins what bits depend on in ATen and MKL (threads, deterministic algorithms, no reduced precision)
// and asserts it and the environment, then proves one product twice. *libraries gets names and
// versions. Null with *error set where anything is not as it has to be. A process has one number of threads.
const NativeKernels* OpenNativeKernels(int threads, std::string* libraries, std::string* error);

}  // namespace retrace

#endif  // RETRACE_REPLAY_TORCH_NATIVE_LEVEL_H_
