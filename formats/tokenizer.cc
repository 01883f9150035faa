#include "formats/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <unordered_map>
#include <utility>

#include "formats/mapped_file.h"

// Exported by the library and set by its own command-line tools, but declared in no installed
// header.
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}

namespace retrace {
namespace {

constexpr int64_t kSpecialTokens = 5;  // pad, eos, bos, unk, newline
constexpr int64_t kByteTokens = 256;
constexpr size_t kMaxLineBytes = 4000;  // the library drops lines above 4192 bytes

void SilenceLibrary() {
  sentencepiece::logging::SetMinLogLevel(3);
}  // all but what ends the process

// SplitMix64 (Steele, Lea, Flood 2014): a well-mixed function of its argument.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// ---- What the library does not check of a model file.

// One field of a protobuf message.
struct Field {
  uint64_t number = 0;
  bool has_bytes = false;
  std::string_view bytes = {};
};

std::optional<uint64_t> TakeVarint(std::string_view* rest) {
  uint64_t value = 0;
  for (int shift = 0; shift < 70 && !rest->empty(); shift += 7) {
    const uint8_t byte = static_cast<uint8_t>(rest->front());
    rest->remove_prefix(1);
    if (shift < 64) value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if ((byte & 0x80) == 0) return value;
  }
  return std::nullopt;
}

std::optional<Field> TakeField(std::string_view* rest) {
  const auto key = TakeVarint(rest);
  if (!key) return std::nullopt;
  Field field{.number = *key >> 3};
  uint64_t size = 0;
  switch (*key & 7) {
    case 0:
      if (!TakeVarint(rest)) return std::nullopt;
      return field;
    case 1:
      size = 8;
      break;
    case 2: {
      const auto length = TakeVarint(rest);
      if (!length) return std::nullopt;
      size = *length;
      field.has_bytes = true;
      break;
    }
    case 5:
      size = 4;
      break;
    default:
      return std::nullopt;  // groups; the model format has none
  }
  if (size > rest->size()) return std::nullopt;
  field.bytes = rest->substr(0, size);
  rest->remove_prefix(size);
  return field;
}

// A precompiled map of characters is a u32 size, a double-array trie of that many bytes (units of
// 4), and NUL-terminated replacements that leaf units point into. The library follows its links
// without looking at the bounds.
bool CharacterMapStaysInside(std::string_view map) {
  if (map.empty()) return true;  // none: text is not normalized
  uint32_t trie_bytes = 0;
  if (map.size() <= sizeof trie_bytes) return false;
  std::memcpy(&trie_bytes, map.data(), sizeof trie_bytes);
  map.remove_prefix(sizeof trie_bytes);
  if (trie_bytes == 0 || trie_bytes % 4 != 0 || trie_bytes >= map.size() || map.back() != 0)
    return false;
  const uint64_t units = trie_bytes / 4, replacements_bytes = map.size() - trie_bytes;
  for (uint64_t i = 0; i < units; ++i) {
    uint32_t unit = 0;
    std::memcpy(&unit, map.data() + 4 * i, 4);
    if ((unit & 0x80000000u) != 0) {  // a leaf: an offset into the replacements
      if ((unit & 0x7fffffffu) >= replacements_bytes) return false;
    } else {  // children are at i ^ offset ^ byte
      const uint64_t offset = static_cast<uint64_t>(unit >> 10) << ((unit & 0x200u) >> 6);
      if (((i ^ offset) | 255) >= units) return false;
    }
  }
  return true;
}

// Field 3 (normalizer) and 5 (denormalizer) of a model are messages whose field 2 is such a map.
bool CharacterMapsStayInside(std::string_view model) {
  while (!model.empty()) {
    const auto field = TakeField(&model);
    if (!field) return false;
    if (!field->has_bytes || (field->number != 3 && field->number != 5)) continue;
    std::string_view normalizer = field->bytes;
    while (!normalizer.empty()) {
      const auto inner = TakeField(&normalizer);
      if (!inner) return false;
      if (inner->has_bytes && inner->number == 2 && !CharacterMapStaysInside(inner->bytes)) {
        return false;
      }
    }
  }
  return true;
}

// Gives the sample to the trainer line by line.
template <class Lines>
class LineIterator : public sentencepiece::SentenceIterator {
 public:
  explicit LineIterator(const Lines& lines) : lines_(lines) {}
  bool done() const override { return at_ == lines_.size(); }
  void Next() override { ++at_; }
  const std::string& value() const override { return lines_[at_].text; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  const Lines& lines_;
  size_t at_ = 0;
};

std::unordered_map<std::string, std::string> TrainerArguments(const TokenizerTraining& options) {
  return {{"model_type", "bpe"},
          {"vocab_size", std::to_string(options.vocab_size)},
          {"character_coverage", fmt::format("{}", options.character_coverage)},
          {"byte_fallback", "true"},
          {"num_threads", "1"},
          {"minloglevel", "3"},
          {"normalization_rule_name", "identity"},
          {"add_dummy_prefix", "false"},
          {"remove_extra_whitespaces", "false"},
          {"allow_whitespace_only_pieces", "true"},
          {"split_digits", "true"},
          {"user_defined_symbols", "\n"},
          {"pad_id", "0"},
          {"eos_id", "1"},
          {"bos_id", "2"},
          {"unk_id", "3"},
          {"pad_piece", "<pad>"},
          {"eos_piece", "<eos>"},
          {"bos_piece", "<bos>"},
          {"unk_piece", "<unk>"}};
}

Status CheckTraining(const TokenizerTraining& options) {
  if (options.vocab_size <= kSpecialTokens + kByteTokens || options.vocab_size > 1000000) {
    return UsageError(
        fmt::format("vocabulary size: expected {}..1000000 (5 special tokens and 256 "
                    "bytes come first), got {}",
                    kSpecialTokens + kByteTokens + 1, options.vocab_size));
  }
  if (!(options.character_coverage >= 0.98 && options.character_coverage <= 1)) {
    return UsageError(
        fmt::format("character coverage: expected 0.98..1, got {}", options.character_coverage));
  }
  return {};
}

}  // namespace

TrainingSample::TrainingSample(const TokenizerTraining& options) : options_(options) {
  options_.max_sample_bytes = std::max<int64_t>(options_.max_sample_bytes, kMaxLineBytes);
}

void TrainingSample::AddDocument(std::string_view text) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    while (line.size() > kMaxLineBytes) {
      size_t cut = kMaxLineBytes;
      while (cut > kMaxLineBytes - 4 && (static_cast<uint8_t>(line[cut]) & 0xc0) == 0x80) --cut;
      AddLine(line.substr(0, cut));
      line.remove_prefix(cut);
    }
    if (!line.empty()) AddLine(line);
  }
}

void TrainingSample::AddLine(std::string_view line) {
  const uint64_t key = Mix(Mix(options_.seed) ^ lines_seen_++);
  if (key > highest_key_) return;
  lines_.push_back({key, std::string(line)});
  size_bytes_ += static_cast<int64_t>(line.size());
  while (size_bytes_ > options_.max_sample_bytes) Thin();
}

// Halves the share of lines that are kept, of those read and those to come alike.
void TrainingSample::Thin() {
  highest_key_ /= 2;
  std::erase_if(lines_, [this](const Line& line) { return line.key > highest_key_; });
  size_bytes_ = 0;
  for (const Line& line : lines_) size_bytes_ += static_cast<int64_t>(line.text.size());
}

namespace {

// The library's sentence without its place in the source and without its own program's flags.
std::string LibraryReason(std::string text) {
  const size_t place_end = text.find("] ");
  if (place_end != std::string::npos) text.erase(0, place_end + 2);
  text = text.substr(0, text.find(" Increase vocab_size"));
  while (text.ends_with('.')) text.pop_back();
  return text;
}

}  // namespace

Result<std::string> TrainingSample::Train() const {
  RT_RETURN_IF_ERROR(CheckTraining(options_));
  if (lines_.empty())
    return UsageError("the text is empty: there is nothing to train a tokenizer on");
  SilenceLibrary();
  std::string model;
  try {
    LineIterator<std::vector<Line>> lines(lines_);
    const auto status =
        sentencepiece::SentencePieceTrainer::Train(TrainerArguments(options_), &lines, &model);
    if (status.ok()) return model;
    return UsageError(
        fmt::format("training a tokenizer of {} tokens on {} bytes of text: {}; choose "
                    "another vocabulary size or more text",
                    options_.vocab_size, size_bytes_, LibraryReason(status.message())));
  } catch (const std::exception& error) {
    return FailedError(fmt::format("training a tokenizer: {}", error.what()));
  }
}

struct Tokenizer::Processor {
  sentencepiece::SentencePieceProcessor library;
};

Tokenizer::Tokenizer(std::unique_ptr<Processor> processor) : processor_(std::move(processor)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::Load(const std::string& path) {
  RT_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  // A copy: the file may be written to between the check and the use.
  const std::string model(reinterpret_cast<const char*>(file.data()), file.size_bytes());
  return FromModel(model, path);
}

Result<Tokenizer> Tokenizer::FromModel(std::string_view model, const std::string& name) {
  const auto damaged = [&name](const std::string& reason) {
    return DamagedError(
        fmt::format("{}: expected a SentencePiece model, got a file that does not load "
                    "({}); restore the file or train a tokenizer",
                    name, reason));
  };
  if (model.empty()) return damaged("it is empty");
  if (!CharacterMapsStayInside(model)) return damaged("its fields or its character map are broken");
  SilenceLibrary();
  try {
    Tokenizer tokenizer(std::make_unique<Processor>());
    const auto status = tokenizer.processor_->library.LoadFromSerializedProto(model);
    if (!status.ok()) return damaged(status.message());
    if (tokenizer.vocab_size() < 1) return damaged("it has no pieces");
    tokenizer.digest_ = DigestOf(model);
    return tokenizer;
  } catch (const std::exception& error) {
    return damaged(error.what());
  }
}

int64_t Tokenizer::vocab_size() const { return processor_->library.GetPieceSize(); }
int32_t Tokenizer::eos_id() const { return processor_->library.eos_id(); }
int32_t Tokenizer::bos_id() const { return processor_->library.bos_id(); }

Status Tokenizer::Encode(std::string_view text, std::vector<int32_t>* ids) const {
  try {
    const auto status = processor_->library.Encode(text, ids);
    if (!status.ok()) return FailedError(fmt::format("tokenizing: {}", status.message()));
  } catch (const std::exception& error) {
    return FailedError(fmt::format("tokenizing: {}", error.what()));
  }
  return {};
}

Result<std::string> Tokenizer::Decode(const std::vector<int32_t>& ids) const {
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) {
      return UsageError(fmt::format("token id: expected 0..{}, got {}", vocab_size() - 1, id));
    }
  }
  try {
    std::string text;
    const auto status = processor_->library.Decode(ids, &text);
    if (!status.ok()) return FailedError(fmt::format("decoding: {}", status.message()));
    return text;
  } catch (const std::exception& error) {
    return FailedError(fmt::format("decoding: {}", error.what()));
  }
}

std::string Tokenizer::Piece(int32_t id) const {
  RT_CHECK(id >= 0 && id < vocab_size());
  return processor_->library.IdToPiece(id);
}

}  // namespace retrace
