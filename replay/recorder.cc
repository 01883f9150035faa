#include "replay/recorder.h"

#include <fmt/format.h>

namespace retrace {

Result<std::unique_ptr<Recorder>> Recorder::Make(Job& job, RunWriter* writer,
                                                 const std::string& run_dir) {
  std::unique_ptr<Recorder> recorder(new Recorder(job, writer));
  int64_t attempt = writer ? writer->attempt() : 0;
  RT_RETURN_IF_ERROR(job.comm().Broadcast(job.comm().World(), &attempt, sizeof attempt));
  Status opened;
  if (recorder->WritesFiles()) {
    Result<std::unique_ptr<RankWriter>> rank_writer = RankWriter::Open(
        job.layout(), run_dir, attempt, job.place().tp_rank, job.engine().threads());
    if (rank_writer.ok()) recorder->rank_writer_ = std::move(rank_writer).value();
    opened = rank_writer.status();
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job.comm(), opened));
  return recorder;
}

void Recorder::Snapshot(int64_t position, Keep keep) {
  stalled_ = 0;
  if (!WritesFiles()) return;
  std::vector<SlabSource> sources;
  for (int i = 0; i < job_.map().shard_count(); ++i) {
    const int shard = job_.map().first_shard() + i;
    if (keep == Keep::kJournal) {
      sources.push_back(
          {{.shard = shard, .kind = SlabKind::kG, .pieces = {}}, job_.updater().gradient(i).data()});
      continue;
    }
    for (Component c : {Component::kParameter, Component::kM, Component::kV}) {
      sources.push_back({{.shard = shard, .kind = WholeKind(c), .pieces = {}},
                         job_.state().slab(i).slab(c).data()});
    }
  }
  stalled_ = rank_writer_->Snapshot(position, sources);
}

StepCommit Recorder::CommitOf(const Digest& digest, std::string record) const {
  const State& state = job_.state().state;
  StepCommit commit;
  commit.digest = digest;
  commit.counters = state.counters;
  commit.memory = state.memory;
  commit.record = std::move(record);
  return commit;
}

Status Recorder::RecordFirst(const Digest& digest, bool keep) {
  if (keep) Snapshot(job_.position(), Keep::kKeyframe);
  return Push({CommitOf(digest, "{}"), keep ? Keep::kKeyframe : Keep::kNothing});
}

Status Recorder::KeepPresent(const Digest& digest, const std::string& record_json) {
  Snapshot(job_.position(), Keep::kKeyframe);
  return Push({CommitOf(digest, record_json), Keep::kKeyframe});
}

Status Recorder::Record(const Job::Step& step, double update_seconds, Keep keep) {
  if (keep == Keep::kNothing) stalled_ = 0;
  else Snapshot(job_.position(), keep);
  UpdateRecord record = step.result.record;
  record.timing = {.update_seconds = update_seconds, .stall_seconds = stalled_};
  Pending pending{CommitOf(step.digest, RecordJson(record)), keep};
  if (keep == Keep::kJournal) pending.commit.optimizer = step.result.block;
  return Push(std::move(pending));
}

// Settles what came before; the newest too where it has no files to wait for.
Status Recorder::Push(Pending pending) {
  const bool files = pending.files();
  pending_.push_back(std::move(pending));
  while (pending_.size() > (files ? 1 : 0)) {
    Pending oldest = std::move(pending_.front());
    pending_.pop_front();
    RT_RETURN_IF_ERROR(Settle(std::move(oldest)));
  }
  return {};
}

Status Recorder::Settle(Pending pending) {
  Status status;
  std::string info_text;
  if (pending.files() && WritesFiles()) {
    Result<RankFileInfo> info = rank_writer_->Wait();
    status = info.status();
    if (info.ok()) info_text = RankFileInfoText(*info);
  }
  if (writer_ && undrained_ && status.ok()) {
    status = writer_->Drain();
    undrained_ = false;
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job_.comm(), status));
  if (pending.files()) {
    RT_ASSIGN_OR_RETURN(const std::vector<std::string> infos,
                        GatherTexts(job_.comm(), job_.comm().World(), info_text));
    for (const std::string& text : infos) {
      if (writer_ == nullptr || text.empty()) continue;
      RT_ASSIGN_OR_RETURN(RankFileInfo info, ParseRankFileInfo(text));
      pending.commit.files.push_back(std::move(info));
    }
  }
  undrained_ = undrained_ || pending.files();
  if (writer_ == nullptr) return {};
  const int64_t position = pending.commit.counters.position;
  std::optional<KeptStep> kept;
  if (pending.files()) {
    kept = {pending.keep == Keep::kKeyframe, pending.keep == Keep::kJournal, 0};
    for (const RankFileInfo& file : pending.commit.files) {
      kept->bytes += static_cast<int64_t>(file.size);
    }
  }
  writer_->CommitLater(std::move(pending.commit));
  if (retention_ == nullptr) return {};
  retention_->Reached(position, kept);
  for (const PositionRange& range : retention_->TakeSuperfluous()) {
    writer_->RetireLater(range.first, range.last);
  }
  return {};
}

Status Recorder::Finish() {
  while (!pending_.empty()) {
    Pending oldest = std::move(pending_.front());
    pending_.pop_front();
    RT_RETURN_IF_ERROR(Settle(std::move(oldest)));
  }
  return AgreeOnStatus(job_.comm(), writer_ ? writer_->Drain() : Status());
}

}  // namespace retrace
