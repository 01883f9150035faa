#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "cmd/command_tree.h"

namespace retrace {
namespace {

// For a shell's single quotes.
std::string Quoted(const std::string& text) {
  std::string quoted = "'";
  for (const char c : text) {
    if (c == '\'')
      quoted += "'\\''";
    else
      quoted += c;
  }
  return quoted + "'";
}

std::string FlagWords(const CommandNode& command) {
  std::string words;
  for (const OptionNode& option : command.options) {
    for (const std::string& flag : option.flags) words += (words.empty() ? "" : " ") + flag;
  }
  return words;
}

std::string CommandWords(const CommandNode& command) {
  std::string words;
  for (const CommandNode& child : command.commands) {
    words += (words.empty() ? "" : " ") + child.name();
  }
  return words;
}

// Lines of a shell `case` over "COMMAND:WORD" that follow the words typed so far.
std::string PathCases(const CommandNode& root, const char* indent) {
  std::string cases;
  VisitCommands(root, [&](const CommandNode& command) {
    for (const CommandNode& child : command.commands) {
      cases += fmt::format("{}'{}:{}') command='{}' ;;\n", indent, command.path, child.name(),
                           child.path);
    }
  });
  return cases;
}

// One line per option whose values are known; `use` turns them into the shell's words.
template <class F>
std::string ValueCases(const CommandNode& root, const char* indent, const F& use) {
  std::string cases;
  VisitCommands(root, [&](const CommandNode& command) {
    for (const OptionNode& option : command.options) {
      const std::vector<std::string> values = SuggestedValues(option);
      if (values.empty() || option.positional()) continue;
      std::vector<std::string> patterns;
      for (const std::string& flag : option.flags) {
        patterns.push_back("'" + command.path + ":" + flag + "'");
      }
      cases += fmt::format("{}{}) {} ;;\n", indent, fmt::join(patterns, "|"), use(values));
    }
  });
  return cases;
}

// Values of the first positional, where they are known.
std::vector<std::string> PositionalValues(const CommandNode& command) {
  for (const OptionNode& option : command.options) {
    if (option.positional()) return SuggestedValues(option);
  }
  return {};
}

std::string BashScript(const CommandNode& root) {
  std::string script =
      "# bash completion of retrace. Made by 'retrace completion bash'.\n"
      "_retrace() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command= i\n"
      "  # bash splits --flag=value at the '='.\n"
      "  if [[ $cur == = ]]; then cur=\n"
      "  elif [[ $prev == = ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}\n"
      "  fi\n"
      "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
      "    case \"$command:${COMP_WORDS[i]}\" in\n";
  script += PathCases(root, "      ");
  script += "    esac\n  done\n  case \"$command:$prev\" in\n";
  script += ValueCases(root, "    ", [](const std::vector<std::string>& values) {
    return fmt::format("COMPREPLY=($(compgen -W '{}' -- \"$cur\")); return",
                       fmt::join(values, " "));
  });
  script += "  esac\n  local flags= words=\n  case \"$command\" in\n";
  VisitCommands(root, [&](const CommandNode& command) {
    const std::string words = command.commands.empty()
                                  ? fmt::format("{}", fmt::join(PositionalValues(command), " "))
                                  : CommandWords(command);
    script += fmt::format("    '{}') flags='{}' words='{}' ;;\n", command.path, FlagWords(command),
                          words);
  });
  script +=
      "  esac\n"
      "  if [[ $cur == -* ]]; then words=$flags; fi\n"
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
      "}\n"
      "complete -o default -F _retrace retrace\n";
  return script;
}

// "name:what it is" for _describe.
std::string Described(const std::string& name, const std::string& description) {
  std::string escaped;
  for (const char c : name) escaped += c == ':' ? std::string("\\:") : std::string(1, c);
  return Quoted(escaped + ":" + description);
}

std::string ZshScript(const CommandNode& root) {
  std::string script =
      "#compdef retrace\n"
      "# zsh completion of retrace. Made by 'retrace completion zsh'.\n"
      "_retrace() {\n"
      "  local command= i\n"
      "  for ((i = 2; i < CURRENT; ++i)); do\n"
      "    case \"$command:${words[i]}\" in\n";
  script += PathCases(root, "      ");
  script += "    esac\n  done\n  case \"$command:${words[CURRENT-1]}\" in\n";
  script += ValueCases(root, "    ", [](const std::vector<std::string>& values) {
    std::string words;
    for (const std::string& value : values) words += " " + Quoted(value);
    return fmt::format("compadd -S '' --{}; return", words);
  });
  script += "  esac\n  local -a flags subcommands\n  case \"$command\" in\n";
  VisitCommands(root, [&](const CommandNode& command) {
    script += fmt::format("    '{}')\n      flags=(", command.path);
    for (const OptionNode& option : command.options) {
      for (const std::string& flag : option.flags) {
        script += "\n        " + Described(flag, option.description);
      }
    }
    script += ")\n      subcommands=(";
    for (const CommandNode& child : command.commands) {
      script += "\n        " + Described(child.name(), child.description);
    }
    script += ") ;;\n";
  });
  script +=
      "  esac\n"
      "  if [[ ${words[CURRENT]} == -* ]]; then _describe -o flag flags\n"
      "  elif (( ${#subcommands} )); then _describe command subcommands\n"
      "  else _files\n"
      "  fi\n"
      "}\n"
      "if [[ ${funcstack[1]} == _retrace ]]; then _retrace \"$@\"; else compdef _retrace retrace; "
      "fi\n";
  return script;
}

// True in fish once exactly the words of this path were typed.
std::string FishCondition(const CommandNode& command) {
  return "__retrace_at " + Quoted(command.path);
}

std::string FishScript(const CommandNode& root) {
  std::string script =
      "# fish completion of retrace. Made by 'retrace completion fish'.\n"
      "function __retrace_at\n"
      "  set -l command\n"
      "  set -l words (commandline -opc)\n"
      "  set -e words[1]\n"
      "  for word in $words\n"
      "    switch \"$command:$word\"\n";
  VisitCommands(root, [&](const CommandNode& command) {
    for (const CommandNode& child : command.commands) {
      script += fmt::format("      case '{}:{}'\n        set command '{}'\n", command.path,
                            child.name(), child.path);
    }
  });
  script += "    end\n  end\n  test \"$command\" = \"$argv[1]\"\nend\n";
  VisitCommands(root, [&](const CommandNode& command) {
    const std::string at = Quoted(FishCondition(command));
    for (const CommandNode& child : command.commands) {
      script += fmt::format("complete -c retrace -n {} -f -a {} -d {}\n", at, child.name(),
                            Quoted(child.description));
    }
    for (const OptionNode& option : command.options) {
      if (option.positional()) continue;
      script += fmt::format("complete -c retrace -n {}", at);
      for (const std::string& flag : option.flags) {
        const bool is_long = flag.starts_with("--");
        script += is_long ? " -l " + flag.substr(2) : " -s " + flag.substr(1);
      }
      const std::vector<std::string> values = SuggestedValues(option);
      if (!option.value.empty() && !option.value_optional) script += " -r";
      if (!values.empty()) script += fmt::format(" -f -a '{}'", fmt::join(values, " "));
      script += " -d " + Quoted(option.description) + "\n";
    }
  });
  return script;
}

}  // namespace

std::string CompletionScript(const CommandNode& root, const std::string& shell) {
  if (shell == "zsh") return ZshScript(root);
  if (shell == "fish") return FishScript(root);
  return BashScript(root);
}

}  // namespace retrace
