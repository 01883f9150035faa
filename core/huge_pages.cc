#include "core/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace retrace {

void PreferHugePages(void* data, size_t size_bytes) {
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data), end = begin + size_bytes;
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = end / kPage * kPage;
  if (first < last) (void)::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

}  // namespace retrace
