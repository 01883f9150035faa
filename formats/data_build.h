// BuildDataset: text files to an indexed dataset, training a tokenizer on the way if none is given.
// InspectDataset: what an indexed dataset holds. Used by `retrace data build` and `inspect`.
// Invariants: the bytes written are a function of the text and the options; each document ends in
// the tokenizer's eos; nothing appears under a final name unless it is complete, and nothing at all
// if the build fails; the order is .bin, .idx, then the trained tokenizer.
// Not thread-safe (two builds of one name at a time are refused, see pending_file.h).
#ifndef RETRACE_FORMATS_DATA_BUILD_H_
#define RETRACE_FORMATS_DATA_BUILD_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/digest.h"
#include "core/status.h"
#include "formats/indexed_dataset.h"
#include "formats/text_source.h"
#include "formats/tokenizer.h"

namespace retrace {

// Called now and then: the phase ("reading", "training the tokenizer", "tokenizing", "writing") and
// how much of that phase is done, 0..1.
using DataProgress = std::function<void(std::string_view phase, double fraction)>;

struct DataBuildOptions {
  TextSourceOptions text;     // inputs, how documents are cut, how much to read
  std::string output_prefix;  // PREFIX.bin, PREFIX.idx, and PREFIX.model if one is trained
  std::string tokenizer;      // a SentencePiece model; empty: train one by `training`
  TokenizerTraining training;
  int64_t min_document_tokens = 2;  // shorter documents (eos included) are left out
  bool overwrite = false;           // replace a different dataset or tokenizer of this name
};

struct DataBuildResult {
  int64_t documents = 0, tokens = 0;
  int64_t documents_left_out = 0;  // shorter than min_document_tokens
  int64_t text_bytes = 0;
  int64_t replaced_sequences = 0;  // ill-formed UTF-8
  int64_t vocab_size = 0;
  int32_t eos_id = 0;
  TokenType token_type = TokenType::kU16;
  double unigram_entropy_nats =
      0;  // of the token frequencies: the loss of a model that knows only them
  std::string tokenizer_path;
  Digest tokenizer_digest, identity;  // identity: clause 14
  bool identical = false;             // the dataset was there already with these bytes
  double seconds = 0;
};

// Errors: kUsage for options, missing files, no text, a name that is taken, a tokenizer without
// eos; kDamaged for a broken input; kFailed for a full disk.
Result<DataBuildResult> BuildDataset(const DataBuildOptions& options, const DataProgress& progress);

struct DatasetSummary {
  int64_t documents = 0, sequences = 0, tokens = 0;
  TokenType token_type = TokenType::kI32;
  uint64_t bin_size_bytes = 0;
  Digest identity;
  int32_t min_length = 0, median_length = 0, max_length = 0;  // of sequences; the lower median
  int32_t min_token = 0, max_token = 0;                       // 0 for an empty dataset
  int64_t distinct_tokens = 0;
  double unigram_entropy_nats = 0;
  std::vector<std::vector<int32_t>> first_sequences;  // their first tokens
};

struct InspectOptions {
  int64_t first_sequences = 3;
  int64_t tokens_each = 16;
};

// Reads the whole dataset, every token. Errors: those of IndexedDataset.
Result<DatasetSummary> InspectDataset(const std::string& prefix, const InspectOptions& options,
                                      const DataProgress& progress);

}  // namespace retrace

#endif  // RETRACE_FORMATS_DATA_BUILD_H_
