#include "surgery/remake.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/recipe_check.h"
#include "surgery/donor.h"

namespace retrace {
namespace {

// One component of all shards of a layout, in every rank.
Result<std::vector<std::vector<float>>> GatherSlabs(Job& job, Component component) {
  const Layout& layout = job.layout();
  const int ranks = job.place().tp, shards = job.map().shard_count();
  int64_t most = 0;
  for (int r = 0; r < ranks; ++r) {
    int64_t numel = 0;
    for (int s = r * shards; s < (r + 1) * shards; ++s) numel += layout.slab_numel(s);
    most = std::max(most, numel);
  }
  std::vector<float> mine(most), all(most * ranks);
  float* at = mine.data();
  for (int i = 0; i < shards; ++i) {
    const std::vector<float>& slab = job.state().slab(i).slab(component);
    at = std::copy(slab.begin(), slab.end(), at);
  }
  RT_RETURN_IF_ERROR(job.comm().AllGather(job.place().tp_group(), mine.data(), all.data(),
                                          mine.size() * sizeof(float)));
  std::vector<std::vector<float>> slabs;
  for (int r = 0; r < ranks; ++r) {
    const float* from = all.data() + r * most;
    for (int s = r * shards; s < (r + 1) * shards; ++s) {
      slabs.emplace_back(from, from + layout.slab_numel(s));
      from += layout.slab_numel(s);
    }
  }
  return slabs;
}

}  // namespace

Result<std::optional<Recipe>> RemadeRecipe(const Job& job,
                                           const std::vector<Intervention>& interventions,
                                           int64_t first) {
  Recipe recipe = job.recipe();
  bool any = false;
  for (const Intervention& intervention : interventions) {
    if (intervention.kind->remake == nullptr) continue;
    if (intervention.first.value_or(first) != first) {
      return UsageError(
          fmt::format("'{}': expected the branch's first update, {}: it makes another "
                      "run of it",
                      intervention.Text(), first));
    }
    RT_RETURN_IF_ERROR(intervention.kind->remake(intervention.arguments, &recipe)
                           .Within("'" + intervention.Text() + "'"));
    any = true;
  }
  if (!any) return std::optional<Recipe>();
  RT_RETURN_IF_ERROR(CheckRecipe(recipe).Within("the interventions"));
  const RankPlace& place = job.place();
  RT_RETURN_IF_ERROR(RankPlace::Make(recipe.topology, place.tp, place.dp, /*rank=*/0)
                         .status()
                         .Within("the interventions"));
  return std::optional<Recipe>(recipe);
}

Result<std::unique_ptr<Job>> RemadeJob(Job& job, const Recipe& recipe) {
  RT_ASSIGN_OR_RETURN(std::unique_ptr<Job> to,
                      Job::Make(recipe, job.comm(), job.options(), job.shared_batches()));
  to->state() = MakeRankState(to->map());
  Donor donor{job.layout(), {}};
  donor.state.shards.resize(donor.layout.shards());
  for (const Component component : {Component::kParameter, Component::kM, Component::kV}) {
    RT_ASSIGN_OR_RETURN(std::vector<std::vector<float>> slabs, GatherSlabs(job, component));
    for (size_t s = 0; s < slabs.size(); ++s) {
      donor.state.shards[s].slab(component) = std::move(slabs[s]);
    }
    ForEachCommonRun(donor, "*", component, *to, [](float* mine, const float* others, int64_t n) {
      std::copy_n(others, n, mine);
    });
    for (ShardState& shard : donor.state.shards) shard.slab(component) = {};
  }
  State& state = to->state().state;
  const State& source = job.state().state;
  const std::vector<int64_t> fresh = state.counters.adam_t;
  state.memory = source.memory;
  state.counters = source.counters;
  state.counters.adam_t = fresh;
  for (size_t t = 0; t < fresh.size(); ++t) {
    const int found = job.layout().Find(to->layout().tensors()[t].name);
    if (found >= 0) state.counters.adam_t[t] = source.counters.adam_t[found];
  }
  RT_RETURN_IF_ERROR(ShareReplicas(to->context(), to->map(), &to->state()));
  return to;
}

}  // namespace retrace
