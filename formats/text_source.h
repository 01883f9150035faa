// TextSource: documents of UTF-8 text out of plain or gzip files (.gz, and dictzip's .dz, which is
// gzip), one at a time, in a fixed order. Used by formats/data_build.
// Where a document ends: text files have no mark for it, so the rule looks at blank lines. A blank
// line followed by a line that starts at the margin ends a document (paragraphs of prose; the
// entries of a dictionary, whose continuation lines are indented), once the document has
// `min_document_bytes`. A document that grows beyond `max_document_bytes` ends at the next blank
// line of any kind, beyond twice that at the next line end, beyond four times at the next
// character.
// What changes in the text: CR LF becomes LF, a last line without an end gets one, a byte-order
// mark at the start is dropped, blank lines at a document's ends are dropped and others emptied,
// each maximal ill-formed byte sequence becomes U+FFFD (counted).
// Invariants: documents are well-formed UTF-8 and not empty; memory is bounded by a few documents.
// Not thread-safe.
#ifndef RETRACE_FORMATS_TEXT_SOURCE_H_
#define RETRACE_FORMATS_TEXT_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace retrace {

struct TextSourceOptions {
  std::vector<std::string> inputs;    // read one after another; a document never spans two files
  int64_t min_document_bytes = 1024;  // 1: every paragraph or entry on its own
  int64_t max_document_bytes = 65536;
  int64_t max_text_bytes = 0;  // stop after the document that reaches it; 0: no limit
};

class TextSource {
 public:
  // kUsage for options out of range or no inputs. Files are opened when their turn comes.
  static Result<TextSource> Open(const TextSourceOptions& options);

  TextSource(TextSource&&) noexcept;
  TextSource& operator=(TextSource&&) noexcept;
  ~TextSource();

  // The next document, or false at the end. Errors: kUsage for a missing file, kDamaged for a
  // truncated or corrupt gzip stream, kFailed for a read error.
  Result<bool> Next(std::string* document);

  int64_t documents() const;           // given so far
  int64_t text_bytes() const;          // in them
  int64_t replaced_sequences() const;  // ill-formed byte sequences replaced so far
  double Fraction() const;             // of the work done, 0..1, by bytes of the files read

 private:
  struct State;
  explicit TextSource(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Replaces each maximal ill-formed subsequence (Unicode, section 3.9) by U+FFFD. Returns how many.
int64_t MakeUtf8WellFormed(std::string* text);

}  // namespace retrace

#endif  // RETRACE_FORMATS_TEXT_SOURCE_H_
