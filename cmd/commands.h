// The commands of the program, one file each. Used by main.cc.
// Each function adds a command to the program; its callback runs it. A command that ends with
// anything but 0 throws CLI::RuntimeError with the exit code (console.h: Exit).
#ifndef RETRACE_CMD_COMMANDS_H_
#define RETRACE_CMD_COMMANDS_H_

namespace CLI {
class App;
}

namespace retrace {

void AddDataCommand(CLI::App& app);
void AddTrainCommand(CLI::App& app);
void AddReplayCommand(CLI::App& app);
void AddExperimentCommand(CLI::App& app);
void AddLogCommand(CLI::App& app);
void AddReportCommand(CLI::App& app);
void AddStatsCommand(CLI::App& app);
void AddBlameCommand(CLI::App& app);
void AddBisectCommand(CLI::App& app);
void AddShowCommand(CLI::App& app);
void AddDiffCommand(CLI::App& app);
void AddTraceCommand(CLI::App& app);
void AddExportCommand(CLI::App& app);
void AddImportCommand(CLI::App& app);
void AddVerifyCommand(CLI::App& app);
void AddFsckCommand(CLI::App& app);
void AddRepairCommand(CLI::App& app);
void AddDensifyCommand(CLI::App& app);
void AddPruneCommand(CLI::App& app);
void AddPackCommand(CLI::App& app);
void AddDuCommand(CLI::App& app);
void AddRecipeCommand(CLI::App& app);
void AddPlanCommand(CLI::App& app);
void AddInterventionsCommand(CLI::App& app);
void AddSelftestCommand(CLI::App& app);
void AddBenchCommand(CLI::App& app);
void AddBenchStoreCommands(CLI::App& bench);  // those of `bench` that are about the store
void AddManualCommands(CLI::App& app);

}  // namespace retrace

#endif  // RETRACE_CMD_COMMANDS_H_
