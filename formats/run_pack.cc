#include "formats/run_pack.h"

#include "formats/step_file.h"

namespace retrace {

Result<PackedStep> PackStep(const RunReader& run, const Layout& layout, int64_t position, int level,
                            int threads, RunWriter* writer, FileOps ops) {
  constexpr int kRank = 0;
  RT_ASSIGN_OR_RETURN(const StepContents step, run.ReadStep(layout, position));
  const int64_t attempt = writer != nullptr ? writer->attempt() : step.index.attempt;
  RT_ASSIGN_OR_RETURN(const RankFile file, BuildRankFile(layout, position, attempt, kRank,
                                                         step.views(), threads, level));
  PackedStep packed;
  packed.after_bytes = static_cast<int64_t>(file.info.size);
  for (const RankFileInfo& info : step.index.files) {
    packed.before_bytes += static_cast<int64_t>(info.size);
  }
  packed.smaller = packed.after_bytes <= packed.before_bytes - packed.before_bytes / 100;
  if (!packed.smaller || writer == nullptr) return packed;
  RT_RETURN_IF_ERROR(
      PublishFile(ops, run.dir() + "/" + kStepsName, file.info.name, file.bytes.view()));
  const PositionEntry& entry = *run.history().Find(position);
  StepCommit commit;
  commit.digest = entry.digest;
  commit.counters = entry.counters;
  commit.memory = step.index.memory;
  commit.record = entry.record;
  commit.files = {file.info};
  commit.optimizer = step.index.optimizer;
  RT_RETURN_IF_ERROR(writer->CommitStep(commit));
  return packed;
}

}  // namespace retrace
