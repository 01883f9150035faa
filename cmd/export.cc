#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "replay/model_files.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace export runs/demo@24 --out demo-24                   # a folder that transformers loads
  retrace export runs/demo@24 --out demo-24 --with p,m,v      # with Adam's moments, for 'retrace import'
  retrace export runs/demo@24 --out demo-24.h5 --with p,m,v   # one HDF5 file, /p/NAME, /m/NAME, /v/NAME
The folder has model.safetensors (m.safetensors, v.safetensors), config.json, recipe.toml and
retrace.json. Above --file-size a set is split over several files with an index. Bits are moved, never
rounded.)";

struct ExportFlags {
  std::string address, out, with = "p";
  double file_gigabytes = 5;
  OutputFlags output;
};

Result<std::array<bool, kNumComponents>> ParseComponents(const std::string& text) {
  std::array<bool, kNumComponents> components = {};
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string word = text.substr(at, end - at);
    bool known = false;
    for (int c = 0; c < kNumComponents; ++c) {
      if (word != ComponentName(static_cast<Component>(c))) continue;
      components[c] = known = true;
    }
    if (!known)
      return UsageError("--with " + text + ": expected some of p,m,v, got '" + word + "'");
    at = end + 1;
  }
  return components;
}

void RunExport(const ExportFlags& flags) {
  const StateAddress address = OrFail(ParseStateAddress(flags.address));
  if (!address.position || !address.glob.empty() || !address.component.empty()) {
    Fail(UsageError("'" + flags.address + "': expected RUN@k, a whole state"));
  }
  ExportOptions options;
  options.components = OrFail(ParseComponents(flags.with));
  options.file_bytes_max = static_cast<uint64_t>(flags.file_gigabytes * 1e9);
  const std::unique_ptr<OpenedRun> run = OrFail(OpenedRun::Open(address.run));
  OrFail(run->CheckPosition(*address.position));
  options.run = address.run;
  const State state = OrFail(run->timeline().Seek(*address.position));
  const bool hdf5 = flags.out.ends_with(".h5") || flags.out.ends_with(".hdf5");
  const ExportReport report =
      OrFail(hdf5 ? ExportHdf5(run->recipe(), run->layout(), state, flags.out, options)
                  : ExportSafetensors(run->recipe(), run->layout(), state, flags.out, options));
  if (flags.output.json) {
    const nlohmann::ordered_json json = {{"state", flags.address},
                                         {"out", flags.out},
                                         {"files", report.files},
                                         {"bytes", report.bytes},
                                         {"notices", report.notices}};
    return PrintReport(json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  for (const std::string& notice : report.notices) SayError("retrace: " + notice);
  if (!flags.output.quiet) {
    PrintReport(fmt::format("{}: {} of {} tensors ({}) of {}\n", flags.out,
                            ByteText(static_cast<double>(report.bytes)),
                            run->layout().tensors().size(), flags.with, flags.address));
  }
}

}  // namespace

void AddExportCommand(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("export", "Write a state for other programs: safetensors or HDF5");
  auto flags = std::make_shared<ExportFlags>();
  command->add_option("state", flags->address, "RUN@k")->required();
  command->add_option("-o,--out", flags->out, "The new folder, or a .h5 file")->required();
  command->add_option("--with", flags->with, "Some of p (parameters), m, v, comma-separated")
      ->capture_default_str();
  NumberIn(
      command->add_option("--file-size", flags->file_gigabytes, "Largest safetensors file, GB"),
      1e-9, 1e9)
      ->capture_default_str();
  AddOutputFlags(command, &flags->output, true);
  command->footer(kExamples);
  command->callback([flags] { RunExport(*flags); });
}

}  // namespace retrace
