#include "cmd/console.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>

namespace retrace {
namespace {

constexpr int kBarCells = 24;

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

std::string Bar(double fraction) {
  std::string bar;
  const int filled = static_cast<int>(fraction * kBarCells);
  for (int i = 0; i < kBarCells; ++i) bar += i < filled ? "━" : "╌";
  return bar;
}

}  // namespace

void Exit(int code) { throw CLI::RuntimeError(code); }

void Fail(const Status& status) {
  fmt::print(stderr, "retrace: {}\n", status.message());
  Exit(static_cast<int>(status.code()));
}

bool OutputFlags::Colored() const {
  if (color == "always") return true;
  if (color == "never" || json || std::getenv("NO_COLOR") != nullptr) return false;
  return isatty(STDOUT_FILENO) != 0;
}

void AddOutputFlags(CLI::App* command, OutputFlags* flags, bool with_json) {
  command->add_flag("-q,--quiet", flags->quiet, "No progress, no remarks");
  if (with_json) command->add_flag("--json", flags->json, "Print the result as JSON");
  command->add_option("--color", flags->color, "Colour the output")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
}

std::string Tinted(const OutputFlags& flags, Tint tint, std::string_view text) {
  if (!flags.Colored() || tint == Tint::kPlain) return std::string(text);
  return std::string(CodeOf(tint)) + std::string(text) + "\033[0m";
}

Progress::Progress(const OutputFlags& flags, std::string what, int64_t first, int64_t last)
    : quiet_(flags.quiet || flags.json),
      terminal_(isatty(STDERR_FILENO) != 0),
      what_(std::move(what)),
      first_(first),
      last_(last),
      begin_(std::chrono::steady_clock::now()) {}

Progress::~Progress() { Clear(); }

void Progress::Clear() {
  if (on_screen_) fmt::print(stderr, "\r\033[K");
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
  const double rate = elapsed > 0 ? static_cast<double>(done - first_) / elapsed : 0;
  const std::string left =
      rate > 0 && done < last_
          ? fmt::format(", {} left", Duration(static_cast<double>(last_ - done) / rate))
          : "";
  const double fraction = last_ > first_ ? static_cast<double>(done - first_) /
                                               static_cast<double>(last_ - first_)
                                         : 1.0;
  if (terminal_) {
    fmt::print(stderr, "\r\033[K{} {} {}/{}  {:.2f}/s{}  {}", what_, Bar(fraction), done, last_,
               rate, left, note);
    std::fflush(stderr);
    on_screen_ = true;
  } else {
    fmt::print(stderr, "{} {}/{} ({:.2f}/s{})  {}\n", what_, done, last_, rate, left, note);
  }
}

void Progress::Say(const std::string& line) {
  if (quiet_) return;
  Clear();
  fmt::print(stderr, "{}\n", line);
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
