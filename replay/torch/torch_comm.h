// The border between retrace and libretrace_torch.so: one function, found by dlsym. Used by
// torch_plugin.cc on one side and torch_comm.cc on the other. Both are built from one tree by one
// compiler; kTorchPluginAbi is raised with every change here, of Comm
// or of NativeKernels.
#ifndef RETRACE_REPLAY_TORCH_TORCH_COMM_H_
#define RETRACE_REPLAY_TORCH_TORCH_COMM_H_

#include <string>

#include "kernels/native_kernels.h"
#include "replay/comm.h"

namespace retrace {

inline constexpr int kTorchPluginAbi = 2;
inline constexpr char kTorchPluginFile[] = "libretrace_torch.so";
inline constexpr char kTorchPluginEntry[] = "retrace_torch_plugin";

struct TorchCommRequest {
  int rank = 0;
  int size = 1;
  std::string host;  // where the store is
  int port = 0;
  bool serve_store = false;  // by this rank
  std::string attempt;
  double join_limit_s = 300;  // for all ranks to be there
  double time_limit_s = 300;  // of one call
};

struct TorchPlugin {
  int abi = 0;
  const char* version = "";  // retrace's
  // Joins the job; returns when all ranks have. Null with *error set if they have not.
  Comm* (*make_comm)(const TorchCommRequest& request, std::string* error) = nullptr;
  // native_level.h: OpenNativeKernels.
  const NativeKernels* (*open_native)(int threads, std::string* libraries,
                                      std::string* error) = nullptr;
};

using TorchPluginEntry = const TorchPlugin* (*)();

}  // namespace retrace

#endif  // RETRACE_REPLAY_TORCH_TORCH_COMM_H_
