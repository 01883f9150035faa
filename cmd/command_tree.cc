#include "cmd/command_tree.h"

#include <CLI/CLI.hpp>

#include "core/recipe_toml.h"
#include "surgery/intervention.h"

namespace retrace {
namespace {

// The parser's "TEXT:{a,b}" or "INT:INT in [1 - 64]".
void ReadType(const std::string& type, OptionNode* node) {
  node->value = type.substr(0, type.find(':'));
  const size_t open = type.find('{'), close = type.rfind('}');
  if (open == std::string::npos || close == std::string::npos) return;
  std::string choice;
  for (const char c : type.substr(open + 1, close - open - 1) + ",") {
    if (c != ',') {
      choice.push_back(c);
      continue;
    }
    node->choices.push_back(choice);
    choice.clear();
  }
}

OptionNode ReadOption(const CLI::Option& option) {
  OptionNode node;
  for (const std::string& name : option.get_snames()) node.flags.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) node.flags.push_back("--" + name);
  if (node.flags.empty()) node.name = option.get_single_name();
  if (option.get_items_expected_max() > 0) ReadType(option.get_type_name(), &node);
  node.value_optional = option.get_items_expected_max() > 0 && option.get_expected_min() == 0;
  node.default_value = option.get_default_str();
  node.description = option.get_description();
  node.required = option.get_required();
  return node;
}

CommandNode ReadCommand(const CLI::App& app, const std::string& path) {
  CommandNode node;
  node.path = path;
  node.description = app.get_description();
  node.footer = app.get_footer();
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) node.options.push_back(ReadOption(*option));
  }
  for (const CLI::App* child : app.get_subcommands([](const CLI::App*) { return true; })) {
    node.commands.push_back(
        ReadCommand(*child, path.empty() ? child->get_name() : path + " " + child->get_name()));
  }
  return node;
}

}  // namespace

CommandNode ReadCommandTree(const CLI::App& app) { return ReadCommand(app, ""); }

std::vector<std::string> SuggestedValues(const OptionNode& option) {
  std::vector<std::string> values = option.choices;
  for (const std::string& flag : option.flags) {
    if (flag == "--set") {
      for (const RecipeKey& key : RecipeKeys()) values.push_back(key.name + "=");
    }
    if (flag == "--do") {
      for (const InterventionKind* kind : InterventionKinds()) values.push_back(kind->name);
    }
  }
  return values;
}

}  // namespace retrace
