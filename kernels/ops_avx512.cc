#include "kernels/ops_vector.h"

namespace retrace {
const OpTable<float> kAvx512Ops = avx512::kVectorOps;
}  // namespace retrace
