// OpSamples: a call of every op of the table on generated operands. Used by the self-test, which
// compares the bits of instruction sets, and by `retrace bench ops`, which compares their speed.
// (tests/ops_test.cc holds the ops to their definitions; this only makes calls.)
//
// Deterministic: operands are a function of the shape and its seed (Philox). Not thread-safe.
#ifndef RETRACE_KERNELS_OP_SAMPLES_H_
#define RETRACE_KERNELS_OP_SAMPLES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace retrace {

struct OpSampleShape {
  int64_t rows = 4, n = 33;  // n: columns, or keys, or half a head
  int64_t window = 0;
  float scale = 1;
  Rounding round = Rounding::kNone;
  bool special = false;  // one value in eight is one that IEEE 754 treats apart
  uint64_t seed = 1;
};

using FloatArrays = std::vector<std::vector<float>>;

struct OpSample {
  std::string op;        // its name in OpTable
  int64_t elements = 0;  // that a call computes or reads, whichever is more
  FloatArrays initial;   // what the op's outputs hold before the call
  std::function<void(const OpTable<float>&, FloatArrays* outputs)> call;

  FloatArrays Outputs(const OpTable<float>& ops) const {
    FloatArrays outputs = initial;
    call(ops, &outputs);
    return outputs;
  }
};

std::vector<OpSample> OpSamples(const OpSampleShape& shape);

// `count` values for other kernels' samples.
std::vector<float> SampleValues(uint64_t seed, uint64_t stream, int64_t count, bool special);

// The first element whose bits differ, all NaNs being one; -1: none. (A processor chooses a NaN's
// sign and payload: gemm.h.)
int64_t FirstBitDifference(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace retrace

#endif  // RETRACE_KERNELS_OP_SAMPLES_H_
