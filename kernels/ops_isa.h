// The op table of each instruction set, behind Ops() of ops.h. Used by ops.cc and the files that
// define the tables. Constant data.
#ifndef RETRACE_KERNELS_OPS_ISA_H_
#define RETRACE_KERNELS_OPS_ISA_H_

#include "kernels/ops.h"

namespace retrace {

extern const OpTable<float> kScalarOps;
extern const OpTable<double> kScalarOps64;
extern const OpTable<float> kAvx2Ops;
extern const OpTable<float> kAvx512Ops;

}  // namespace retrace

#endif  // RETRACE_KERNELS_OPS_ISA_H_
