#include "replay/job.h"

#include <fmt/format.h>

#include "core/recipe_toml.h"
#include "replay/device_plugin.h"
#include "replay/host_memory.h"
#include "replay/recipe_plan.h"

namespace retrace {

Result<std::unique_ptr<Job>> Job::Make(const Recipe& recipe, Comm& comm, const JobOptions& options,
                                       std::shared_ptr<const BatchSource> batches) {
  RT_ASSIGN_OR_RETURN(Layout layout, Layout::Make(recipe.model, recipe.topology.virtual_shards));
  RT_ASSIGN_OR_RETURN(const RankPlace place,
                      RankPlace::Make(recipe.topology, options.tp, options.dp, comm.rank()));
  RT_CHECK_EQ(options.tp * options.dp, comm.size());
  Status opened;
  if (batches == nullptr) {
    Result<std::unique_ptr<BatchSource>> source = OpenBatchSource(recipe);
    if (source.ok()) batches = std::move(source).value();
    opened = source.status();
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(comm, opened));
  const ParameterMap map(layout, place.first_shard, place.shard_count);
  RT_RETURN_IF_ERROR(CheckHostMemory(comm, PlanRank(recipe, map, place).update_bytes()));
  Result<std::unique_ptr<Device>> device = OpenDevice(options.device, comm.rank());
  RT_RETURN_IF_ERROR(AgreeOnStatus(comm, device.status()));
  Result<NativeLevel> native = NativeLevel();
  if (recipe.numerics.level == NumericsLevel::kNative) {
    native = *device != nullptr || options.given_device != nullptr
                 ? UnsupportedError("numerics.level = native: expected --device cpu; on GPUs there "
                                    "is level portable alone")
                 : OpenNativeLevel(static_cast<int>(recipe.numerics.native_threads));
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(comm, native.status()));
  std::unique_ptr<Job> job(new Job(recipe, std::move(layout), place, comm, options,
                                   std::move(batches), std::move(device).value(), *native));
  RT_RETURN_IF_ERROR(job->UseRecipe(recipe));
  return job;
}

Job::Job(const Recipe& recipe, Layout layout, const RankPlace& place, Comm& comm,
         const JobOptions& options, std::shared_ptr<const BatchSource> batches,
         std::unique_ptr<Device> device, const NativeLevel& native)
    : recipe_(recipe),
      layout_(std::move(layout)),
      place_(place),
      comm_(comm),
      options_(options),
      device_(std::move(device)),
      machine_(ThisMachine(recipe.numerics, options.isa, native.libraries, options.device)),
      engine_(options.isa, options.threads, device_ ? device_.get() : options.given_device,
              native.kernels),
      map_(layout_, place.first_shard, place.shard_count),
      batches_(std::move(batches)) {}

// Collective. On an error what was in force stays.
Status Job::UseRecipe(const Recipe& recipe) {
  if (recipe.numerics.level != recipe_.numerics.level ||
      recipe.numerics.native_threads != recipe_.numerics.native_threads) {
    return UsageError("numerics.level and numerics.native_threads can not change within a run");
  }
  std::shared_ptr<const BatchSource> batches = batches_;
  Status opened;
  if (!SameDataset(recipe.data, recipe_.data)) {
    Result<std::unique_ptr<BatchSource>> training = OpenTrainingSource(recipe, batches_);
    opened = training.status();
    if (training.ok()) batches = std::move(training).value();
  }
  RT_RETURN_IF_ERROR(AgreeOnStatus(comm_, opened));
  updater_.reset();
  in_force_ = std::make_unique<Recipe>(recipe);
  updater_ = std::make_unique<Updater>(*in_force_, map_, context(), *batches);
  read_ = std::move(batches);
  return {};
}

Status Job::StartFresh() {
  state_ = InitialState(recipe_, map_, engine_);
  return {};
}

Status Job::Seek(const RunReader& run, int64_t position) {
  const Timeline timeline(run, layout_, engine_);
  Result<State> sought = timeline.Seek(position, place_.first_shard, place_.shard_count);
  RT_RETURN_IF_ERROR(AgreeOnStatus(comm_, sought.status()));
  state_ = MakeRankState(map_);
  state_.state = std::move(sought).value();
  RT_RETURN_IF_ERROR(ShareReplicas(context(), map_, &state_));
  RT_ASSIGN_OR_RETURN(const Digest digest, StateDigestNow());
  const Digest expected = run.history().Find(position)->digest;
  if (digest == expected) return {};
  return DamagedError(fmt::format("{}@{}: rebuilt with digest {}, the ledger says {}", run.dir(),
                                  position, digest.Hex(), expected.Hex()));
}

Result<bool> Job::Edit(Script* script) {
  bool edited = false;
  if (script == nullptr) return edited;
  RT_RETURN_IF_ERROR(FollowScript(script));
  editing_ = script;
  const Status status = script->EditState(position() + 1, *this, &edited);
  editing_ = nullptr;
  RT_RETURN_IF_ERROR(status);
  if (edited) RT_RETURN_IF_ERROR(ShareReplicas(context(), map_, &state_));
  return edited;
}

// The recipe of the next update.
Status Job::FollowScript(Script* script) {
  if (script == nullptr) return {};
  RT_ASSIGN_OR_RETURN(const Recipe wanted, script->RecipeFor(position() + 1, recipe_));
  if (PrintRecipe(wanted) != PrintRecipe(*in_force_)) return UseRecipe(wanted);
  return {};
}

Result<UpdateDirective> Job::NextDirective(Script* script) const {
  UpdateDirective directive = UpdateDirective::Default(*in_force_, state_.state.counters);
  if (script != nullptr) {
    RT_RETURN_IF_ERROR(script->EditDirective(position() + 1, *in_force_, &directive));
  }
  return directive;
}

Result<Clips> Job::NextGradient() {
  // An edit before this one may have changed what others hold replicas of.
  RT_RETURN_IF_ERROR(ShareReplicas(context(), map_, &state_));
  RT_ASSIGN_OR_RETURN(const UpdateDirective directive, NextDirective(editing_));
  updater_->pass().set_probe(nullptr);  // it sees updates alone
  return updater_->Gradient(state_, directive);
}

Result<Job::Step> Job::Advance(Script* script) {
  RT_RETURN_IF_ERROR(FollowScript(script));
  RT_ASSIGN_OR_RETURN(const UpdateDirective directive, NextDirective(script));
  Step step;
  updater_->pass().set_probe(probe_);
  RT_ASSIGN_OR_RETURN(step.result, updater_->Run(&state_, directive));
  RT_ASSIGN_OR_RETURN(step.digest, StateDigestNow());
  return step;
}

}  // namespace retrace
