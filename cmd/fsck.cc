#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/damage_report.h"
#include "cmd/text_table.h"
#include "formats/run_check.h"
#include "kernels/thread_pool.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace fsck runs/demo              # every line, every master, every file's size: seconds
  retrace fsck runs/demo --deep       # every byte and the digest of every tensor
  retrace fsck runs/demo --deep --json
Looks at files, and lists all damage, not only the first. 'retrace verify' proves more: that the states
follow from one another. 'retrace repair' makes damaged steps again. Exit code 3: something is damaged.)";

struct FsckFlags {
  std::string run;
  bool deep = false;
  int threads = 0;
  OutputFlags output;
};

void PrintReport(const FsckFlags& flags, const FileReport& report) {
  if (flags.output.json) {
    const Json json = {
        {"run", flags.run},         {"deep", flags.deep},
        {"fine", report.fine()},    {"ledger_lines", report.ledger_lines},
        {"steps", report.steps},    {"damage", Json::parse(DamageJson(report.damage))},
        {"remarks", report.remarks}};
    return retrace::PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }
  std::string text = DamageText(flags.output, report.damage, report.remarks);
  text += fmt::format("ledger    {} lines as written\n", report.ledger_lines);
  text += fmt::format("steps     {} looked at, {}\n", report.steps,
                      flags.deep ? "every byte and tensor" : "masters whole, other files' sizes");
  if (report.fine()) {
    text += fmt::format("{}: {}\n", flags.run, Tinted(flags.output, Tint::kGreen, "all is fine"));
  } else {
    text +=
        fmt::format("{}: {} damaged; 'retrace repair {} --dry-run' says what can be made again\n",
                    flags.run, report.damage.size(), flags.run);
  }
  retrace::PrintReport(text);
}

void RunFsck(const FsckFlags& flags) {
  const int threads = flags.threads > 0 ? flags.threads : AvailableCpus();
  std::unique_ptr<Progress> progress;
  Result<FileReport> report =
      CheckRunFiles(flags.run, flags.deep ? CheckDepth::kDeep : CheckDepth::kQuick, threads,
                    [&](int64_t done, int64_t total) {
                      if (!progress)
                        progress = std::make_unique<Progress>(flags.output, "fsck", 0, total);
                      progress->Show(done, "");
                    });
  progress.reset();
  OrFail(report.status());
  PrintReport(flags, *report);
  if (!report->fine()) Exit(static_cast<int>(StatusCode::kDamaged));
}

}  // namespace

void AddFsckCommand(CLI::App& app) {
  CLI::App* fsck =
      app.add_subcommand("fsck", "Check a run's files against the digests and sizes recorded");
  auto flags = std::make_shared<FsckFlags>();
  fsck->add_option("run", flags->run, "The recording")->required();
  fsck->add_flag("--deep", flags->deep,
                 "Every byte and every tensor, not only structure and sizes");
  CLI::Option* threads =
      fsck->add_option("--threads", flags->threads, "Threads; 0: one for each processor");
  WholeIn(threads, 0, 1024)->capture_default_str();
  AddOutputFlags(fsck, &flags->output, true);
  fsck->footer(kExamples);
  fsck->callback([flags] { RunFsck(*flags); });
}

}  // namespace retrace
