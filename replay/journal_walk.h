// JournalWalk: a state led along journals, update after update, by AdamW alone. Used by timeline.h.
//
// Each worker decodes a part of a gradient into its innermost cache and applies it at once, so no
// gradient goes through memory; in the same parallel run others read and prove what comes next: the
// files of the update after this one, the master of the one after that. Nothing of an update is
// applied before the digests of all its files are proven. Where they are not, the update is read
// tensor by tensor, which names what is hit. Memory, besides the state: the files of two updates.
//
// Not thread-safe.
#ifndef RETRACE_REPLAY_JOURNAL_WALK_H_
#define RETRACE_REPLAY_JOURNAL_WALK_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "core/layout.h"
#include "core/state.h"
#include "formats/encoded_journal.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"

namespace retrace {

class JournalWalk {
 public:
  // Over updates first .. last of the run, for shards [first_shard, first_shard + shard_count).
  // Reads nothing yet. The other arguments outlive the walk.
  JournalWalk(const RunReader& run, const Layout& layout, Engine& engine, int64_t first,
              int64_t last, int first_shard, int shard_count);

  // RUN@(k-1) -> RUN@k; k is `first` in the first call and one more in each further. The caller
  // proves the state in which the walk ends: the bytes of the journals are proven, and not that they
  // lead there. Errors: as RunReader::ReadPartial and ReadJournal; neither *state nor the walk is to
  // be used then.
  Status Next(State* state);

 private:
  // An update on its way: first its master is read, then its files.
  struct Step {
    int64_t update = 0;
    std::optional<Result<EncodedJournal>> journal;
    std::vector<EncodedSlabs> files;  // of the journal; their memory is used again
    std::vector<Status> read;         // of each

    bool IsReady() const;
  };

  void Start();
  void Open(Step* step) const;
  void ReadFile(Step* step, size_t file) const;
  bool Advance(bool apply, State* state);
  Status ReadSlowly(State* state) const;

  const RunReader& run_;
  const Layout& layout_;
  Engine& engine_;
  const int64_t last_;
  const int first_shard_, shard_count_;
  bool started_ = false;
  Step current_, next_;
  std::vector<PlanesDecoder> decoders_;  // one a worker
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_JOURNAL_WALK_H_
