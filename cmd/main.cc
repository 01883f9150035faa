// The program `retrace`: parses the command line and calls one command. Exit codes as in
// core/status.h; 1 means "differs".
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cmd/commands.h"
#include "core/status.h"
#include "core/version.h"
#include "kernels/isa.h"
#include "replay/torch_plugin.h"

namespace {

// What is found beside the program and opened when first needed.
std::string PlugIns() {
  const retrace::Result<std::string> torch = retrace::FindTorchPlugin();
  return torch.ok() ? *torch : "none (libretrace_torch.so: ranks on several hosts)";
}

std::string VersionText() {
  return fmt::format("retrace {}\nnumerics          {}\nformat            {}\n"
                     "instruction set   {}\nplug-ins          {}",
                     retrace::kVersion, retrace::kNumericsId, retrace::kFormatId,
                     retrace::IsaName(retrace::BestIsa()), PlugIns());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A record-and-replay debugger for language-model training", "retrace");
  app.set_version_flag("--version", VersionText());
  app.require_subcommand(1);
  retrace::AddDataCommand(app);
  retrace::AddTrainCommand(app);
  retrace::AddReplayCommand(app);
  retrace::AddExperimentCommand(app);
  retrace::AddLogCommand(app);
  retrace::AddShowCommand(app);
  retrace::AddDiffCommand(app);
  retrace::AddVerifyCommand(app);
  retrace::AddRecipeCommand(app);
  retrace::AddInterventionsCommand(app);
  retrace::AddSelftestCommand(app);
  retrace::AddBenchCommand(app);
  retrace::AddManualCommands(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();  // a command has failed and said why
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(retrace::StatusCode::kUsage);
  }
  return 0;
}
