// CommandTree: the program's commands and options as plain values, read off the parser, so that
// completions and the manual can not say anything else than --help. Used by completion.cc and
// manual.cc. Immutable values.
#ifndef RETRACE_CMD_COMMAND_TREE_H_
#define RETRACE_CMD_COMMAND_TREE_H_

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace retrace {

struct OptionNode {
  std::vector<std::string> flags;    // "-o", "--out"; none for a positional
  std::string name;                  // of a positional
  std::string value;                 // "TEXT", "INT"; "" for a flag
  std::vector<std::string> choices;  // where only these are accepted
  std::string default_value;
  std::string description;
  bool required = false;
  bool value_optional = false;

  bool positional() const { return flags.empty(); }
};

struct CommandNode {
  std::string path;  // below the program: "data build"; "" for the program itself
  std::string description;
  std::string footer;
  std::vector<OptionNode> options;
  std::vector<CommandNode> commands;

  std::string name() const { return path.substr(path.rfind(' ') + 1); }
};

CommandNode ReadCommandTree(const CLI::App& app);

// Calls visit(command) for a command and all below it, parents first.
template <class F>
void VisitCommands(const CommandNode& command, const F& visit) {
  visit(command);
  for (const CommandNode& child : command.commands) VisitCommands(child, visit);
}

// Values that complete an option's argument though the parser accepts more: --set KEY=,
// --do NAME:.
std::vector<std::string> SuggestedValues(const OptionNode& option);

// Scripts for `source` or the shell's completion folder. `shell`: bash, zsh or fish.
std::string CompletionScript(const CommandNode& root, const std::string& shell);

// docs/retrace.1.
std::string ManualPage(const CommandNode& root);

}  // namespace retrace

#endif  // RETRACE_CMD_COMMAND_TREE_H_
