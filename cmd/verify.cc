#include "replay/verify.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/damage_report.h"
#include "cmd/job_flags.h"
#include "cmd/replay_report.h"
#include "cmd/text_table.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace verify runs/demo                      # is all that is kept as it was written?
  retrace verify runs/demo --replay             # and does living all updates again give the same?
  retrace verify runs/demo --replay 4..24 --tp 2 --json
Everything that is damaged is named, not only what comes first. Exit code: 0 all is fine; 1 a replayed
update differs; 3 something is damaged, whatever the replay says.)";

constexpr int kDiffers = 1;

struct VerifyFlags {
  std::string run, replay;
  CLI::Option* replay_option = nullptr;
  JobFlags job;
  OutputFlags output;

  bool Replays() const { return replay_option->count() > 0; }
};

Json JsonOf(const VerifyFlags& flags, const VerifyReport& report) {
  return {{"run", flags.run},
          {"fine", report.fine()},
          {"first_position", report.first_position},
          {"last_position", report.last_position},
          {"ledger_lines", report.ledger_lines},
          {"keyframes", report.keyframes},
          {"journals", report.journals},
          {"walked", report.walked},
          {"damage", Json::parse(DamageJson(report.damage))},
          {"remarks", report.remarks}};
}

std::string ReportText(const VerifyFlags& flags, const VerifyReport& report) {
  std::string text = DamageText(flags.output, report.damage, report.remarks);
  text += fmt::format("ledger    {} lines, positions {}..{}\n", report.ledger_lines,
                      report.first_position, report.last_position);
  text += fmt::format("keyframes {} as recorded\n", report.keyframes);
  return text + fmt::format("journals  {} read, {} walked to their recorded state\n",
                            report.journals, report.walked);
}

// The range to replay, or an error for a range that is none.
UpdateRange ReplayRange(const VerifyFlags& flags, const RunReader& run) {
  if (!flags.replay.empty()) return OrFail(ParseUpdateRange(flags.replay, "--replay"));
  return {run.history().first_position() + 1, run.history().last_position()};
}

// nullopt: nothing to replay, or the run can not be opened because of what the report says.
std::optional<ReplayProof> Replay(const VerifyFlags& flags, const ResolvedJob& job,
                                  Status* status) {
  const Result<RunReader> run = RunReader::Open(flags.run);
  if (!run.ok()) {
    *status = run.status();
    return std::nullopt;
  }
  const UpdateRange range = ReplayRange(flags, *run);
  if (range.size() < 1) return std::nullopt;
  Result<ReplayProof> proof = ProveReplay(job, flags.output, *run, range);
  *status = proof.status();
  if (!proof.ok()) return std::nullopt;
  if (!flags.output.json && job.speaks()) {
    fmt::print("replay    {} of {} updates identical\n", proof->same, range.size());
  }
  return std::move(proof).value();
}

int ExitCode(const VerifyReport& report, const std::optional<ReplayProof>& proof,
             const Status& replayed) {
  if (!report.fine()) return static_cast<int>(StatusCode::kDamaged);
  if (!replayed.ok()) return static_cast<int>(replayed.code());
  return proof && !proof->identical ? kDiffers : 0;
}

// Under a launcher every rank verifies, so that they meet at the replay at about one time; one
// speaks.
void RunVerify(VerifyFlags flags) {
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  if (!flags.replay.empty()) OrFail(ParseUpdateRange(flags.replay, "--replay").status());
  if (!job.speaks()) flags.output.quiet = true;
  VerifyOptions options;
  options.threads = job.options.threads * (job.launched ? 1 : job.options.tp * job.options.dp);
  options.isa = job.options.isa;
  std::unique_ptr<Progress> progress;
  options.progress = [&](int64_t done, int64_t total) {
    if (!progress) progress = std::make_unique<Progress>(flags.output, "verify", 0, total);
    progress->Show(done, "");
  };
  Result<VerifyReport> verified = VerifyRun(flags.run, options);
  progress.reset();
  const VerifyReport report = OrFail(std::move(verified));
  if (!flags.output.json && job.speaks()) PrintReport(ReportText(flags, report));
  Status replayed;
  std::optional<ReplayProof> proof;
  if (flags.Replays()) proof = Replay(flags, job, &replayed);
  const int code = ExitCode(report, proof, replayed);
  if (!replayed.ok()) SayError("retrace: replay: " + replayed.message());
  if (flags.output.json && job.speaks()) {
    Json json = JsonOf(flags, report);
    if (proof) {
      json["replay"] = {{"identical", proof->identical}, {"updates", Json::parse(proof->updates)}};
    }
    if (!replayed.ok()) json["replay"] = {{"error", replayed.message()}};
    PrintReport(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  } else if (code == 0 && job.speaks()) {
    fmt::print("{}: {}\n", flags.run, Tinted(flags.output, Tint::kGreen, "all is fine"));
  }
  if (code != 0) Exit(code);
}

}  // namespace

void AddVerifyCommand(CLI::App& app) {
  CLI::App* verify = app.add_subcommand(
      "verify",
      "Prove that a run is as it was written and, on request, that it can be lived again");
  auto flags = std::make_shared<VerifyFlags>();
  verify->add_option("run", flags->run, "The recording")->required();
  flags->replay_option =
      verify->add_option("--replay", flags->replay, "Live updates A..B again too; all by default")
          ->expected(0, 1)
          ->type_name("[A..B]");
  AddJobFlags(verify, &flags->job);
  AddOutputFlags(verify, &flags->output, true);
  verify->footer(kExamples);
  verify->callback([flags] { RunVerify(*flags); });
}

}  // namespace retrace
