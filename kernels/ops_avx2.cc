#include "kernels/ops_vector.h"

namespace retrace {
const OpTable<float> kAvx2Ops = avx2::kVectorOps;
}  // namespace retrace
