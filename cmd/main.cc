// The program `retrace`: parses the command line and calls one command. Exit codes as in
// core/status.h; 1 means "differs".
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <exception>
#include <new>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
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

constexpr int kDiffers = 1;

constexpr char kFooter[] = R"(Examples:
  retrace data build TEXT.gz -o data/mine                  # a dataset of one's own text
  retrace train examples/demo.toml -o runs/demo            # record
  retrace replay runs/demo --steps 1..24                   # prove it
  retrace replay runs/demo --steps 4..24 --do clip:none    # with one thing changed: a branch
  retrace diff runs/demo runs/demo-clip                    # where the two part
Each command has --help with examples. Exit codes: 0 same or done, 1 differs, 2 usage, 3 damaged input,
4 not supported here, 5 failed.)";

int Run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();  // a command has failed and said why
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(retrace::StatusCode::kUsage);
  } catch (const std::bad_alloc&) {
    retrace::SayError("retrace: out of memory");
    return static_cast<int>(retrace::StatusCode::kFailed);
  } catch (const std::exception& error) {  // fmt::print throws where standard output is closed
    retrace::SayError(std::string("retrace: ") + error.what());
    return static_cast<int>(retrace::StatusCode::kFailed);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  retrace::HoldStandardStreams();
  std::signal(SIGXFSZ, SIG_IGN);  // beyond ulimit -f a write fails, as on a full disk
  CLI::App app("A record-and-replay debugger for language-model training", "retrace");
  app.set_version_flag("--version", VersionText());
  app.require_subcommand(1);
  retrace::AddDataCommand(app);
  retrace::AddTrainCommand(app);
  retrace::AddReplayCommand(app);
  retrace::AddExperimentCommand(app);
  retrace::AddLogCommand(app);
  retrace::AddStatsCommand(app);
  retrace::AddBlameCommand(app);
  retrace::AddBisectCommand(app);
  retrace::AddReportCommand(app);
  retrace::AddShowCommand(app);
  retrace::AddDiffCommand(app);
  retrace::AddTraceCommand(app);
  retrace::AddExportCommand(app);
  retrace::AddImportCommand(app);
  retrace::AddVerifyCommand(app);
  retrace::AddFsckCommand(app);
  retrace::AddRepairCommand(app);
  retrace::AddDensifyCommand(app);
  retrace::AddPruneCommand(app);
  retrace::AddPackCommand(app);
  retrace::AddDuCommand(app);
  retrace::AddRecipeCommand(app);
  retrace::AddPlanCommand(app);
  retrace::AddInterventionsCommand(app);
  retrace::AddSelftestCommand(app);
  retrace::AddBenchCommand(app);
  retrace::AddManualCommands(app);
  app.footer(kFooter);
  if (argc <= 1) {
    retrace::WriteError(app.help());
    return static_cast<int>(retrace::StatusCode::kUsage);
  }
  const int code = Run(app, argc, argv);
  if (code > kDiffers) return code;
  const retrace::Status printed = retrace::FinishOutput();
  if (!printed.ok()) retrace::SayError("retrace: " + printed.message());
  return printed.ok() ? code : static_cast<int>(printed.code());
}
