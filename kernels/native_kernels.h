// NativeKernels: the arithmetic of level native (NUMERICS.md, "Levels"), which replaces some of the
// portable kernels of an engine. Implemented by a plug-in (replay/torch/native_level.cc), so raw
// pointers alone cross this border. Used by engine.h. Called from one thread at a time, the engine's
// caller; whole ranges only, so how many threads an engine has changes no bit.
#ifndef RETRACE_KERNELS_NATIVE_KERNELS_H_
#define RETRACE_KERNELS_NATIVE_KERNELS_H_

#include <span>

#include "kernels/gemm_args.h"
#include "kernels/ops.h"

namespace retrace {

struct NativeKernels {
  // Each product finished and rounded before it is added, as gemm.h has it; the order of additions
  // within is the library's.
  void (*multiply)(std::span<const GemmArgs<float>> products);
  void (*multiply64)(std::span<const GemmArgs<double>> products);
  // Null: the portable op stays.
  OpTable<float> ops;
  OpTable<double> ops64;
};

}  // namespace retrace

#endif  // RETRACE_KERNELS_NATIVE_KERNELS_H_
