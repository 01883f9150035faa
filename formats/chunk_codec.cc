#include "formats/chunk_codec.h"

#define ZSTD_STATIC_LINKING_ONLY  // for ZSTD_c_literalCompressionMode
#include <zstd.h>

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "formats/chunk_planes.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace retrace {
namespace {

// The part of a shuffle that is left when the vector loop is done, or all of it.
void ShuffleFrom(size_t first, const float* in, size_t count, unsigned char* out) {
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(in);
  for (size_t b = 0; b < 4; ++b) {
    for (size_t i = first; i < count; ++i) out[b * count + i] = bytes[4 * i + b];
  }
}

#if defined(__SSE2__)
// Sixteen numbers at a time; SSE2 is part of every x86-64. Each pass of `Deal` halves the distance
// between bytes that belong together: after four passes plane b is register b.
inline void Deal(__m128i r[4]) {
  const __m128i low = _mm_unpacklo_epi8(r[0], r[2]), high = _mm_unpackhi_epi8(r[0], r[2]);
  const __m128i low2 = _mm_unpacklo_epi8(r[1], r[3]), high2 = _mm_unpackhi_epi8(r[1], r[3]);
  r[0] = low, r[1] = high, r[2] = low2, r[3] = high2;
}

size_t ShuffleVector(const float* in, size_t count, unsigned char* out) {
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __m128i r[4];
    for (int j = 0; j < 4; ++j) {
      r[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i + 4 * j));
    }
    for (int pass = 0; pass < 4; ++pass) Deal(r);
    for (int b = 0; b < 4; ++b) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + b * count + i), r[b]);
    }
  }
  return i;
}
#else
size_t ShuffleVector(const float*, size_t, unsigned char*) { return 0; }
#endif

}  // namespace

void ShuffleBytes(const float* in, size_t count, unsigned char* out) {
  ShuffleFrom(ShuffleVector(in, count, out), in, count, out);
}

void UnshuffleBytes(const unsigned char* in, size_t count, float* out) {
  UnshufflePart(in, count, count, out);
}

struct ChunkEncoder::Context {
  ZSTD_CCtx* zstd = ZSTD_createCCtx();
  std::vector<float> padded;
  std::vector<unsigned char> shuffled;

  ~Context() { ZSTD_freeCCtx(zstd); }
};

ChunkEncoder::ChunkEncoder() : context_(std::make_unique<Context>()) {
  RT_CHECK(context_->zstd != nullptr);
}
ChunkEncoder::~ChunkEncoder() = default;
ChunkEncoder::ChunkEncoder(ChunkEncoder&&) noexcept = default;

std::string_view ChunkEncoder::Encode(const float* in, size_t count, size_t chunk_elements,
                                      std::vector<char>* out, int level) {
  RT_CHECK(count <= chunk_elements);
  if (count < chunk_elements) {
    context_->padded.assign(chunk_elements, 0.0f);
    std::memcpy(context_->padded.data(), in, count * sizeof(float));
    in = context_->padded.data();
  }
  context_->shuffled.resize(chunk_elements * sizeof(float));
  ShuffleBytes(in, chunk_elements, context_->shuffled.data());
  return Compress({reinterpret_cast<const char*>(context_->shuffled.data()),
                   context_->shuffled.size()}, out, level);
}

std::string_view ChunkEncoder::Compress(std::string_view in, std::vector<char>* out, int level) {
  const size_t bound = ZSTD_compressBound(in.size());
  if (out->size() < bound) out->resize(bound);
  ZSTD_CCtx* const zstd = context_->zstd;
  // Levels below zero leave the entropy coder of literals out unless told. A library that knows the
  // switch no more gets the level next to them.
  const auto literals = level < 0 ? ZSTD_ps_enable : ZSTD_ps_auto;
  const size_t told = ZSTD_CCtx_setParameter(zstd, ZSTD_c_literalCompressionMode, literals);
  if (ZSTD_isError(told)) level = std::max(level, 1);
  ZSTD_CCtx_setParameter(zstd, ZSTD_c_compressionLevel, level);
  const size_t size = ZSTD_compress2(zstd, out->data(), out->size(), in.data(), in.size());
  RT_CHECK(!ZSTD_isError(size));  // the bound leaves no error but lack of memory
  return {out->data(), size};
}

struct ChunkDecoder::Context {
  ZSTD_DCtx* zstd = ZSTD_createDCtx();
  std::vector<unsigned char> shuffled;
  std::vector<float> padded;

  ~Context() { ZSTD_freeDCtx(zstd); }
};

ChunkDecoder::ChunkDecoder() : context_(std::make_unique<Context>()) {
  RT_CHECK(context_->zstd != nullptr);
}
ChunkDecoder::~ChunkDecoder() = default;
ChunkDecoder::ChunkDecoder(ChunkDecoder&&) noexcept = default;

bool ChunkDecoder::Decode(std::string_view encoded, size_t chunk_elements, float* out,
                          size_t count) {
  RT_CHECK(count <= chunk_elements);
  context_->shuffled.resize(chunk_elements * sizeof(float));
  unsigned char* shuffled = context_->shuffled.data();
  if (!Decompress(encoded, reinterpret_cast<char*>(shuffled), context_->shuffled.size())) {
    return false;
  }
  if (count == chunk_elements) {
    UnshuffleBytes(shuffled, count, out);
    return true;
  }
  context_->padded.resize(chunk_elements);
  UnshuffleBytes(shuffled, chunk_elements, context_->padded.data());
  std::memcpy(out, context_->padded.data(), count * sizeof(float));
  return true;
}

bool ChunkDecoder::Decompress(std::string_view encoded, char* out, size_t size) {
  return ZSTD_decompressDCtx(context_->zstd, out, size, encoded.data(), encoded.size()) == size;
}

}  // namespace retrace
