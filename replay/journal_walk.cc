#include "replay/journal_walk.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/check.h"
#include "replay/block_part.h"
#include "replay/update.h"

namespace retrace {

JournalWalk::JournalWalk(const RunReader& run, const Layout& layout, Engine& engine, int64_t first,
                         int64_t last, int first_shard, int shard_count)
    : run_(run),
      layout_(layout),
      engine_(engine),
      last_(last),
      first_shard_(first_shard),
      shard_count_(shard_count),
      decoders_(engine.threads()) {
  current_.update = first;
  next_.update = first + 1;
}

bool JournalWalk::Step::IsReady() const {
  return journal && journal->ok() &&
         std::all_of(read.begin(), read.end(), [](const Status& status) { return status.ok(); });
}

// Its master. Its files are to be read next.
void JournalWalk::Open(Step* step) const {
  step->journal.reset();
  if (step->update <= last_) {
    step->journal = OpenJournal(run_, layout_, step->update, first_shard_, shard_count_);
  }
  const size_t files = step->journal && step->journal->ok() ? (*step->journal)->files.size() : 0;
  step->files.resize(files);
  step->read.assign(files, Status());
}

void JournalWalk::ReadFile(Step* step, size_t file) const {
  step->read[file] = step->files[file].Read(run_, layout_, **step->journal, file);
}

// What the first update needs, and the master of the second.
void JournalWalk::Start() {
  engine_.pool().Run(2, [&](int64_t i, int) { Open(i == 0 ? &current_ : &next_); });
  engine_.pool().Run(std::ssize(current_.files), [&](int64_t i, int) { ReadFile(&current_, i); });
  started_ = true;
}

// Applies the current update, or does not, and makes the next one the current one. -> false: a chunk
// can not be decoded.
bool JournalWalk::Advance(bool apply, State* state) {
  std::vector<std::pair<const EncodedSlabs*, const EncodedSlabs::Chunk*>> chunks;
  for (const EncodedSlabs& file : current_.files) {
    for (const EncodedSlabs::Chunk& chunk : file.chunks()) {
      if (apply) chunks.emplace_back(&file, &chunk);
    }
  }
  Step after;
  after.update = next_.update + 1;
  std::atomic<bool> good = true;
  const int64_t files = std::ssize(next_.files);
  engine_.pool().Run(1 + files + std::ssize(chunks), [&](int64_t i, int worker) {
    if (i == 0) return Open(&after);
    if (i <= files) return ReadFile(&next_, i - 1);
    const auto& [file, chunk] = chunks[i - 1 - files];
    ShardState* slab = &state->shards[chunk->shard - first_shard_];
    const auto apply_part = [&](int64_t first, const float* gradient, int64_t count) {
      ApplyBlockPart(engine_.isa(), (*current_.journal)->optimizer, layout_.pieces(chunk->shard),
                     first, count, gradient, slab);
    };
    if (!file->Decode(*chunk, &decoders_[worker], apply_part)) good = false;
  });
  if (apply) {
    state->counters = std::move((*current_.journal)->counters);
    state->memory = std::move((*current_.journal)->memory);
  }
  std::swap(after.files, current_.files);  // for their memory
  after.files.resize(after.read.size());
  current_ = std::exchange(next_, std::move(after));
  return good;
}

// The update at which the state stands, with the digests of all tensors.
Status JournalWalk::ReadSlowly(State* state) const {
  Journal journal;
  RT_RETURN_IF_ERROR(run_.ReadJournal(layout_, state->counters.position + 1, first_shard_,
                                      shard_count_, &journal));
  for (int i = 0; i < shard_count_; ++i) {
    ApplyBlock(engine_, layout_, journal.optimizer, layout_.pieces(first_shard_ + i),
               journal.gradients[i].data(), &state->shards[i]);
  }
  state->counters = std::move(journal.counters);
  state->memory = std::move(journal.memory);
  return {};
}

Status JournalWalk::Next(State* state) {
  if (!started_) Start();
  const int64_t update = current_.update;
  RT_CHECK(update <= last_ && update == state->counters.position + 1);
  RT_CHECK(state->first_shard == first_shard_ && std::ssize(state->shards) == shard_count_);
  const PositionEntry* entry = run_.history().Find(update);
  if (entry != nullptr && entry->HasPartial()) {
    RT_RETURN_IF_ERROR(run_.ReadPartial(layout_, update, state).status());
  }
  const bool ready = current_.IsReady();
  if (Advance(ready, state)) return ready ? Status() : ReadSlowly(state);
  // Bytes that are as written and no chunk: half of the update is applied.
  Journal journal;
  RT_RETURN_IF_ERROR(
      run_.ReadJournal(layout_, update, first_shard_, shard_count_, &journal));
  return DamagedError(run_.dir() + "@" + std::to_string(update) +
                      ": its journal could not be decoded, and could when it was read again");
}

}  // namespace retrace
