#include "formats/text_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace retrace {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 16;

// Length of the well-formed UTF-8 sequence at the start of `text`, or minus the length of the
// maximal ill-formed subsequence there (Unicode 15, table 3-7). `text` is not empty.
int SequenceLength(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return -1;
  const int length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  uint8_t low = 0x80, high = 0xbf;  // what the second byte may be
  if (lead == 0xe0) low = 0xa0;     // no overlong forms
  if (lead == 0xed) high = 0x9f;    // no surrogates
  if (lead == 0xf0) low = 0x90;
  if (lead == 0xf4) high = 0x8f;  // nothing above U+10FFFF
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) >= text.size() || byte(static_cast<size_t>(i)) < low ||
        byte(static_cast<size_t>(i)) > high) {
      return -i;
    }
    low = 0x80;
    high = 0xbf;
  }
  return length;
}

bool IsBlank(std::string_view line) {
  return line.find_first_not_of(" \t\f\v\r") == std::string_view::npos;
}

bool StartsAtMargin(std::string_view line) { return line[0] != ' ' && line[0] != '\t'; }

// The place of a cut at or before `at` that does not split a character.
size_t CharacterStart(std::string_view text, size_t at) {
  size_t start = at;
  while (start > 0 && at - start < 3 && (static_cast<uint8_t>(text[start]) & 0xc0) == 0x80) --start;
  return (static_cast<uint8_t>(text[start]) & 0xc0) == 0x80 ? at : start;
}

// One input file, decompressed where need be, as lines without their ends.
class LineReader {
 public:
  LineReader() = default;
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  ~LineReader() { Close(); }

  Status Open(const std::string& path);
  // False at the end of the file. A piece of a line longer than `max_bytes` comes as a line of its
  // own with `*ended` false.
  Result<bool> Next(size_t max_bytes, std::string* line, bool* ended);
  int64_t BytesRead() const { return file_ == nullptr ? 0 : static_cast<int64_t>(gzoffset(file_)); }
  bool is_open() const { return file_ != nullptr; }
  void Close() {
    if (file_ != nullptr) gzclose(file_);
    file_ = nullptr;
  }

 private:
  Status Fill();

  std::string path_, buffer_;
  size_t at_ = 0;
  bool end_ = false;
  gzFile file_ = nullptr;
};

Status LineReader::Open(const std::string& path) {
  Close();
  path_ = path;
  buffer_.clear();
  at_ = 0;
  end_ = false;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return UsageError(
        fmt::format("{}: can not be opened: {}; check the path", path, strerror(errno)));
  }
  file_ = gzdopen(fd, "rb");
  if (file_ == nullptr) {
    close(fd);
    return FailedError(path + ": out of memory");
  }
  gzbuffer(file_, 1 << 17);
  RT_RETURN_IF_ERROR(Fill());
  const bool named_gzip = path.ends_with(".gz") || path.ends_with(".dz");
  if (named_gzip && gzdirect(file_) != 0 && !buffer_.empty()) {
    return DamagedError(
        fmt::format("{}: byte 0: expected a gzip header (by the file's name), got other "
                    "bytes; restore the file or rename it",
                    path));
  }
  if (buffer_.starts_with("\xef\xbb\xbf")) at_ = 3;  // the byte-order mark
  return {};
}

Status LineReader::Fill() {
  buffer_.erase(0, at_);
  at_ = 0;
  const size_t old = buffer_.size();
  buffer_.resize(old + kBlockBytes);
  const int got = gzread(file_, buffer_.data() + old, static_cast<unsigned>(kBlockBytes));
  int code = Z_OK;
  const char* message = gzerror(file_, &code);
  // A truncated stream gives its last bytes without an error and Z_BUF_ERROR beside them.
  if (got < 0 || code == Z_BUF_ERROR) {
    buffer_.resize(old);
    if (code == Z_ERRNO) return FailedError(fmt::format("{}: reading: {}", path_, strerror(errno)));
    return DamagedError(
        fmt::format("{}: byte {}: expected a whole gzip stream, got '{}'; restore the "
                    "file from its source",
                    path_, static_cast<int64_t>(gzoffset(file_)), message));
  }
  buffer_.resize(old + static_cast<size_t>(got));
  end_ = static_cast<size_t>(got) < kBlockBytes;
  return {};
}

Result<bool> LineReader::Next(size_t max_bytes, std::string* line, bool* ended) {
  size_t searched = at_;
  for (;;) {
    const size_t end = buffer_.find('\n', searched);
    const size_t length = (end == std::string::npos ? buffer_.size() : end) - at_;
    if (length > max_bytes) {
      const size_t cut = CharacterStart(buffer_, at_ + max_bytes);
      line->assign(buffer_, at_, cut - at_);
      at_ = cut;
      *ended = false;
      return true;
    }
    if (end != std::string::npos || (end_ && length > 0)) {
      line->assign(buffer_, at_, length);
      if (line->ends_with('\r')) line->pop_back();
      at_ = end == std::string::npos ? buffer_.size() : end + 1;
      *ended = true;
      return true;
    }
    if (end_) return false;
    searched = buffer_.size() - at_;  // Fill moves the unread bytes to the front
    RT_RETURN_IF_ERROR(Fill());
  }
}

}  // namespace

int64_t MakeUtf8WellFormed(std::string* text) {
  std::string_view rest = *text;
  std::string repaired;
  int64_t replaced = 0;
  size_t good = 0;  // bytes at the start of rest known to be well-formed
  while (good < rest.size()) {
    const int length = SequenceLength(rest.substr(good));
    if (length > 0) {
      good += static_cast<size_t>(length);
      continue;
    }
    repaired.append(rest.substr(0, good)).append("\xef\xbf\xbd");
    rest.remove_prefix(good + static_cast<size_t>(-length));
    good = 0;
    ++replaced;
  }
  if (replaced > 0) *text = repaired.append(rest);
  return replaced;
}

struct TextSource::State {
  TextSourceOptions options;
  std::vector<int64_t> file_bytes;
  int64_t bytes_of_files_done = 0, bytes_of_all_files = 0;
  size_t next_input = 0;
  LineReader reader;
  std::string line;  // read and not yet part of a document
  bool have_line = false;
  bool line_ended = true, at_line_start = true;
  bool done = false;
  int64_t documents = 0, text_bytes = 0, replaced = 0;

  Result<bool> NextRawDocument(std::string* document);
  Result<bool> NextLine();
  bool EndsBefore(std::string_view document, int64_t blank_lines) const;
};

// Reads into `line`; false at the end of the current file.
Result<bool> TextSource::State::NextLine() {
  if (have_line) return true;
  at_line_start = line_ended;
  RT_ASSIGN_OR_RETURN(have_line, reader.Next(static_cast<size_t>(options.max_document_bytes) * 4,
                                             &line, &line_ended));
  return have_line;
}

// Whether `line` begins a new document, after `document` and so many blank lines.
bool TextSource::State::EndsBefore(std::string_view document, int64_t blank_lines) const {
  const int64_t size = static_cast<int64_t>(document.size());
  if (size == 0) return false;
  if (size + static_cast<int64_t>(line.size()) > 4 * options.max_document_bytes) return true;
  if (!at_line_start) return false;
  if (size >= 2 * options.max_document_bytes) return true;
  if (blank_lines == 0) return false;
  return size >= options.max_document_bytes ||
         (size >= options.min_document_bytes && StartsAtMargin(line));
}

// A document of the current file with its blank lines in place, or false at the file's end.
Result<bool> TextSource::State::NextRawDocument(std::string* document) {
  document->clear();
  int64_t blank_lines = 0;
  for (;;) {
    RT_ASSIGN_OR_RETURN(const bool more, NextLine());
    if (!more) return !document->empty();
    if (at_line_start && line_ended && IsBlank(line)) {
      ++blank_lines;
      have_line = false;
      continue;
    }
    if (EndsBefore(*document, blank_lines)) return true;
    if (!document->empty()) document->append(static_cast<size_t>(blank_lines), '\n');
    blank_lines = 0;
    document->append(line);
    if (line_ended) document->push_back('\n');
    have_line = false;
  }
}

Result<TextSource> TextSource::Open(const TextSourceOptions& options) {
  if (options.inputs.empty()) return UsageError("no input text files were given");
  if (options.min_document_bytes < 1 || options.max_document_bytes < options.min_document_bytes ||
      options.max_document_bytes > (int64_t{1} << 28) || options.max_text_bytes < 0) {
    return UsageError(fmt::format(
        "document sizes: expected 1 <= min <= max <= 2^28 and a limit of 0 or "
        "more bytes, got min {}, max {}, limit {}",
        options.min_document_bytes, options.max_document_bytes, options.max_text_bytes));
  }
  auto state = std::make_unique<State>();
  state->options = options;
  for (const std::string& path : options.inputs) {
    struct stat info;
    if (stat(path.c_str(), &info) != 0) {
      return UsageError(fmt::format("{}: {}; check the path", path, strerror(errno)));
    }
    if (!S_ISREG(info.st_mode)) {
      return UsageError(path + ": expected a regular file, since it is read twice");
    }
    state->file_bytes.push_back(static_cast<int64_t>(info.st_size));
    state->bytes_of_all_files += static_cast<int64_t>(info.st_size);
  }
  return TextSource(std::move(state));
}

TextSource::TextSource(std::unique_ptr<State> state) : state_(std::move(state)) {}
TextSource::TextSource(TextSource&&) noexcept = default;
TextSource& TextSource::operator=(TextSource&&) noexcept = default;
TextSource::~TextSource() = default;

Result<bool> TextSource::Next(std::string* document) {
  State& s = *state_;
  while (!s.done) {
    if (!s.reader.is_open()) {
      if (s.next_input == s.options.inputs.size()) break;
      s.line_ended = true;
      RT_RETURN_IF_ERROR(s.reader.Open(s.options.inputs[s.next_input]));
    }
    RT_ASSIGN_OR_RETURN(const bool more, s.NextRawDocument(document));
    if (!more) {
      s.reader.Close();
      s.bytes_of_files_done += s.file_bytes[s.next_input++];
      continue;
    }
    s.replaced += MakeUtf8WellFormed(document);
    ++s.documents;
    s.text_bytes += static_cast<int64_t>(document->size());
    s.done = s.options.max_text_bytes > 0 && s.text_bytes >= s.options.max_text_bytes;
    return true;
  }
  s.done = true;
  return false;
}

int64_t TextSource::documents() const { return state_->documents; }
int64_t TextSource::text_bytes() const { return state_->text_bytes; }
int64_t TextSource::replaced_sequences() const { return state_->replaced; }

double TextSource::Fraction() const {
  const State& s = *state_;
  if (s.done) return 1;
  double fraction = 0;
  if (s.bytes_of_all_files > 0) {
    fraction = static_cast<double>(s.bytes_of_files_done + s.reader.BytesRead()) /
               static_cast<double>(s.bytes_of_all_files);
  }
  if (s.options.max_text_bytes > 0) {
    fraction = std::max(fraction, static_cast<double>(s.text_bytes) /
                                      static_cast<double>(s.options.max_text_bytes));
  }
  return std::min(fraction, 1.0);
}

}  // namespace retrace
