#include "cmd/console.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>

namespace retrace {
namespace {

constexpr int kBarCellsMax = 24, kBarCellsMin = 4;

const char* CodeOf(Tint tint) {
  switch (tint) {
    case Tint::kPlain:
      return "";
    case Tint::kBold:
      return "\033[1m";
    case Tint::kDim:
      return "\033[2m";
    case Tint::kRed:
      return "\033[31m";
    case Tint::kGreen:
      return "\033[32m";
    case Tint::kYellow:
      return "\033[33m";
    case Tint::kCyan:
      return "\033[36m";
  }
  return "";
}

std::string Bar(double fraction, int cells) {
  std::string bar;
  const int filled = static_cast<int>(fraction * cells);
  for (int i = 0; i < cells; ++i) bar += i < filled ? "━" : "╌";
  return bar;
}

// A terminal on which a line can be rewritten.
bool IsTerminal(int fd) {
  const char* term = std::getenv("TERM");
  return isatty(fd) != 0 && (term == nullptr || std::string_view(term) != "dumb");
}

// Columns that a line on standard error may take without wrapping: a wrapped line can not be
// rewritten.
int LineWidth() {
  winsize size = {};
  const bool known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return (known ? size.ws_col : 80) - 1;
}

// "WHAT ━━━╌╌╌ COUNTS", the bar as long as fits, or left out; then the end is. Texts are ASCII.
std::string FittedLine(const std::string& what, double fraction, const std::string& counts) {
  const int width = LineWidth(), texts = static_cast<int>(what.size() + counts.size()) + 1;
  const int cells = std::min(kBarCellsMax, width - texts - 1);
  if (cells >= kBarCellsMin) return what + " " + Bar(fraction, cells) + " " + counts;
  return (what + " " + counts).substr(0, std::max(1, width));
}

// "1.57/s, 4.6 s left"; nothing before the first unit of work, or too early to tell.
std::string RateText(double done, double seconds, double left) {
  constexpr double kTooEarlySeconds = 1e-3;
  if (done <= 0 || seconds < kTooEarlySeconds) return "";
  const std::string rate = fmt::format("{:.2f}/s", done / seconds);
  return left > 0 ? fmt::format("{}, {} left", rate, Duration(left * seconds / done)) : rate;
}

}  // namespace

void WriteError(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void SayError(std::string_view line) { WriteError(std::string(line) + "\n"); }

void HoldStandardStreams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (fcntl(fd, F_GETFD) != -1) continue;
    // The lowest number that is free, so this one; opened the wrong way round, so that its use
    // fails as if it were closed.
    const int got = open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    if (got != fd) _exit(static_cast<int>(StatusCode::kFailed));  // no /dev/null: nothing is safe
  }
}

Status FinishOutput() {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return {};
  return FailedError("standard output: can not be written to (is the disk full?)");
}

void Exit(int code) { throw CLI::RuntimeError(code); }

void Fail(const Status& status) {
  SayError("retrace: " + status.message());
  Exit(static_cast<int>(status.code()));
}

bool OutputFlags::Colored() const {
  if (color == "always") return true;
  if (color == "never" || json || std::getenv("NO_COLOR") != nullptr) return false;
  return IsTerminal(STDOUT_FILENO);
}

void AddOutputFlags(CLI::App* command, OutputFlags* flags, bool with_json) {
  command->add_flag("-q,--quiet", flags->quiet, "No progress, no remarks");
  if (with_json) command->add_flag("--json", flags->json, "Print the result as JSON");
  command->add_option("--color", flags->color, "Colour the output")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
}

CLI::Option* WholeIn(CLI::Option* option, int64_t least, int64_t most) {
  const std::string range =
      most == kNoMost ? fmt::format("{}..", least) : fmt::format("{}..{}", least, most);
  return option->type_name(range)->check([least, most, range](const std::string& text) {
    int64_t number = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc() && stop == end && number >= least && number <= most) {
      return std::string();
    }
    return fmt::format("expected a whole number in {}, got '{}'", range, text);
  });
}

CLI::Option* NumberIn(CLI::Option* option, double least, double most) {
  const std::string range = fmt::format("{}..{}", least, most);
  return option->type_name(range)->check([least, most, range](const std::string& text) {
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    if (error == std::errc() && stop == end && number >= least && number <= most) {
      return std::string();
    }
    return fmt::format("expected a number in {}, got '{}'", range, text);
  });
}

std::string Tinted(const OutputFlags& flags, Tint tint, std::string_view text) {
  if (!flags.Colored() || tint == Tint::kPlain) return std::string(text);
  return std::string(CodeOf(tint)) + std::string(text) + "\033[0m";
}

Progress::Progress(const OutputFlags& flags, std::string what, int64_t first, int64_t last)
    : quiet_(flags.quiet || flags.json),
      terminal_(IsTerminal(STDERR_FILENO)),
      what_(std::move(what)),
      first_(first),
      last_(last),
      begin_(std::chrono::steady_clock::now()) {}

Progress::~Progress() { Clear(); }

void Progress::Clear() {
  if (on_screen_) WriteError("\r\033[K");
  on_screen_ = false;
}

void Progress::Show(int64_t done, const std::string& note) {
  if (quiet_) return;
  const auto now = std::chrono::steady_clock::now();
  const double since_shown = std::chrono::duration<double>(now - shown_).count();
  const bool ends = done == last_ || done == first_;
  if (!ends && since_shown < (terminal_ ? 0.1 : 10.0)) return;
  shown_ = now;
  const double elapsed = std::chrono::duration<double>(now - begin_).count();
  const std::string rate =
      RateText(static_cast<double>(done - first_), elapsed, static_cast<double>(last_ - done));
  const double fraction = last_ > first_ ? static_cast<double>(done - first_) /
                                               static_cast<double>(last_ - first_)
                                         : 1.0;
  if (terminal_) {
    const std::string counts =
        fmt::format("{}/{}{}  {}", done, last_, rate.empty() ? "" : "  " + rate, note);
    WriteError("\r\033[K" + FittedLine(what_, fraction, counts));
    on_screen_ = true;
  } else {
    SayError(fmt::format("{} {}/{}{}{}", what_, done, last_, rate.empty() ? "" : " (" + rate + ")",
                         note.empty() ? "" : "  " + note));
  }
}

void Progress::Say(const std::string& line) {
  if (quiet_) return;
  Clear();
  SayError(line);
}

void Progress::Finish() { Clear(); }

std::string Duration(double seconds) {
  if (seconds < 9.95) return fmt::format("{:.1f} s", seconds);
  const int64_t whole = static_cast<int64_t>(seconds + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} m {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} m", whole / 3600, whole / 60 % 60);
}

std::string ByteText(double bytes) {
  for (const char* unit : {"B", "kB", "MB", "GB"}) {
    if (bytes < 999.5) return fmt::format("{:.3g} {}", bytes, unit);
    bytes /= 1000;
  }
  return fmt::format("{:.3g} TB", bytes);
}

}  // namespace retrace
