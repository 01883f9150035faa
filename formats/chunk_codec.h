// Chunks: 1 MiB of FP32 numbers, byte-shuffled and compressed with zstd (HDF5 filters 2 and 32015).
// Used by step_file.h. One encoder or decoder per thread. FORMAT.md, "Slabs".
#ifndef RETRACE_FORMATS_CHUNK_CODEC_H_
#define RETRACE_FORMATS_CHUNK_CODEC_H_

#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

namespace retrace {

inline constexpr size_t kChunkElements = size_t{1} << 18;
// Of zstd. What repeats in numbers are the values of single bytes, which its entropy coder sees; a
// search for longer matches costs half of the time and finds next to none, so it is all but off.
inline constexpr int kChunkLevel = -100;
inline constexpr int kTextLevel = 1;

// out[b * count + i] = byte b of in[i]. HDF5's filter 2 for elements of 4 bytes.
void ShuffleBytes(const float* in, size_t count, unsigned char* out);
void UnshuffleBytes(const unsigned char* in, size_t count, float* out);

class ChunkEncoder {
 public:
  ChunkEncoder();
  ~ChunkEncoder();
  ChunkEncoder(ChunkEncoder&&) noexcept;

  // Encodes chunk_elements numbers: `count` from `in`, then zeros. -> the encoded bytes, which stay
  // in *out; out's memory is reused.
  std::string_view Encode(const float* in, size_t count, size_t chunk_elements,
                          std::vector<char>* out, int level = kChunkLevel);
  // Plain zstd.
  std::string_view Compress(std::string_view in, std::vector<char>* out, int level = kTextLevel);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

class ChunkDecoder {
 public:
  ChunkDecoder();
  ~ChunkDecoder();
  ChunkDecoder(ChunkDecoder&&) noexcept;

  // The first `count` of chunk_elements numbers. -> false: not a chunk of that size. Safe for any
  // bytes.
  bool Decode(std::string_view encoded, size_t chunk_elements, float* out, size_t count);
  bool Decompress(std::string_view encoded, char* out, size_t size);

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_CHUNK_CODEC_H_
