// The numbers of a chunk, or of a part of it, from its byte planes: what undoes HDF5's filter 2. Used
// by chunk_codec.h and encoded_journal.h. Thread-safe.
#ifndef RETRACE_FORMATS_CHUNK_PLANES_H_
#define RETRACE_FORMATS_CHUNK_PLANES_H_

#include <cstddef>

namespace retrace {

// Byte b of out[i] = in[b * plane + i], for i < count: the first `count` of `plane` numbers, or those
// from another one on where `in` points to its byte of plane 0.
void UnshufflePart(const unsigned char* in, size_t plane, size_t count, float* out);

}  // namespace retrace

#endif  // RETRACE_FORMATS_CHUNK_PLANES_H_
