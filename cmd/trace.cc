#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/job_flags.h"
#include "cmd/opened_run.h"
#include "cmd/text_table.h"
#include "core/glob.h"
#include "core/recipe_toml.h"
#include "surgery/intervention.h"
#include "surgery/traced_update.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace trace runs/demo@11 --out a.jsonl                      # update 12, every op's digest
  retrace trace runs/demo@11 --out a.safetensors --tensors      # and every op's elements
  retrace trace runs/demo@11 --out q.safetensors --tensors --only '*/layer3/q_*'
  retrace diff a.jsonl b.jsonl                                  # the first op that differs
RUN@k is the state after k updates. Traced is the update that starts there, update k+1, whose loss the
ledger has as that of update k+1; it is lived again and compared with the ledger where the run has it.
Ops, in order of execution: state/NAME#p|m|v before it (elements only where --only matches);
micro-batch by micro-batch mbI/ids, mbI/labels, mbI/embedding, mbI/layerL/OP, mbI/final_norm, mbI/logits, mbI/loss, the gradients of these
outputs with '.grad', mbI/NAME.grad of the parameters; then optimizer/NAME#g (the gradient before
clipping), optimizer/norms, optimizer/rows (a row a tensor: action, t, lr, beta1, 1-beta1, beta2,
1-beta2, bias corrections, eps, decay, clip, update clip), optimizer/NAME#p|m|v after the update.
'/shardN' behind a name: of virtual shard N. The list does not depend on --tp, --dp and --threads.
Exit code 1: the update is not the recorded one; the file is written all the same.)";

struct TraceFlags {
  std::string state, out, only;
  bool tensors = false, evaluation = false;
  JobFlags job;
  OutputFlags output;
};

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Before anything is computed.
void CheckFlags(const TraceFlags& flags) {
  std::error_code error;
  if (std::filesystem::is_directory(flags.out, error)) {
    Fail(UsageError("--out " + flags.out + ": is a directory; expected a file's name"));
  }
  const bool there = std::filesystem::exists(std::filesystem::symlink_status(flags.out, error));
  if (there && !TraceFile::IsOne(flags.out)) {
    Fail(UsageError("--out " + flags.out + ": is there, and is no trace; it is left as it is"));
  }
  if (flags.out == "-") Fail(UsageError("--out -: expected a file's name"));
  if (!std::filesystem::is_directory(FolderOf(flags.out), error)) {
    Fail(UsageError("--out " + flags.out + ": there is no directory " + FolderOf(flags.out)));
  }
}

TensorSource SourceOfOp(UpdateTracer& tracer, const UpdateTracer::TracedOp& op) {
  return {op.name,
          op.type,
          {op.rows, op.cols},
          [&tracer, &op](const TensorSource::Sink& sink) -> Status {
            RT_ASSIGN_OR_RETURN(const std::string bytes, tracer.Elements(op));
            return sink(bytes.data(), bytes.size());
          }};
}

// Rank 0 writes; the others hand over what they have, in the same order.
Status WriteTrace(const TraceFlags& flags, const TraceHeader& header, UpdateTracer& tracer,
                  bool writes) {
  std::vector<TensorSource> sources;
  for (const UpdateTracer::TracedOp& op : tracer.ops()) {
    if (op.kept) sources.push_back(SourceOfOp(tracer, op));
  }
  if (flags.tensors && sources.empty()) {
    return UsageError("--only " + flags.only + ": matches none of the update's ops");
  }
  if (!writes) {
    for (const TensorSource& source : sources) {
      RT_RETURN_IF_ERROR(source.elements([](const void*, size_t) { return Status(); }));
    }
    return {};
  }
  const std::vector<TraceOp> ops(tracer.ops().begin(), tracer.ops().end());
  if (flags.tensors) return WriteTraceTensors(flags.out, header, ops, std::move(sources));
  return WriteTraceDigests(flags.out, header, ops);
}

struct Written {
  TracedUpdate traced;
  int64_t ops = 0, tensors = 0;
};

Written LiveAndWrite(const TraceFlags& flags, const StateAddress& address, const RunReader& run,
                     const ResolvedJob& job) {
  const Recipe recipe = OrFail(ParseRecipe(run.recipe_text(), run.dir() + "/recipe.toml"));
  Written written;
  OrFail(RunJob(job, [](const std::string& line) { SayError("retrace: " + line); },
                [&](Comm& comm) -> Status {
                  RT_ASSIGN_OR_RETURN(const std::unique_ptr<Job> rank,
                                      Job::Make(recipe, comm, job.options));
                  TraceOptions options{.evaluation = flags.evaluation,
                                       .spill_dir = FolderOf(flags.out)};
                  if (flags.tensors) {
                    options.tensors = [&](std::string_view name) {
                      return flags.only.empty() ? !name.starts_with("state/")
                                                : GlobMatches(flags.only, name);
                    };
                  }
                  UpdateTracer tracer(*rank, options);
                  RT_ASSIGN_OR_RETURN(
                      written.traced,
                      TraceRecorded(run, *rank, *address.position + 1, tracer));
                  for (const UpdateTracer::TracedOp& op : tracer.ops()) {
                    ++written.ops;
                    written.tensors += op.kept;
                  }
                  return WriteTrace(flags, HeaderOf(written.traced, address.run), tracer,
                                    comm.rank() == 0);
                }));
  return written;
}

void RunTrace(TraceFlags flags) {
  const StateAddress address = OrFail(ParseStateAddress(flags.state));
  if (!address.position || !address.glob.empty() || !address.component.empty()) {
    Fail(UsageError("'" + flags.state + "': expected RUN@k, the state that the update starts at"));
  }
  CheckFlags(flags);
  const std::unique_ptr<OpenedRun> opened = OrFail(OpenedRun::Open(address.run));
  OrFail(opened->CheckPosition(*address.position));
  const ResolvedJob job = OrFail(ResolveJob(flags.job));
  const Written written = LiveAndWrite(flags, address, opened->reader(), job);
  const TraceHeader header = HeaderOf(written.traced, address.run);
  const bool differs = header.recorded == "differs";
  if (job.speaks()) {
    std::error_code ignored;
    const auto bytes = static_cast<double>(std::filesystem::file_size(flags.out, ignored));
    if (flags.output.json) {
      const nlohmann::ordered_json json = {{"state", flags.state},
                                           {"update", header.update},
                                           {"out", flags.out},
                                           {"ops", written.ops},
                                           {"tensors", written.tensors},
                                           {"bytes", bytes},
                                           {"recorded", header.recorded},
                                           {"loss", written.traced.step.result.record.loss}};
      PrintReport(json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    } else if (!flags.output.quiet) {
      PrintReport(fmt::format(
          "{}: update {}, which starts at {}: {} ops{} ({}); {}\n", flags.out, header.update,
          flags.state, written.ops,
          flags.tensors ? fmt::format(", {} with elements", written.tensors) : "", ByteText(bytes),
          !written.traced.recorded
              ? "the run ends here, so it was compared with nothing"
              : differs ? Tinted(flags.output, Tint::kRed, "differs") + " from its recording"
                        : Tinted(flags.output, Tint::kGreen, "identical") + " to its recording"));
    }
  }
  if (differs) Exit(1);
}

}  // namespace

void AddTraceCommand(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("trace", "Write what an update computes, op by op: digests or tensors");
  auto flags = std::make_shared<TraceFlags>();
  command->add_option("state", flags->state, "RUN@k: the update that starts there, k+1")
      ->required();
  command->add_option("-o,--out", flags->out, "The file")->required();
  CLI::Option* tensors = command->add_flag("--tensors", flags->tensors,
                                           "The ops' elements too: a safetensors file");
  command->add_option("--only", flags->only, "Elements of the ops whose names match this glob alone")
      ->needs(tensors);
  command->add_flag("--evaluation", flags->evaluation, "The evaluation batch's passes too");
  AddJobFlags(command, &flags->job);
  AddOutputFlags(command, &flags->output, true);
  command->footer(kExamples);
  command->callback([flags] { RunTrace(*flags); });
}

}  // namespace retrace
