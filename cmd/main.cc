// The program `retrace`: parses the command line and calls one command. Exit codes as in
// core/status.h.
#include <CLI/CLI.hpp>

#include "cmd/data.h"
#include "core/status.h"
#include "core/version.h"

int main(int argc, char** argv) {
  CLI::App app("A record-and-replay debugger for language-model training", "retrace");
  app.set_version_flag("--version", std::string("retrace ") + retrace::kVersion);
  app.require_subcommand(1);
  retrace::AddDataCommand(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RuntimeError& error) {
    return error.get_exit_code();  // a command has failed and said why
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(retrace::StatusCode::kUsage);
  }
  return 0;
}
