#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cmd/bisect_runs.h"
#include "cmd/bisect_search.h"
#include "cmd/commands.h"
#include "cmd/console.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace bisect runs/demo runs/demo-clip                            # where two runs part
  retrace bisect runs/demo --spike --do clip:none --dry-run          # what it may cost
  retrace bisect runs/demo --spike --do clip:none --jobs 2           # the point of no return
  retrace bisect runs/demo --spike --do lr:scale=0.5 --steps 1..10 --predicate 'jump > 1'
  retrace bisect runs/demo --spike --do skip-batch --predicate 'gradient_norm > 100 and loss > 9'
  retrace bisect runs/demo --cause --healthy runs/other --at 4       # what makes it spike
  retrace bisect runs/demo --cause --at 4 --components m,v           # by resetting, not transplanting
RUN OTHER: ledgers tell the first position whose states (or records) differ; the update that led there
is lived again on both sides, and the first op that differs is named as 'retrace trace' calls it, with
the element and both values; and the recipe keys that differ there. Where a recording is not what its
own replay gives, something happened that no recipe says, a fault of the hardware as a rule: then what
was recorded is compared with the replay, by the journal's gradient or the kept state where there is
one, else by the norms in the record. Exit code 0: the runs are the same, 1: they differ.
--spike: the last update from which on the interventions still prevent the spike. Each question is
decided on an ensemble of branches with noise: yes where at least 80 % show no spike up to the
horizon, no where fewer than 40 % do, undecided between; it stops as soon as the answer is plain.
--cause: the smallest set of (component x tensors) whose transplant from RUN@(k-1) of a healthy run, just
before update k (--at), prevents the spike: by delta debugging from the model down to tensors, confirmed
by leaving out each member with fresh replicas. Without a healthy run they are reset: w as the run
began, m = 0, v = g^2, the batches up to the spike passed over.
Fields of a predicate: jump (rise above the least loss before), peak, loss, evaluation_loss,
gradient_norm, clip, lr, update_rms, update, and non-finite; and, or, not, < <= > >= == !=, + - * /.
Killed or stopped, the same command goes on where it was; Ctrl-C prints the best so far.
Exit code 1: no answer (the budget is spent, it was stopped, or the control is not its recording).)";

struct Flags {
  BisectFlags search;
  std::string other;
  int tp = 0, dp = 1;
  bool spike = false, cause = false;
};

void RunBisect(const Flags& flags) {
  if (flags.spike) return RunBisectSpike(flags.search);
  if (flags.cause) return RunBisectCause(flags.search);
  if (flags.other.empty()) {
    Fail(UsageError("bisect: expected another run, --spike --do NAME:ARGS, or --cause [--healthy "
                    "OTHER]"));
  }
  BisectRuns({.a = flags.search.run,
              .b = flags.other,
              .job = {.tp = flags.tp, .dp = flags.dp, .threads = flags.search.threads,
                      .isa = flags.search.isa},
              .output = flags.search.output});
}

}  // namespace

void AddBisectCommand(CLI::App& app) {
  CLI::App* bisect = app.add_subcommand(
      "bisect", "Where two runs part; where a spike could still be prevented, and what causes it");
  auto flags = std::make_shared<Flags>();
  BisectFlags& search = flags->search;
  bisect->add_option("run", search.run, "The recording")->required();
  CLI::Option* other = bisect->add_option(
      "other", flags->other, "Another run: the update, op and element where the two part");
  WholeIn(bisect->add_option("--tp", flags->tp, "Tensor-parallel ranks that live both runs' update"),
          1, 1024)
      ->needs(other);
  WholeIn(bisect->add_option("--dp", flags->dp, "Data-parallel ranks that live both runs' update"), 1,
          1024)
      ->needs(other);
  CLI::Option* spike =
      bisect->add_flag("--spike", flags->spike, "The point of no return, for the interventions");
  bisect->add_option("--do", search.interventions, "NAME:ARGS, without a date; may be repeated")
      ->allow_extra_args(false)
      ->needs(spike);
  WholeIn(bisect->add_option("--checks", search.checks,
                             "Further updates probed on each side, to see that answers fall with k"),
          0, 64)
      ->needs(spike)
      ->capture_default_str();
  CLI::Option* cause = bisect->add_flag("--cause", flags->cause, "What makes the run spike");
  cause->excludes(spike)->excludes(other);
  spike->excludes(other);
  bisect->add_option("--healthy", search.healthy, "A run without the spike, to transplant from")
      ->needs(cause);
  WholeIn(bisect->add_option("--at", search.at,
                             "Update k before which is transplanted or reset; the first of --steps, "
                             "or the one before that which shows the spike, by default"),
          1)
      ->type_name("K")
      ->needs(cause);
  bisect
      ->add_option("--components", search.components,
                   "Of w, m, v, data, joined by commas; all by default, without --healthy all but w")
      ->needs(cause);
  AddSearchFlags(bisect, &search);
  for (const char* name : {"--steps", "--predicate", "--replicas", "--sigma", "--budget", "--jobs",
                           "--out", "--dry-run"}) {
    other->excludes(bisect->get_option(name));
  }
  AddOutputFlags(bisect, &search.output, true);
  bisect->footer(kExamples);
  bisect->callback([flags] { RunBisect(*flags); });
}

}  // namespace retrace
