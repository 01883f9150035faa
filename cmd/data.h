// `retrace data build` and `retrace data inspect`. Used by main. Not thread-safe.
#ifndef RETRACE_CMD_DATA_H_
#define RETRACE_CMD_DATA_H_

namespace CLI {
class App;
}

namespace retrace {

// Adds the command to the program. Errors are printed and thrown as CLI::RuntimeError with the exit
// code of their Status, which CLI11_PARSE turns into the program's.
void AddDataCommand(CLI::App& app);

}  // namespace retrace

#endif  // RETRACE_CMD_DATA_H_
