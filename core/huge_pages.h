// HugePages: asks the system to back large buffers with huge pages. Used where states and journals
// are allocated: the first touch of memory page by page costs about as much as copying it.
//
// A wish, never an error; changes no value. Thread-safe.
#ifndef RETRACE_CORE_HUGE_PAGES_H_
#define RETRACE_CORE_HUGE_PAGES_H_

#include <cstddef>
#include <vector>

namespace retrace {

// Of memory that has not been touched yet.
void PreferHugePages(void* data, size_t size_bytes);

// v->resize(size) of an empty or smaller vector, whose memory is asked for in huge pages.
inline void ResizeInHugePages(std::vector<float>* v, size_t size) {
  if (size > v->capacity()) {
    v->reserve(size);
    if (v->empty()) PreferHugePages(v->data(), v->capacity() * sizeof(float));
  }
  v->resize(size);
}

}  // namespace retrace

#endif  // RETRACE_CORE_HUGE_PAGES_H_
