#include "formats/indexed_dataset.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace retrace {
namespace {

static_assert(std::endian::native == std::endian::little, "the files are little-endian");

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr uint64_t kVersion = 1;
constexpr uint64_t kHeaderBytes = 34;

// Fields of the .idx are not aligned (the arrays start at byte 34).
template <class T>
T Load(const uint8_t* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::string WithoutSuffix(const std::string& prefix) {
  for (const char* suffix : {".idx", ".bin"}) {
    if (prefix.ends_with(suffix)) return prefix.substr(0, prefix.size() - 4);
  }
  return prefix;
}

constexpr char kRebuild[] = "restore the file from its source or build the dataset again";

// Copies `count` tokens, widened or narrowed to 32 bits. Returns the place of the first one outside
// [0, vocab_size), or `count`.
template <class T>
int64_t CopyTokens(const uint8_t* from, int64_t count, int64_t vocab_size, int32_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = static_cast<int64_t>(Load<T>(from + i * static_cast<int64_t>(sizeof(T))));
    if (token < 0 || token >= vocab_size) return i;
    to[i] = static_cast<int32_t>(token);
  }
  return count;
}

int64_t CopyTokens(TokenType type, const uint8_t* from, int64_t count, int64_t vocab_size,
                   int32_t* to) {
  switch (type) {
    case TokenType::kU8:
      return CopyTokens<uint8_t>(from, count, vocab_size, to);
    case TokenType::kI8:
      return CopyTokens<int8_t>(from, count, vocab_size, to);
    case TokenType::kI16:
      return CopyTokens<int16_t>(from, count, vocab_size, to);
    case TokenType::kI32:
      return CopyTokens<int32_t>(from, count, vocab_size, to);
    case TokenType::kI64:
      return CopyTokens<int64_t>(from, count, vocab_size, to);
    case TokenType::kU16:
      return CopyTokens<uint16_t>(from, count, vocab_size, to);
  }
  RT_CHECK(!"a token type that Open accepted");
  return 0;
}

int64_t TokenAt(TokenType type, const uint8_t* at) {
  switch (type) {
    case TokenType::kU8:
      return Load<uint8_t>(at);
    case TokenType::kI8:
      return Load<int8_t>(at);
    case TokenType::kI16:
      return Load<int16_t>(at);
    case TokenType::kI32:
      return Load<int32_t>(at);
    case TokenType::kI64:
      return Load<int64_t>(at);
    case TokenType::kU16:
      return Load<uint16_t>(at);
  }
  RT_CHECK(!"a token type that Open accepted");
  return 0;
}

}  // namespace

int64_t TokenBytes(TokenType type) {
  switch (type) {
    case TokenType::kU8:
    case TokenType::kI8:
      return 1;
    case TokenType::kI16:
    case TokenType::kU16:
      return 2;
    case TokenType::kI32:
      return 4;
    case TokenType::kI64:
      return 8;
  }
  RT_CHECK(!"a token type");
  return 0;
}

const char* TokenTypeName(TokenType type) {
  switch (type) {
    case TokenType::kU8:
      return "u8";
    case TokenType::kI8:
      return "i8";
    case TokenType::kI16:
      return "i16";
    case TokenType::kI32:
      return "i32";
    case TokenType::kI64:
      return "i64";
    case TokenType::kU16:
      return "u16";
  }
  RT_CHECK(!"a token type");
  return "";
}

TokenType TokenTypeForVocabulary(int64_t vocab_size) {
  return vocab_size < 65500 ? TokenType::kU16 : TokenType::kI32;
}

Result<IndexedDataset> IndexedDataset::Open(const std::string& prefix, int64_t vocab_size) {
  if (vocab_size < 1 || vocab_size > kAnyVocabulary) {
    return UsageError(fmt::format("vocabulary size: expected 1..2^31, got {}", vocab_size));
  }
  IndexedDataset dataset;
  dataset.prefix_ = WithoutSuffix(prefix);
  dataset.vocab_size_ = vocab_size;
  RT_ASSIGN_OR_RETURN(dataset.idx_, MappedFile::Open(dataset.prefix_ + ".idx"));
  RT_ASSIGN_OR_RETURN(dataset.bin_, MappedFile::Open(dataset.prefix_ + ".bin"));
  RT_RETURN_IF_ERROR(dataset.ParseHeader());
  RT_RETURN_IF_ERROR(dataset.CheckSequences());
  RT_RETURN_IF_ERROR(dataset.CheckBoundaries());
  const uint64_t bin_size_bytes = dataset.bin_.size_bytes();
  DigestStream digest;
  digest.Update(dataset.idx_.data(), dataset.idx_.size_bytes());
  digest.Update(&bin_size_bytes, sizeof bin_size_bytes);
  dataset.identity_ = digest.Finish();
  return dataset;
}

Status IndexedDataset::ParseHeader() {
  const std::string& path = idx_.path();
  const uint64_t size = idx_.size_bytes();
  if (size < kHeaderBytes) {
    return DamagedError(fmt::format("{}: header: expected at least {} bytes, got {}; {}", path,
                                    kHeaderBytes, size, kRebuild));
  }
  const uint8_t* data = idx_.data();
  if (std::memcmp(data, kMagic, sizeof kMagic) != 0) {
    return DamagedError(
        fmt::format("{}: byte 0, magic: expected \"MMIDIDX\\0\\0\", got other bytes; "
                    "this is not a Megatron index",
                    path));
  }
  const uint64_t version = Load<uint64_t>(data + 9);
  if (version != kVersion) {
    return DamagedError(fmt::format("{}: byte 9, version: expected {}, got {}; {}", path, kVersion,
                                    version, kRebuild));
  }
  const int code = data[17];
  if (code == 6 || code == 7) {
    return UnsupportedError(
        fmt::format("{}: byte 17, dtype: expected an integer code (1, 2, 3, 4, 5, "
                    "8), got {} ({}), which holds no token ids",
                    path, code, code == 6 ? "float64" : "float32"));
  }
  if (code < 1 || code > 8) {
    return DamagedError(fmt::format("{}: byte 17, dtype: expected 1, 2, 3, 4, 5 or 8, got {}; {}",
                                    path, code, kRebuild));
  }
  type_ = static_cast<TokenType>(code);
  const uint64_t n = Load<uint64_t>(data + 18), m = Load<uint64_t>(data + 26);
  uint64_t rest = size - kHeaderBytes;  // divisions instead of products: n and m may be anything
  if (n > rest / 12) {
    return DamagedError(
        fmt::format("{}: byte 18, sequences: {} do not fit into a file of {} bytes; {}", path, n,
                    size, kRebuild));
  }
  rest -= n * 12;
  if (m < 1 || m > rest / 8) {
    return DamagedError(fmt::format("{}: byte 26, document boundaries: expected 1..{}, got {}; {}",
                                    path, rest / 8, m, kRebuild));
  }
  rest -= m * 8;
  if (rest != 0 && rest != n) {
    return DamagedError(
        fmt::format("{}: byte {}: expected the end of the file or {} mode bytes, got {} "
                    "bytes; {}",
                    path, size - rest, n, rest, kRebuild));
  }
  sequences_ = static_cast<int64_t>(n);
  boundaries_ = static_cast<int64_t>(m);
  offsets_at_ = kHeaderBytes + n * 4;
  boundaries_at_ = offsets_at_ + n * 8;
  has_modes_ = rest != 0;
  return {};
}

Status IndexedDataset::CheckSequences() {
  const uint64_t token_bytes = static_cast<uint64_t>(TokenBytes(type_));
  const uint64_t bin_size = bin_.size_bytes();
  uint64_t next = 0;  // never above bin_size, so next + length * token_bytes can not wrap
  for (int64_t i = 0; i < sequences_; ++i) {
    const int32_t length = LengthAt(i);
    if (length < 0) {
      return DamagedError(fmt::format(
          "{}: byte {}, length of sequence {}: expected 0 or more, got {}; "
          "{}",
          idx_.path(), kHeaderBytes + 4 * static_cast<uint64_t>(i), i, length, kRebuild));
    }
    const uint64_t offset = OffsetAt(i);
    if (offset != next) {
      return DamagedError(
          fmt::format("{}: byte {}, offset of sequence {}: expected {} (the end of the "
                      "sequence before), got {}; {}",
                      idx_.path(), offsets_at_ + 8 * static_cast<uint64_t>(i), i, next,
                      static_cast<int64_t>(offset), kRebuild));
    }
    next += static_cast<uint64_t>(length) * token_bytes;
    if (next > bin_size) {
      return DamagedError(
          fmt::format("{}: sequence {} ends at byte {}, but {} has {} bytes; the .bin is "
                      "truncated or belongs to another .idx",
                      idx_.path(), i, next, bin_.path(), bin_size));
    }
  }
  if (next != bin_size) {
    return DamagedError(
        fmt::format("{}: size: expected {} bytes ({} says so), got {}; the .bin belongs "
                    "to another .idx",
                    bin_.path(), next, idx_.path(), bin_size));
  }
  tokens_ = static_cast<int64_t>(bin_size / token_bytes);
  return {};
}

Status IndexedDataset::CheckBoundaries() const {
  int64_t last = 0;
  for (int64_t i = 0; i < boundaries_; ++i) {
    const int64_t boundary = BoundaryAt(i);
    const bool ends_wrong =
        (i == 0 && boundary != 0) || (i == boundaries_ - 1 && boundary != sequences_);
    if (ends_wrong || boundary < last || boundary > sequences_) {
      return DamagedError(
          fmt::format("{}: byte {}, document boundary {} of {}: expected a rising list "
                      "from 0 to {}, got {} after {}; {}",
                      idx_.path(), boundaries_at_ + 8 * static_cast<uint64_t>(i), i, boundaries_,
                      sequences_, boundary, last, kRebuild));
    }
    last = boundary;
  }
  return {};
}

int32_t IndexedDataset::LengthAt(int64_t sequence) const {
  return Load<int32_t>(idx_.data() + kHeaderBytes + 4 * static_cast<uint64_t>(sequence));
}

uint64_t IndexedDataset::OffsetAt(int64_t sequence) const {
  return Load<uint64_t>(idx_.data() + offsets_at_ + 8 * static_cast<uint64_t>(sequence));
}

int64_t IndexedDataset::BoundaryAt(int64_t i) const {
  return Load<int64_t>(idx_.data() + boundaries_at_ + 8 * static_cast<uint64_t>(i));
}

Status IndexedDataset::CheckStillWhole() const {
  RT_RETURN_IF_ERROR(idx_.CheckStillWhole());
  return bin_.CheckStillWhole();
}

Status IndexedDataset::ReadLengths(int64_t first, int64_t count,
                                   std::vector<int32_t>* lengths) const {
  RT_CHECK(first >= 0 && count >= 0 && first <= sequences_ && count <= sequences_ - first);
  RT_RETURN_IF_ERROR(idx_.CheckStillWhole());
  lengths->resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t length = LengthAt(first + i);
    if (length < 0) return DamagedError(idx_.path() + ": was written to while in use");
    (*lengths)[static_cast<size_t>(i)] = length;
  }
  return {};
}

Status IndexedDataset::ReadBoundaries(std::vector<int64_t>* boundaries) const {
  RT_RETURN_IF_ERROR(idx_.CheckStillWhole());
  boundaries->resize(static_cast<size_t>(boundaries_));
  for (int64_t i = 0; i < boundaries_; ++i) (*boundaries)[static_cast<size_t>(i)] = BoundaryAt(i);
  return {};
}

Status IndexedDataset::Read(int64_t sequence, int64_t first, int64_t count, int32_t* tokens) const {
  RT_CHECK(sequence >= 0 && sequence < sequences_ && first >= 0 && count >= 0);
  RT_RETURN_IF_ERROR(CheckStillWhole());
  const int64_t length = LengthAt(sequence);
  if (first > length || count > length - first) {
    return UsageError(fmt::format("{}: sequence {} has {} tokens, asked for {} from {}", prefix_,
                                  sequence, length, count, first));
  }
  // Open has checked all this. It is checked again because a shared map shows later writes of
  // others.
  const uint64_t token_bytes = static_cast<uint64_t>(TokenBytes(type_));
  const uint64_t size_bytes = static_cast<uint64_t>(count) * token_bytes;
  const uint64_t offset = OffsetAt(sequence) + static_cast<uint64_t>(first) * token_bytes;
  if (offset > bin_.size_bytes() || size_bytes > bin_.size_bytes() - offset) {
    return DamagedError(idx_.path() + ": was written to while in use");
  }
  const uint8_t* from = bin_.data() + offset;
  const int64_t good = CopyTokens(type_, from, count, vocab_size_, tokens);
  if (good == count) return {};
  const uint64_t bad_at = offset + static_cast<uint64_t>(good) * token_bytes;
  return BadToken(sequence, bad_at, TokenAt(type_, bin_.data() + bad_at));
}

Status IndexedDataset::Read(int64_t sequence, std::vector<int32_t>* tokens) const {
  RT_CHECK(sequence >= 0 && sequence < sequences_);
  RT_RETURN_IF_ERROR(idx_.CheckStillWhole());
  const int32_t length = LengthAt(sequence);
  if (length < 0) return DamagedError(idx_.path() + ": was written to while in use");
  tokens->resize(static_cast<size_t>(length));
  return Read(sequence, 0, length, tokens->data());
}

Status IndexedDataset::BadToken(int64_t sequence, uint64_t offset_bytes, int64_t token) const {
  return DamagedError(
      fmt::format("{}: byte {}, token of sequence {}: expected an id in 0..{}, got {}; "
                  "the file is damaged, or the model's vocabulary is smaller than the "
                  "tokenizer's",
                  bin_.path(), offset_bytes, sequence, vocab_size_ - 1, token));
}

Result<IndexedDatasetWriter> IndexedDatasetWriter::Create(const std::string& prefix,
                                                          int64_t vocab_size) {
  if (vocab_size < 1 || vocab_size > IndexedDataset::kAnyVocabulary) {
    return UsageError(fmt::format("vocabulary size: expected 1..2^31, got {}", vocab_size));
  }
  const std::string plain = WithoutSuffix(prefix);
  RT_ASSIGN_OR_RETURN(PendingFile bin, PendingFile::Create(plain + ".bin"));
  RT_ASSIGN_OR_RETURN(PendingFile idx, PendingFile::Create(plain + ".idx"));
  return IndexedDatasetWriter(std::move(bin), std::move(idx), vocab_size);
}

IndexedDatasetWriter::IndexedDatasetWriter(PendingFile bin, PendingFile idx, int64_t vocab_size)
    : bin_(std::move(bin)),
      idx_(std::move(idx)),
      vocab_size_(vocab_size),
      type_(TokenTypeForVocabulary(vocab_size)) {}

Status IndexedDatasetWriter::AddDocument(const int32_t* tokens, int64_t count) {
  RT_CHECK(count >= 0);
  if (count > std::numeric_limits<int32_t>::max()) {
    return UsageError(
        fmt::format("{}: document {} has {} tokens; the format holds at most 2^31 - 1", bin_.path(),
                    documents(), count));
  }
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab_size_) {
      return UsageError(fmt::format("{}: document {}, token {}: expected an id in 0..{}, got {}",
                                    bin_.path(), documents(), i, vocab_size_ - 1, tokens[i]));
    }
  }
  if (type_ == TokenType::kU16) {
    narrow_.assign(tokens, tokens + count);
    RT_RETURN_IF_ERROR(bin_.Write(narrow_.data(), narrow_.size() * sizeof(uint16_t)));
  } else {
    RT_RETURN_IF_ERROR(bin_.Write(tokens, static_cast<size_t>(count) * sizeof(int32_t)));
  }
  lengths_.push_back(static_cast<int32_t>(count));
  tokens_ += count;
  return {};
}

Status IndexedDatasetWriter::AddDocument(const std::vector<int32_t>& tokens) {
  return AddDocument(tokens.data(), static_cast<int64_t>(tokens.size()));
}

Status IndexedDatasetWriter::WriteIndex() {
  const uint64_t n = lengths_.size(), m = n + 1;
  const uint8_t code = static_cast<uint8_t>(type_);
  RT_RETURN_IF_ERROR(idx_.Write(kMagic, sizeof kMagic));
  RT_RETURN_IF_ERROR(idx_.Write(&kVersion, sizeof kVersion));
  RT_RETURN_IF_ERROR(idx_.Write(&code, sizeof code));
  RT_RETURN_IF_ERROR(idx_.Write(&n, sizeof n));
  RT_RETURN_IF_ERROR(idx_.Write(&m, sizeof m));
  RT_RETURN_IF_ERROR(idx_.Write(lengths_.data(), n * sizeof(int32_t)));
  int64_t offset = 0;
  for (int32_t length : lengths_) {
    RT_RETURN_IF_ERROR(idx_.Write(&offset, sizeof offset));
    offset += length * TokenBytes(type_);
  }
  for (uint64_t boundary = 0; boundary < m; ++boundary) {
    RT_RETURN_IF_ERROR(idx_.Write(&boundary, sizeof boundary));
  }
  return {};
}

Result<IndexedDatasetWriter::Outcome> IndexedDatasetWriter::Publish(Existing existing) {
  RT_RETURN_IF_ERROR(WriteIndex());
  RT_RETURN_IF_ERROR(bin_.Sync());
  RT_RETURN_IF_ERROR(idx_.Sync());
  RT_ASSIGN_OR_RETURN(const bool same_bin, bin_.SameAsPublished());
  RT_ASSIGN_OR_RETURN(const bool same_idx, idx_.SameAsPublished());
  if (same_bin && same_idx) return Outcome::kIdentical;
  // A .bin alone that equals ours is what a crash between the two renames leaves: finish the job.
  const bool in_the_way = FileExists(idx_.path()) || (FileExists(bin_.path()) && !same_bin);
  if (in_the_way && existing == Existing::kRefuse) {
    return UsageError(
        fmt::format("{}: a different dataset of this name exists; choose another name "
                    "or ask for it to be overwritten",
                    WithoutSuffix(bin_.path())));
  }
  RT_RETURN_IF_ERROR(RemoveFile(idx_.path()));  // no moment with an old .idx beside a new .bin
  RT_RETURN_IF_ERROR(bin_.Publish());
  RT_RETURN_IF_ERROR(idx_.Publish());
  return Outcome::kWritten;
}

}  // namespace retrace
