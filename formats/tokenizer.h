// Tokenizer: text to token ids and back, by any SentencePiece model file; and the training of one.
// Used by formats/data_build and the commands.
// Invariants: training is a function of (text, options): no threads, no random sampling by the
// library, no path or time in the model, so the same text gives the same bytes.
// A damaged model file gives an error: what the library does not check itself is checked here
// first.
// Thread-safety: const after Load. The library's messages are silenced for the whole process.
#ifndef RETRACE_FORMATS_TOKENIZER_H_
#define RETRACE_FORMATS_TOKENIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/digest.h"
#include "core/status.h"

namespace retrace {

struct TokenizerTraining {
  int64_t vocab_size = 4096;
  double character_coverage = 0.9995;           // rarer characters are spelt as bytes; 0.98..1
  int64_t max_sample_bytes = int64_t{4} << 20;  // of text to learn from
  uint64_t seed = 1234;                         // of the choice of lines where there is more text
};

// The lines that a tokenizer learns from: all of the text, or of more text a uniform choice of
// lines (each kept or not by a hash of seed and line number), so memory is bounded and no line
// order matters.
class TrainingSample {
 public:
  explicit TrainingSample(const TokenizerTraining& options);

  void AddDocument(std::string_view text);
  bool empty() const { return lines_.empty(); }
  int64_t size_bytes() const { return size_bytes_; }

  // A BPE model as Gemma's are: text is kept as it is (no normalization, spaces kept), byte
  // fallback, ids <pad> 0, <eos> 1, <bos> 2, <unk> 3, "\n" a token of its own, then 256 bytes, then
  // pieces. Returns the bytes of the model file. kUsage where the text is too small for the
  // vocabulary or the vocabulary too small for the text.
  Result<std::string> Train() const;

 private:
  struct Line {
    uint64_t key;
    std::string text;
  };
  void AddLine(std::string_view line);
  void Thin();

  TokenizerTraining options_;
  std::vector<Line> lines_;
  uint64_t lines_seen_ = 0, highest_key_ = ~uint64_t{0};
  int64_t size_bytes_ = 0;
};

class Tokenizer {
 public:
  // kUsage for a missing file, kDamaged where it is no model of SentencePiece.
  static Result<Tokenizer> Load(const std::string& path);
  // `name` stands for the file in messages.
  static Result<Tokenizer> FromModel(std::string_view model, const std::string& name);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  int64_t vocab_size() const;
  int32_t eos_id() const;                           // -1: the model has none
  int32_t bos_id() const;                           // likewise
  const Digest& digest() const { return digest_; }  // of the model's bytes

  // Without bos and eos.
  Status Encode(std::string_view text, std::vector<int32_t>* ids) const;
  // kUsage for an id outside the vocabulary.
  Result<std::string> Decode(const std::vector<int32_t>& ids) const;
  // The piece as the model writes it ("▁the", "<0x0A>").
  std::string Piece(int32_t id) const;

 private:
  struct Processor;
  explicit Tokenizer(std::unique_ptr<Processor> processor);
  std::unique_ptr<Processor> processor_;
  Digest digest_;
};

}  // namespace retrace

#endif  // RETRACE_FORMATS_TOKENIZER_H_
