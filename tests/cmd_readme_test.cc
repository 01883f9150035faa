// The commands of README.md run as they stand there, in order, in a folder whose examples/demo.toml is
// the demo with fewer and smaller layers.
#include <gtest/gtest.h>

#include <sstream>

#include "tests/places.h"
#include "tests/process.h"

namespace retrace {
namespace {

std::vector<std::string> CommandsOf(const std::string& markdown) {
  std::vector<std::string> commands;
  std::istringstream lines(markdown);
  bool shell = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("```", 0) == 0) shell = line == "```sh";
    else if (shell && line.rfind("retrace ", 0) == 0) commands.push_back(line);
  }
  return commands;
}

// FILES, PREFIX, MODEL: words that the reader replaces.
bool HasPlaceholder(const std::string& command) {
  return command.find("FILES") != std::string::npos;
}

Finished Shell(const std::string& folder, const std::string& command) {
  const TempFolder logs;
  const std::string path = BinaryDir();
  return Process({"/bin/sh", "-c", "cd '" + folder + "' && PATH='" + path + "':$PATH && " + command},
                 logs / "log")
      .Wait();
}

TEST(Readme, ItsCommandsRunInOrder) {
  const std::string source = SourceDir();
  const std::vector<std::string> commands = CommandsOf(ReadFileText(source + "/README.md"));
  ASSERT_GE(commands.size(), 10u);
  const TempFolder folder;
  const Finished prepared = Shell(
      folder.path(),
      "mkdir examples && cp '" + source +
          "/examples/gemma4_31b.toml' '" + source +
          "/examples/five_hypotheses.toml' examples/ && retrace recipe print '" + source +
          "/examples/demo.toml' --set model.layers=2 --set model.hidden_size=16"
          " --set model.intermediate_size=16 --set model.head_dim=8 --set model.global_head_dim=16"
          " --set model.vocab_size=512 --set data.path='" + source + "/tests/data/dataset/tiny'"
          " --set data.split=80,20,0 --set steps=34 --set data.evaluation_samples=2"
          " --set data.micro_batch_size=2 > examples/demo.toml");
  ASSERT_EQ(0, prepared.code) << prepared.err;
  for (const std::string& command : commands) {
    if (HasPlaceholder(command)) continue;
    const Finished done = Shell(folder.path(), command);
    const int expected = command.rfind("retrace diff", 0) == 0 ? 1 : 0;  // a branch differs
    EXPECT_EQ(expected, done.code) << command << "\n" << done.out << done.err;
    EXPECT_EQ(0, done.signal) << command;
  }
}

}  // namespace
}  // namespace retrace
