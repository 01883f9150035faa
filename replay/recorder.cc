#include "replay/recorder.h"

#include <fmt/format.h>

namespace retrace {

Keep KeepOf(const StoreRecipe& store, int64_t position, int64_t first) {
  if (position == first) return Keep::kKeyframe;
  if (store.every > 0 && position % store.every == 0) return Keep::kKeyframe;
  if (position < store.window_first || position > store.window_last) return Keep::kNothing;
  const int64_t begin = std::max(store.window_first, first);
  return (position - begin) % store.keyframe_every == 0 ? Keep::kKeyframe : Keep::kJournal;
}

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
  return Push({CommitOf(digest, "{}"), keep});
}

Status Recorder::KeepPresent(const Digest& digest, const std::string& record_json) {
  Snapshot(job_.position(), Keep::kKeyframe);
  return Push({CommitOf(digest, record_json), true});
}

Status Recorder::Record(const Job::Step& step, double update_seconds, Keep keep) {
  if (keep == Keep::kNothing) stalled_ = 0;
  else Snapshot(job_.position(), keep);
  UpdateRecord record = step.result.record;
  record.timing = {.update_seconds = update_seconds, .stall_seconds = stalled_};
  Pending pending{CommitOf(step.digest, RecordJson(record)), keep != Keep::kNothing};
  if (keep == Keep::kJournal) pending.commit.optimizer = step.result.block;
  return Push(std::move(pending));
}

// Settles what came before; the newest too where it has no files to wait for.
Status Recorder::Push(Pending pending) {
  const bool files = pending.files;
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
  if (pending.files && WritesFiles()) {
    Result<RankFileInfo> info = rank_writer_->Wait();
    status = info.status();
    if (info.ok()) info_text = RankFileInfoText(*info);
  }
  if (writer_ && undrained_ && status.ok()) {
    status = writer_->Drain();
    undrained_ = false;
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(job_.comm(), status));
  if (pending.files) {
    RT_ASSIGN_OR_RETURN(const std::vector<std::string> infos,
                        GatherTexts(job_.comm(), job_.comm().World(), info_text));
    for (const std::string& text : infos) {
      if (writer_ == nullptr || text.empty()) continue;
      RT_ASSIGN_OR_RETURN(RankFileInfo info, ParseRankFileInfo(text));
      pending.commit.files.push_back(std::move(info));
    }
  }
  if (writer_) writer_->CommitLater(std::move(pending.commit));
  undrained_ = undrained_ || pending.files;
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
