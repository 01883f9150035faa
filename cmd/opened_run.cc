#include "cmd/opened_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "core/nearest_name.h"
#include "core/recipe_toml.h"
#include "kernels/thread_pool.h"
#include "surgery/intervention.h"

namespace retrace {

Result<std::unique_ptr<OpenedRun>> OpenedRun::Open(const std::string& dir) {
  RT_ASSIGN_OR_RETURN(RunReader reader, RunReader::Open(dir, std::max(1, AvailableCpus())));
  RT_ASSIGN_OR_RETURN(Recipe recipe, ParseRecipe(reader.recipe_text(), dir + "/" + kRecipeName));
  RT_ASSIGN_OR_RETURN(Layout layout, Layout::Make(recipe.model, recipe.topology.virtual_shards));
  return std::unique_ptr<OpenedRun>(
      new OpenedRun(std::move(reader), std::move(recipe), std::move(layout)));
}

Engine& OpenedRun::engine() {
  if (!engine_) engine_ = std::make_unique<Engine>(BestIsa(), std::max(1, AvailableCpus()));
  return *engine_;
}

Status OpenedRun::CheckPosition(int64_t position) const {
  if (history().Find(position) != nullptr) return {};
  if (history().positions.empty()) {
    return UsageError(fmt::format("{}@{}: the run has no state yet", dir(), position));
  }
  return UsageError(fmt::format("{}@{}: the run has positions {}..{}", dir(), position,
                                history().first_position(), history().last_position()));
}

Result<Journal> OpenedRun::ReadJournal(int64_t position) const {
  RT_RETURN_IF_ERROR(CheckPosition(position));
  if (!history().Find(position)->HasJournal()) {
    std::vector<int64_t> with;
    for (const PositionEntry& entry : history().positions) {
      if (entry.HasJournal()) with.push_back(entry.counters.position);
    }
    return UsageError(
        fmt::format("{}@{}#g: no gradient of this update is kept; kept are those of "
                    "{}",
                    dir(), position, RangesText(with)));
  }
  Journal journal;
  RT_RETURN_IF_ERROR(reader_.ReadJournal(layout_, position, 0, layout_.shards(), &journal));
  return journal;
}

std::vector<std::string> OpenedRun::Interventions() const {
  std::vector<std::string> texts;
  if (!history().header.lineage) return texts;
  std::istringstream lines(history().header.lineage->interventions);
  for (std::string line; std::getline(lines, line);) texts.push_back(line);
  return texts;
}

std::string OpenedRun::LineageText() const {
  const std::optional<Lineage>& lineage = history().header.lineage;
  if (!lineage) return "";
  return fmt::format(
      "branch of {}@{}{}", lineage->parent, lineage->position,
      Interventions().empty() ? "" : fmt::format(" with {}", fmt::join(Interventions(), ", ")));
}

Status CheckGlob(const std::vector<std::string>& names, const std::string& glob,
                 const std::string& where) {
  if (glob.empty() || std::any_of(names.begin(), names.end(), [&](const std::string& name) {
        return GlobMatches(glob, name);
      })) {
    return {};
  }
  if (names.empty()) return UsageError(where + ": it has no tensors");
  return UsageError(fmt::format("{}: no tensor matches '{}'; the nearest is '{}'", where, glob,
                                NearestName(glob, names)));
}

Result<Selection> SelectionOf(const Layout& layout, const std::string& glob,
                              const std::string& component) {
  std::vector<std::string> names;
  for (const TensorSpec& spec : layout.tensors()) names.push_back(spec.name);
  RT_RETURN_IF_ERROR(CheckGlob(names, glob, "tensors"));
  Selection selection;
  selection.tensor = [glob](std::string_view name) { return GlobMatches(glob, name); };
  for (int c = 0; c < kNumComponents; ++c) {
    selection.components[c] =
        component.empty() || component == ComponentName(static_cast<Component>(c));
  }
  return selection;
}

std::string RangesText(const std::vector<int64_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t j = i;
    while (j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1) ++j;
    if (!text.empty()) text += ", ";
    text += i == j ? fmt::format("{}", numbers[i]) : fmt::format("{}..{}", numbers[i], numbers[j]);
    i = j + 1;
  }
  return text.empty() ? "none" : text;
}

}  // namespace retrace
