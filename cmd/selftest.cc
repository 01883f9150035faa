#include "replay/selftest.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/text_table.h"
#include "core/version.h"

namespace retrace {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kExamples[] = R"(Examples:
  retrace selftest               # seconds
  retrace selftest --full        # more values, BF16 and FP64 updates, blockwise attention: minutes
Exit code 5: something is not identical here. Then do not trust recordings made on this machine; the
table names the kernel, and the first value that differs.)";

struct SelftestFlags {
  bool full = false;
  OutputFlags output;
};

Tint TintOf(SelftestOutcome outcome) {
  switch (outcome) {
    case SelftestOutcome::kIdentical:
      return Tint::kGreen;
    case SelftestOutcome::kDiffers:
      return Tint::kRed;
    case SelftestOutcome::kAbsent:
      return Tint::kDim;
  }
  return Tint::kPlain;
}

class Table {
 public:
  explicit Table(const OutputFlags& output) : output_(output) {}

  void Print(const SelftestRow& row) {
    if (row.section != section_) fmt::print("{}\n", Tinted(output_, Tint::kBold, row.section));
    section_ = row.section;
    const std::string outcome = fmt::format("{:<9}", OutcomeName(row.outcome));
    const std::string text = Tinted(output_, TintOf(row.outcome), outcome);
    if (row.outcome == SelftestOutcome::kAbsent) {
      fmt::print("  {}  {}: {}\n", text, row.what, row.detail);
    } else {
      fmt::print("  {}  {:<38} {:>9} compared   {}\n", text, row.what, row.checks, row.why);
    }
    if (row.outcome == SelftestOutcome::kDiffers) fmt::print("             {}\n", row.detail);
    std::fflush(stdout);
  }

 private:
  const OutputFlags& output_;
  std::string section_;
};

Json JsonOf(const std::vector<SelftestRow>& rows, bool identical) {
  Json list = Json::array();
  for (const SelftestRow& row : rows) {
    list.push_back({{"section", row.section},
                    {"what", row.what},
                    {"why", row.why},
                    {"compared", row.checks},
                    {"outcome", OutcomeName(row.outcome)},
                    {"detail", row.detail}});
  }
  return {{"numerics", kNumericsId}, {"identical", identical}, {"rows", list}};
}

void RunAll(const SelftestFlags& flags) {
  Table table(flags.output);
  SelftestOptions options;
  options.full = flags.full;
  const bool shown = !flags.output.json && !flags.output.quiet;
  if (shown) options.row = [&](const SelftestRow& row) { table.Print(row); };
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<SelftestRow> rows = RunSelftest(options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const int64_t differing = std::count_if(rows.begin(), rows.end(), [](const SelftestRow& row) {
    return row.outcome == SelftestOutcome::kDiffers;
  });
  if (flags.output.json) {
    PrintReport(JsonOf(rows, differing == 0).dump(2) + "\n");
  } else if (differing == 0) {
    fmt::print("{}: all {} here, so this machine keeps the promise of {} ({})\n",
               Tinted(flags.output, Tint::kGreen, "selftest"), "identical", kNumericsId,
               Duration(seconds.count()));
  } else {
    fmt::print("{}: {} of {} rows differ: this machine does not keep the promise of {}\n",
               Tinted(flags.output, Tint::kRed, "selftest"), differing, rows.size(), kNumericsId);
  }
  if (differing > 0) Exit(static_cast<int>(StatusCode::kFailed));
}

}  // namespace

void AddSelftestCommand(CLI::App& app) {
  CLI::App* selftest = app.add_subcommand(
      "selftest", "Show that this machine computes the bits that the numerics contract promises");
  auto flags = std::make_shared<SelftestFlags>();
  selftest->add_flag("--full", flags->full, "More values and policies; minutes");
  AddOutputFlags(selftest, &flags->output, true);
  selftest->footer(kExamples);
  selftest->callback([flags] { RunAll(*flags); });
}

}  // namespace retrace
