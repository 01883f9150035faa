// What a run is stamped with. kNumericsId changes whenever a bit of any state could
// (core/NUMERICS.md, CHANGELOG "Numerics"); kFormatId whenever bytes on disk do (formats/FORMAT.md).
#ifndef RETRACE_CORE_VERSION_H_
#define RETRACE_CORE_VERSION_H_

namespace retrace {
inline constexpr char kVersion[] = "0.1.0";
inline constexpr char kNumericsId[] = "retrace-numerics-1";
inline constexpr int kFormatId = 1;
}  // namespace retrace

#endif  // RETRACE_CORE_VERSION_H_
