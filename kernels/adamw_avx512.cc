#include "kernels/adamw_isa.h"
#include "kernels/adamw_kernel.h"

namespace retrace {
RT_DEFINE_ADAMW(Avx512)
}  // namespace retrace
