// IndexedDataset: reader and writer of Megatron's indexed datasets, the pair PREFIX.bin (token ids
// back to back) and PREFIX.idx (header, sequence lengths, byte offsets, document boundaries; layout
// in formats/FORMAT.md). Used by formats/gpt_index, formats/data_build and the commands.
// Invariants of an open dataset: every field of the .idx was checked against the file sizes;
// sequences lie in the .bin one after another without gap or overlap and fill it, as Megatron's
// builder writes them (so a damaged length or offset can not go unnoticed). 64-bit sizes
// throughout.
// Both files are memory-mapped and copied from; see mapped_file.h for files that shrink while open.
// Errors: kDamaged for a file that breaks a rule, kUnsupported for floating-point tokens.
// Thread-safety: a reader is const after Open; a writer belongs to one thread.
// Clause: 14 (dataset identity).
#ifndef RETRACE_FORMATS_INDEXED_DATASET_H_
#define RETRACE_FORMATS_INDEXED_DATASET_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/digest.h"
#include "core/status.h"
#include "formats/mapped_file.h"
#include "formats/pending_file.h"

namespace retrace {

// The codes of the file's dtype field. 6 and 7 are float64 and float32, which hold no token ids.
enum class TokenType : uint8_t { kU8 = 1, kI8 = 2, kI16 = 3, kI32 = 4, kI64 = 5, kU16 = 8 };

int64_t TokenBytes(TokenType type);
const char* TokenTypeName(TokenType type);  // "u8", "i32", ...

// Megatron's choice: u16 for vocabularies below 65500, else i32.
TokenType TokenTypeForVocabulary(int64_t vocab_size);

class IndexedDataset {
 public:
  // Token ids outside [0, vocab_size) are errors when they are read; the default allows every
  // int32.
  static constexpr int64_t kAnyVocabulary = int64_t{1} << 31;

  // Opens PREFIX.idx and PREFIX.bin. `prefix` may also name either file.
  static Result<IndexedDataset> Open(const std::string& prefix,
                                     int64_t vocab_size = kAnyVocabulary);

  int64_t sequences() const { return sequences_; }
  int64_t documents() const { return boundaries_ - 1; }  // a document is one or more sequences
  int64_t tokens() const { return tokens_; }
  TokenType token_type() const { return type_; }
  uint64_t bin_size_bytes() const { return bin_.size_bytes(); }
  bool has_modes() const { return has_modes_; }  // multimodal; the modes are not read
  const std::string& prefix() const { return prefix_; }

  // Clause 14: XXH3-128 of the bytes of the .idx followed by the size of the .bin (u64,
  // little-endian).
  const Digest& identity() const { return identity_; }

  // Lengths, in tokens, of the sequences [first, first + count).
  Status ReadLengths(int64_t first, int64_t count, std::vector<int32_t>* lengths) const;

  // Sequence indices where documents start, M values, first 0, last sequences().
  Status ReadBoundaries(std::vector<int64_t>* boundaries) const;

  // Tokens [first, first + count) of one sequence. kUsage where the sequence is shorter than that.
  Status Read(int64_t sequence, int64_t first, int64_t count, int32_t* tokens) const;
  Status Read(int64_t sequence, std::vector<int32_t>* tokens) const;  // the whole sequence

 private:
  Status ParseHeader();
  Status CheckSequences();
  Status CheckBoundaries() const;
  Status CheckStillWhole() const;
  int32_t LengthAt(int64_t sequence) const;
  uint64_t OffsetAt(int64_t sequence) const;
  int64_t BoundaryAt(int64_t i) const;
  Status BadToken(int64_t sequence, uint64_t offset_bytes, int64_t token) const;

  std::string prefix_;
  MappedFile idx_, bin_;
  TokenType type_ = TokenType::kI32;
  int64_t vocab_size_ = kAnyVocabulary;
  int64_t sequences_ = 0, boundaries_ = 0, tokens_ = 0;
  uint64_t offsets_at_ = 0, boundaries_at_ = 0;  // byte offsets in the .idx
  bool has_modes_ = false;
  Digest identity_;
};

// Writes a dataset of one sequence per document. Nothing appears under the final names before
// Publish; then the .bin comes first, so that a .idx never names bytes that are not there.
class IndexedDatasetWriter {
 public:
  static Result<IndexedDatasetWriter> Create(const std::string& prefix, int64_t vocab_size);

  // kUsage where a token is outside the vocabulary or the document has 2^31 tokens or more.
  Status AddDocument(const int32_t* tokens, int64_t count);
  Status AddDocument(const std::vector<int32_t>& tokens);

  int64_t documents() const { return static_cast<int64_t>(lengths_.size()); }
  int64_t tokens() const { return tokens_; }

  enum class Existing { kRefuse, kReplace };
  enum class Outcome { kWritten, kIdentical };
  // Where the dataset already exists with the same bytes, leaves it alone: kIdentical. Where it
  // exists with other bytes: kUsage under kRefuse. The writer is spent afterwards.
  Result<Outcome> Publish(Existing existing);

 private:
  IndexedDatasetWriter(PendingFile bin, PendingFile idx, int64_t vocab_size);
  Status WriteIndex();

  PendingFile bin_, idx_;
  int64_t vocab_size_;
  TokenType type_;
  int64_t tokens_ = 0;
  std::vector<int32_t> lengths_;
  std::vector<uint16_t> narrow_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_INDEXED_DATASET_H_
