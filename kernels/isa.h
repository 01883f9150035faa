// Isa: which vector instructions the kernels use. Chosen once at start; never changes a bit
// (NUMERICS.md, "The promise"). Thread-safe: reads only.
#ifndef RETRACE_KERNELS_ISA_H_
#define RETRACE_KERNELS_ISA_H_

#include <optional>
#include <string_view>

namespace retrace {

enum class Isa { kScalar, kAvx2, kAvx512 };

bool IsaSupported(Isa isa);  // by this processor and operating system
Isa BestIsa();
const char* IsaName(Isa isa);                      // "scalar", "avx2", "avx512"
std::optional<Isa> ParseIsa(std::string_view name);  // nullopt where there is no such name

}  // namespace retrace

#endif  // RETRACE_KERNELS_ISA_H_
