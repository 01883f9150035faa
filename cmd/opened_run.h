// OpenedRun: a run that a command reads: its ledger, recipe and layout, and an engine where states
// are rebuilt. Used by log, diff and show. Not thread-safe.
#ifndef RETRACE_CMD_OPENED_RUN_H_
#define RETRACE_CMD_OPENED_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/layout.h"
#include "core/recipe.h"
#include "formats/run_dir.h"
#include "kernels/engine.h"
#include "replay/state_diff.h"
#include "replay/timeline.h"

namespace retrace {

class OpenedRun {
 public:
  // Errors: kUsage where `dir` holds no run, else kDamaged, kUnsupported.
  static Result<std::unique_ptr<OpenedRun>> Open(const std::string& dir);

  const std::string& dir() const { return reader_.dir(); }
  const RunReader& reader() const { return reader_; }
  const RunHistory& history() const { return reader_.history(); }
  const Recipe& recipe() const { return recipe_; }
  const Layout& layout() const { return layout_; }
  Engine& engine();  // made when it is first asked for: it starts threads
  Timeline timeline() { return Timeline(reader_, layout_, engine()); }

  // Errors: kUsage where the run has no such position; names those it has.
  Status CheckPosition(int64_t position) const;

  // The journal of update k with the gradients of all shards. Errors: kUsage where none is kept.
  Result<Journal> ReadJournal(int64_t position) const;

  // The lineage in words, one intervention after another; "" where the run is no branch.
  std::string LineageText() const;
  std::vector<std::string> Interventions() const;  // canonical text, of the lineage

 private:
  OpenedRun(RunReader reader, Recipe recipe, Layout layout)
      : reader_(std::move(reader)), recipe_(std::move(recipe)), layout_(std::move(layout)) {}

  RunReader reader_;
  Recipe recipe_;
  Layout layout_;
  std::unique_ptr<Engine> engine_;
};

// What `glob` and `component` ("", "p", "m", "v") of an address select of a layout's tensors.
// Errors: kUsage where no tensor matches; names the nearest.
Result<Selection> SelectionOf(const Layout& layout, const std::string& glob,
                              const std::string& component);
Status CheckGlob(const std::vector<std::string>& names, const std::string& glob,
                 const std::string& where);

// "0..4, 8, 10..12": ascending numbers as ranges. "none" where empty.
std::string RangesText(const std::vector<int64_t>& numbers);

}  // namespace retrace

#endif  // RETRACE_CMD_OPENED_RUN_H_
