#include "surgery/dry_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "core/scalar_math.h"
#include "surgery/remake.h"

namespace retrace {
namespace {

constexpr int64_t kUpdatesShown = 4;

// Per tensor and component: squares before and after, elements that differ. Summed over ranks.
class Comparison {
 public:
  explicit Comparison(Job& job) : job_(job), before_(job.state()) {}

  Result<std::vector<TensorChange>> Changes() const {
    const std::vector<TensorSpec>& tensors = job_.layout().tensors();
    std::vector<double> mine(tensors.size() * kNumComponents * 3, 0.0);
    for (int i = 0; i < job_.map().shard_count(); ++i) {
      for (const Piece& piece : job_.layout().pieces(job_.map().first_shard() + i)) {
        for (int c = 0; c < kNumComponents; ++c) {
          Add(before_.slab(i).slabs[c].data() + piece.offset,
              job_.state().slab(i).slabs[c].data() + piece.offset, piece.numel(),
              &mine[(piece.tensor * kNumComponents + c) * 3]);
        }
      }
    }
    std::vector<double> all(mine.size() * job_.place().tp);
    RT_RETURN_IF_ERROR(job_.comm().AllGather(job_.place().tp_group(), mine.data(), all.data(),
                                             mine.size() * sizeof(double)));
    for (size_t i = mine.size(); i < all.size(); ++i) {
      if (i == mine.size()) std::copy_n(all.begin(), mine.size(), mine.begin());
      mine[i % mine.size()] += all[i];
    }
    std::vector<TensorChange> changes;
    for (size_t i = 0; i < mine.size(); i += 3) {
      if (mine[i + 2] == 0) continue;
      changes.push_back({tensors[i / 3 / kNumComponents].name,
                         static_cast<Component>(i / 3 % kNumComponents), math::Sqrt(mine[i]),
                         math::Sqrt(mine[i + 1]), static_cast<int64_t>(mine[i + 2])});
    }
    return changes;
  }

  std::vector<CounterChange> CounterChanges() const {
    const State &was = before_.state, &is = job_.state().state;
    std::vector<CounterChange> changes;
    const auto compare = [&](const CounterChange& change) {
      if (change.before != change.after) changes.push_back(change);
    };
    compare({"schedule", {}, was.counters.schedule_index, is.counters.schedule_index});
    compare({"cursor", {}, was.counters.data_cursor, is.counters.data_cursor});
    for (size_t t = 0; t < is.counters.adam_t.size(); ++t) {
      compare(
          {"t", job_.layout().tensors()[t].name, was.counters.adam_t[t], is.counters.adam_t[t]});
    }
    return changes;
  }

  std::vector<std::string> MemoryChanges() const {
    const RuleMemory &was = before_.state.memory, &is = job_.state().state.memory;
    std::set<std::string> names;
    for (const RuleMemory* memory : {&was, &is}) {
      for (const auto& [name, values] : *memory) names.insert(name);
    }
    std::erase_if(names, [&](const std::string& name) {
      return was.contains(name) && is.contains(name) && was.at(name) == is.at(name);
    });
    return {names.begin(), names.end()};
  }

 private:
  static void Add(const float* before, const float* after, int64_t n, double* sums) {
    for (int64_t i = 0; i < n; ++i) {
      sums[0] += static_cast<double>(before[i]) * static_cast<double>(before[i]);
      sums[1] += static_cast<double>(after[i]) * static_cast<double>(after[i]);
      sums[2] += std::memcmp(&before[i], &after[i], sizeof(float)) != 0 ? 1 : 0;
    }
  }

  Job& job_;
  const RankState before_;
};

// One state intervention, tried on the job's present state, which keeps it.
class Single : public Script {
 public:
  explicit Single(const Intervention& intervention, InterventionScript* all)
      : intervention_(intervention), all_(all) {}
  Status EditState(int64_t, Job& job, bool* edited) override {
    *edited = true;
    return intervention_.kind->edit_state(intervention_.arguments, job)
        .Within("'" + intervention_.Text() + "'");
  }
  Result<Recipe> RecipeFor(int64_t update, const Recipe& base) override {
    return all_->RecipeFor(update, base);
  }
  Status EditDirective(int64_t update, const Recipe& recipe, UpdateDirective* directive) override {
    return all_->EditDirective(update, recipe, directive);
  }

 private:
  const Intervention& intervention_;
  InterventionScript* all_;
};

Status TryOnState(Job& job, InterventionScript* all, PlannedIntervention* planned) {
  const Comparison comparison(job);
  Single script(planned->intervention, all);
  RT_RETURN_IF_ERROR(job.Edit(&script).status());
  RT_ASSIGN_OR_RETURN(planned->tensors, comparison.Changes());
  planned->counters = comparison.CounterChanges();
  planned->memories = comparison.MemoryChanges();
  return {};
}

// What the interventions before this one leave in force at its first update, and with it.
Status TryOnRecipe(const Recipe& base, const std::vector<Intervention>& before,
                   PlannedIntervention* planned) {
  const Intervention& intervention = planned->intervention;
  RT_ASSIGN_OR_RETURN(InterventionScript script,
                      InterventionScript::Make(before, *intervention.first, *intervention.last));
  RT_ASSIGN_OR_RETURN(const Recipe without, script.RecipeFor(*intervention.first, base));
  Recipe with = without;
  RT_RETURN_IF_ERROR(intervention.kind->edit_recipe(intervention.arguments, &with)
                         .Within("'" + intervention.Text() + "'"));
  planned->recipe = DiffRecipes(without, with);
  return {};
}

// What the interventions on updates make of each, one after another, from the data cursor that the
// branch will have.
Status TryOnUpdates(InterventionScript* script, const Recipe& base, int64_t cursor,
                    std::vector<PlannedIntervention>* planned) {
  const std::vector<Intervention>& all = script->interventions();
  return script->ForecastUpdates(
      base, cursor,
      [&](const Intervention& intervention, int64_t update, const UpdateDirective& before,
          const UpdateDirective& after) {
        PlannedIntervention& one = (*planned)[&intervention - all.data()];
        const bool changes = before.samples != after.samples || before.cursor != after.cursor ||
                             before.skip != after.skip;
        if (!changes) return;
        ++one.updates_changed;
        if (std::ssize(one.updates) == kUpdatesShown) return;
        one.updates.push_back({.update = update,
                               .before = before.samples,
                               .after = after.samples,
                               .cursor_before = before.cursor,
                               .cursor_after = after.cursor,
                               .skipped = after.skip,
                               .t_moves = after.t_moves,
                               .schedule_moves = after.schedule_moves});
      });
}

void NameTensors(const Layout& layout, PlannedIntervention* planned) {
  const auto only = planned->intervention.arguments.find("only");
  if (only == planned->intervention.arguments.end() || only->second == "recipe") return;
  for (const TensorSpec& spec : layout.tensors()) {
    if (GlobMatches(only->second, spec.name)) planned->names.push_back(spec.name);
  }
}

// Recipes, in the order in which they are given.
Status TryOnRecipes(const Recipe& parent, const Recipe& base, const Layout& layout,
                    std::vector<PlannedIntervention>* planned) {
  Recipe remade = parent;
  std::vector<Intervention> before;
  for (PlannedIntervention& one : *planned) {
    const Intervention& intervention = one.intervention;
    NameTensors(layout, &one);
    if (intervention.kind->remake && !intervention.inherited) {
      const Recipe without = remade;
      RT_RETURN_IF_ERROR(intervention.kind->remake(intervention.arguments, &remade));
      one.recipe = DiffRecipes(without, remade);
    }
    if (intervention.kind->edit_recipe) RT_RETURN_IF_ERROR(TryOnRecipe(base, before, &one));
    before.push_back(intervention);
    before.back().inherited = true;  // only asked for what is in force
  }
  return {};
}

// A job of the branch at the parent's state before `update`: `job` itself, or one that `remade`
// gets.
Result<Job*> BranchBefore(const RunReader& run, Job& job, const BranchPlan& plan, int64_t update,
                          const std::optional<Recipe>& recipe, std::unique_ptr<Job>* remade) {
  RT_RETURN_IF_ERROR(GoBefore(run, job, update));
  if (!recipe) return &job;
  RT_ASSIGN_OR_RETURN(*remade, RemadeJob(job, *recipe));
  for (const Intervention& one : plan.interventions) {
    if (one.kind->remake == nullptr || update == plan.first) continue;
    RT_RETURN_IF_ERROR(one.kind->edit_state(one.arguments, **remade));
  }
  return remade->get();
}

}  // namespace

Result<std::vector<PlannedIntervention>> PlanBranch(const RunReader& run, Job& job,
                                                    const BranchPlan& plan) {
  RT_ASSIGN_OR_RETURN(InterventionScript script,
                      BranchScript(run, job, plan.first, plan.last, plan.interventions));
  RT_ASSIGN_OR_RETURN(const std::optional<Recipe> recipe,
                      RemadeRecipe(job, plan.interventions, plan.first));
  const Recipe& base = recipe ? *recipe : job.recipe();
  RT_ASSIGN_OR_RETURN(const Layout layout, Layout::Make(base.model, base.topology.virtual_shards));
  std::vector<PlannedIntervention> planned;
  for (const Intervention& intervention : script.interventions()) {
    planned.push_back({.intervention = intervention});
  }
  RT_RETURN_IF_ERROR(TryOnRecipes(job.recipe(), base, layout, &planned));
  const int64_t cursor = run.history().Find(plan.first - 1)->counters.data_cursor;
  RT_RETURN_IF_ERROR(TryOnUpdates(&script, base, cursor, &planned));
  // States in the order of their dates; what is dated together acts on what came before.
  std::stable_sort(planned.begin(), planned.end(), [](const auto& a, const auto& b) {
    return *a.intervention.first < *b.intervention.first;
  });
  const int64_t end = run.history().last_position();
  std::unique_ptr<Job> remade;
  Job* branch = nullptr;
  int64_t at = -1;
  for (PlannedIntervention& one : planned) {
    if (!one.intervention.kind->edit_state) continue;
    const int64_t update = *one.intervention.first;
    if (update - 1 > end) {
      one.known = false;
      one.state = fmt::format("the branch has to run first, the parent ends at {}", end);
      continue;
    }
    if (update != at) {
      RT_ASSIGN_OR_RETURN(branch, BranchBefore(run, job, plan, update, recipe, &remade));
      at = update;
    }
    one.state =
        fmt::format("{}@{}{}", run.dir(), update - 1,
                    update > plan.first ? ", the parent's, for the branch has none yet" : "");
    RT_RETURN_IF_ERROR(TryOnState(*branch, &script, &one));
  }
  return planned;
}

}  // namespace retrace
