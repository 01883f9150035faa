#include "cmd/element_text.h"

#include <fmt/format.h>

#include <bit>

#include "cmd/text_table.h"

namespace retrace {

std::string ElementText(const ElementDifference& e) {
  const std::string ulp = e.ulp == kUlpNan
                              ? std::string("NaN in one")
                              : fmt::format("{} ULP", Grouped(static_cast<int64_t>(e.ulp)));
  if (e.fp64) {
    return fmt::format("{} and {} (0x{:016x}, 0x{:016x}), {}", e.wide_a, e.wide_b,
                       std::bit_cast<uint64_t>(e.wide_a), std::bit_cast<uint64_t>(e.wide_b), ulp);
  }
  return fmt::format("{} and {} (0x{:08x}, 0x{:08x}), {}", e.a, e.b, std::bit_cast<uint32_t>(e.a),
                     std::bit_cast<uint32_t>(e.b), ulp);
}

}  // namespace retrace
