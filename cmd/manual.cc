#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cmd/command_tree.h"
#include "cmd/commands.h"
#include "cmd/text_table.h"
#include "core/version.h"

namespace retrace {
namespace {

constexpr char kCompletionExamples[] = R"(Examples:
  source <(retrace completion bash)                            # this shell
  retrace completion bash > ~/.local/share/bash-completion/completions/retrace
  retrace completion zsh > "${fpath[1]}/_retrace"
  retrace completion fish > ~/.config/fish/completions/retrace.fish)";

constexpr char kManExamples[] = R"(Examples:
  retrace man | man -l -
  retrace man > /usr/local/share/man/man1/retrace.1)";

// Text for troff: backslashes doubled, hyphens as typed, no line taken for a request.
std::string Roff(const std::string& text) {
  std::string out;
  bool line_start = true;
  for (const char c : text) {
    if (line_start && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
    line_start = c == '\n';
  }
  return out;
}

std::string Bold(const std::string& text) { return "\\fB" + Roff(text) + "\\fR"; }
std::string Italic(const std::string& text) { return "\\fI" + Roff(text) + "\\fR"; }

std::string Synopsis(const CommandNode& command) {
  std::string line = Bold("retrace " + command.path);
  bool any_flag = false;
  for (const OptionNode& option : command.options) any_flag = any_flag || !option.positional();
  if (any_flag) line += " [" + Italic("options") + "]";
  for (const OptionNode& option : command.options) {
    if (!option.positional()) continue;
    line += option.required ? " " + Italic(option.name) : " [" + Italic(option.name) + "]";
  }
  if (!command.commands.empty()) line += " " + Italic("command");
  return line;
}

std::string OptionText(const OptionNode& option) {
  std::string term;
  for (const std::string& flag : option.flags) term += (term.empty() ? "" : ", ") + Bold(flag);
  if (option.positional()) term = Italic(option.name);
  if (!option.value.empty() && !option.positional()) term += " " + Italic(option.value);
  std::string text = ".TP\n" + term + "\n" + Roff(option.description) + ".";
  if (!option.choices.empty()) {
    text += " One of";
    for (size_t i = 0; i < option.choices.size(); ++i) {
      text += (i == 0                           ? " "
               : i + 1 == option.choices.size() ? " or "
                                                : ", ") +
              Bold(option.choices[i]);
    }
    text += ".";
  }
  if (!option.default_value.empty()) text += " Default: " + Bold(option.default_value) + ".";
  return text + "\n";
}

std::string CommandText(const CommandNode& command) {
  std::string text = ".SS " + Synopsis(command) + "\n" + Roff(command.description) + ".\n";
  for (const OptionNode& option : command.options) {
    const bool help = !option.flags.empty() && option.flags.back() == "--help";
    if (!help) text += OptionText(option);
  }
  if (!command.footer.empty()) text += ".PP\n.nf\n" + Roff(command.footer) + "\n.fi\n";
  return text;
}

constexpr char kExitStatus[] = R"(.SH EXIT STATUS
The codes extend those of
.BR cmp (1)
and
.BR diff (1).
.TP
.B 0
Done; or the same.
.TP
.B 1
Something differs: a replayed update, two states.
.TP
.B 2
Usage: flags, a recipe, a name.
.TP
.B 3
Damaged input: a file that is not what it says it is.
.TP
.B 4
Not supported on this machine or in this build.
.TP
.B 5
The machine failed: a full disk, a lost rank, a time\-out, a self\-test that differs.
)";

constexpr char kEnvironment[] = R"(.SH ENVIRONMENT
.TP
.B NO_COLOR
No colour unless
.B \-\-color always
asks for it.
)";

}  // namespace

std::string ManualPage(const CommandNode& root) {
  std::string page = fmt::format(
      ".\\\" Made by 'retrace man' from the program's own help; do not edit.\n"
      ".TH RETRACE 1 \"\" \"retrace {}\" \"User Commands\"\n"
      ".SH NAME\nretrace \\- {}\n.SH SYNOPSIS\n",
      kVersion, Roff(root.description));
  for (const CommandNode& command : root.commands) page += Synopsis(command) + "\n.br\n";
  page += Bold("retrace") + " " + Bold("--version") + "\n";
  page +=
      ".SH DESCRIPTION\n" + Bold("retrace") +
      " trains bit\\-reproducibly, keeps the full state of every step around an instability,\n"
      "replays any range of steps with one thing changed, and says what that one thing caused.\n"
      "A state is addressed as " +
      Italic("RUN@k") + ", the state after k updates; " + Bold("--steps") + " " + Italic("A..B") +
      " names updates.\n.SH COMMANDS\n";
  VisitCommands(root, [&](const CommandNode& command) {
    if (!command.path.empty()) page += CommandText(command);
  });
  return page + kExitStatus + kEnvironment;
}

void AddManualCommands(CLI::App& app) {
  CLI::App* completion =
      app.add_subcommand("completion", "Print a script that completes commands in a shell");
  auto shell = std::make_shared<std::string>();
  completion->add_option("shell", *shell, "The shell")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  completion->footer(kCompletionExamples);
  completion->callback(
      [&app, shell] { PrintReport(CompletionScript(ReadCommandTree(app), *shell)); });
  CLI::App* man = app.add_subcommand("man", "Print the manual page");
  man->footer(kManExamples);
  man->callback([&app] { PrintReport(ManualPage(ReadCommandTree(app))); });
}

}  // namespace retrace
