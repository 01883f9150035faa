// Job: all that one rank needs to live updates of a recipe: layout, topology, engine, batches, state.
// Used by train, replay and experiments. Every rank of the job makes the same calls in the same
// order. Not thread-safe.
#ifndef RETRACE_REPLAY_JOB_H_
#define RETRACE_REPLAY_JOB_H_

#include <memory>
#include <string>

#include "core/recipe.h"
#include "formats/run_dir.h"
#include "replay/exchange.h"
#include "replay/initial_state.h"
#include "replay/machine.h"
#include "replay/timeline.h"
#include "replay/torch_plugin.h"
#include "replay/update.h"

namespace retrace {

// How the work is carried; changes no bit.
struct JobOptions {
  int tp = 1, dp = 1;
  int threads = 1;  // of each rank
  Isa isa = BestIsa();
  std::string device = "cpu";      // or cuda, cuda:N: rank r has device N + r
  Device* given_device = nullptr;  // instead; outlives the job
};

// What a run of updates changes before and during them; the default changes nothing. Interventions
// implement it (surgery/).
class Script {
 public:
  virtual ~Script() = default;

  // Edits RUN@(k-1) just before update k; `edited` is set where anything changed.
  virtual Status EditState(int64_t update, class Job& job, bool* edited) {
    (void)update, (void)job, (void)edited;
    return {};
  }
  // The recipe in force during update k. Errors: kUsage.
  virtual Result<Recipe> RecipeFor(int64_t update, const Recipe& base) {
    (void)update;
    return base;
  }
  // What update k does besides; `directive` is that of `recipe`, in force then. Errors: kUsage.
  virtual Status EditDirective(int64_t update, const Recipe& recipe, UpdateDirective* directive) {
    (void)update, (void)recipe, (void)directive;
    return {};
  }
};

class Job {
 public:
  // Errors: kUsage (topology, dataset), kDamaged (dataset), kUnsupported (memory, device, level
  // native without its plug-in). Collective.
  static Result<std::unique_ptr<Job>> Make(const Recipe& recipe, Comm& comm,
                                           const JobOptions& options,
                                           std::shared_ptr<const BatchSource> batches = nullptr);

  // RUN@0 of the recipe.
  Status StartFresh();
  // RUN@k of a recording, proven by digest.
  Status Seek(const RunReader& run, int64_t position);

  // The script's edit of the present state, just before the next update, whose recipe is then in
  // force. -> whether it edited.
  Result<bool> Edit(Script* script);

  // The gradient of the next update at the present state, in updater().gradient(): for a script that
  // edits the state by it. Collective.
  Result<Clips> NextGradient();

  // One update, under the recipe that the script has in force; state and digest afterwards. The
  // record of a halted update is returned too; the state is then that before it.
  struct Step {
    UpdateResult result;
    Digest digest;  // of the state afterwards
  };
  Result<Step> Advance(Script* script = nullptr);

  const Recipe& recipe() const { return recipe_; }
  const Layout& layout() const { return layout_; }
  const ParameterMap& map() const { return map_; }
  const RankPlace& place() const { return place_; }
  RankContext context() { return {place_, engine_, comm_}; }
  Engine& engine() { return engine_; }
  Comm& comm() { return comm_; }
  const BatchSource& batches() const { return *batches_; }
  std::shared_ptr<const BatchSource> shared_batches() const { return batches_; }
  const JobOptions& options() const { return options_; }
  const Machine& machine() const { return machine_; }  // for manifests
  RankState& state() { return state_; }
  int64_t position() const { return state_.state.counters.position; }
  Updater& updater() { return *updater_; }
  Result<Digest> StateDigestNow() { return DigestAcrossRanks(context(), map_, state_); }
  bool is_rank0() const { return comm_.rank() == 0; }
  void set_probe(Probe* probe) { probe_ = probe; }

 private:
  Job(const Recipe& recipe, Layout layout, const RankPlace& place, Comm& comm,
      const JobOptions& options, std::shared_ptr<const BatchSource> batches,
      std::unique_ptr<Device> device, const NativeLevel& native);
  Status UseRecipe(const Recipe& recipe);
  Status FollowScript(Script* script);
  Result<UpdateDirective> NextDirective(Script* script) const;

  const Recipe recipe_;  // the run's
  const Layout layout_;
  const RankPlace place_;
  Comm& comm_;
  const JobOptions options_;
  const std::unique_ptr<Device> device_;  // null: the processor, or the one given
  const Machine machine_;
  Engine engine_;
  const ParameterMap map_;
  std::shared_ptr<const BatchSource> batches_;
  std::shared_ptr<const BatchSource> read_;  // by the updater: batches_, or another dataset
  RankState state_;
  Script* editing_ = nullptr;  // the script within Edit
  std::unique_ptr<Recipe> in_force_;  // of updater_
  std::unique_ptr<Updater> updater_;
  Probe* probe_ = nullptr;
};

}  // namespace retrace

#endif  // RETRACE_REPLAY_JOB_H_
