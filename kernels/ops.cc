#include "kernels/ops.h"

#include "core/check.h"
#include "kernels/ops_isa.h"

namespace retrace {

template <>
const OpTable<float>& Ops<float>(Isa isa) {
  RT_CHECK(IsaSupported(isa));
  switch (isa) {
    case Isa::kAvx512:
      return kAvx512Ops;
    case Isa::kAvx2:
      return kAvx2Ops;
    case Isa::kScalar:
      break;
  }
  return kScalarOps;
}

template <>
const OpTable<double>& Ops<double>(Isa) {
  return kScalarOps64;
}

}  // namespace retrace
