// Console: what every command prints with: errors, progress, colour. Used by the files of cmd/.
// Results go to standard output, everything else to standard error.
#ifndef RETRACE_CMD_CONSOLE_H_
#define RETRACE_CMD_CONSOLE_H_

#include <chrono>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "core/status.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace retrace {

// Text and a line to standard error. Unlike fmt::print they never throw: a terminal that is gone or
// a full disk under a log ends no training.
void WriteError(std::string_view text);
void SayError(std::string_view line);
// Descriptors 0 to 2 are open afterwards. Where the caller closed one, the next file that is
// opened, a ledger perhaps, would get its number, and what is printed would go into that file.
void HoldStandardStreams();
// Errors: kFailed where standard output did not take all that was printed. At the end of the
// program.
Status FinishOutput();

// Ends the command with an exit code (status.h; 1: differs).
[[noreturn]] void Exit(int code);
// Prints "retrace: MESSAGE" and ends the command with the status's code.
[[noreturn]] void Fail(const Status& status);
// The value, or Fail.
template <class T>
T OrFail(Result<T> result) {
  if (!result.ok()) Fail(result.status());
  return std::move(result).value();
}
inline void OrFail(const Status& status) {
  if (!status.ok()) Fail(status);
}

// --quiet, --json, --color of a command.
struct OutputFlags {
  bool quiet = false;
  bool json = false;
  std::string color = "auto";  // auto, always, never

  bool Colored() const;  // of standard output
};
// Adds the flags that the command honours.
void AddOutputFlags(CLI::App* command, OutputFlags* flags, bool with_json);

// The option takes whole numbers, or any numbers, from least to most. -> option. (CLI11's own
// ranges let NaN and overflowing numbers pass, and speak of INT in [0 - 65536] and of 0.000000.)
inline constexpr int64_t kNoMost = std::numeric_limits<int64_t>::max();
CLI::Option* WholeIn(CLI::Option* option, int64_t least, int64_t most = kNoMost);
CLI::Option* NumberIn(CLI::Option* option, double least, double most);

enum class Tint { kPlain, kBold, kDim, kRed, kGreen, kYellow, kCyan };
std::string Tinted(const OutputFlags& flags, Tint tint, std::string_view text);

// Progress of a job with a known end: on a terminal one line rewritten in place, with rate and
// remaining time; elsewhere a plain line now and then. Silent when quiet.
class Progress {
 public:
  Progress(const OutputFlags& flags, std::string what, int64_t first, int64_t last);
  ~Progress();

  // `done` in [first, last]; `note` behind the bar ("loss 8.31").
  void Show(int64_t done, const std::string& note);
  // Prints a whole line above the bar.
  void Say(const std::string& line);
  void Finish();

 private:
  void Clear();

  const bool quiet_, terminal_;
  const std::string what_;
  const int64_t first_, last_;
  const std::chrono::steady_clock::time_point begin_;
  std::chrono::steady_clock::time_point shown_{};
  bool on_screen_ = false;
};

std::string Duration(double seconds);  // "1 m 23 s"
std::string ByteText(double bytes);       // "1.4 GB"

}  // namespace retrace

#endif  // RETRACE_CMD_CONSOLE_H_
