#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cmd/commands.h"
#include "cmd/console.h"
#include "cmd/text_table.h"
#include "core/recipe_toml.h"
#include "formats/run_dir.h"
#include "kernels/isa.h"
#include "kernels/thread_pool.h"
#include "replay/model_files.h"
#include "replay/recipe_plan.h"

namespace retrace {
namespace {

constexpr char kExamples[] = R"(Examples:
  retrace import demo-24 --out runs/from-24                     # what 'retrace export' wrote
  retrace import demo-24 --out runs/cold --fresh                # its parameters alone
  retrace import gemma-folder --recipe my.toml --out runs/hf    # a Hugging Face folder
  retrace import model.safetensors --m m.safetensors --v v.safetensors --adam-t 1000 --recipe my.toml \
      --out runs/x                                              # moments of another program
The new run has RUN@0 alone; 'retrace train --resume RUN' goes on from there. Elements in BF16, F16,
or F64 that are FP32 numbers are taken as they are; nothing is rounded.)";

struct ImportFlags {
  ImportSources sources;
  std::string recipe, out;
  std::vector<std::string> overrides;
  OutputFlags output;
};

std::string RecipePath(const ImportFlags& flags) {
  const std::string& model = flags.sources.parameters;
  std::error_code ignored;
  if (!std::filesystem::exists(model, ignored)) {
    Fail(UsageError(model + ": there is no such file; expected a folder, an index.json or a "
                            ".safetensors file"));
  }
  if (!flags.recipe.empty()) return flags.recipe;
  const std::string own = flags.sources.parameters + "/" + kRecipeName;
  std::error_code error;
  if (std::filesystem::exists(own, error)) return own;
  Fail(UsageError(flags.sources.parameters + ": it has no recipe.toml; expected --recipe FILE"));
}

// Where the data cursor goes on, the recipe's samples end before its steps do.
int64_t UpdatesAhead(const ImportedModel& model) {
  return std::min(model.recipe.steps, UpdatesLeft(model.recipe, model.state.counters.data_cursor));
}

std::string GoOnText(const ImportFlags& flags, const ImportedModel& model) {
  const int64_t cursor = model.state.counters.data_cursor, updates = UpdatesAhead(model);
  const std::string command = "go on with: retrace train --resume " + flags.out;
  if (updates == model.recipe.steps) return command + "\n";
  const std::string why =
      fmt::format("{} of the {} samples that the recipe plans count as consumed", cursor,
                  PlannedSamples(model.recipe));
  if (updates == 0) return why + ": no update is left; --fresh begins at the first sample\n";
  return fmt::format("{} --until {}\n({})\n", command, updates, why);
}

void RunImport(const ImportFlags& flags) {
  const Recipe recipe = OrFail(LoadRecipe(RecipePath(flags), flags.overrides));
  const ImportedModel model = OrFail(ImportModel(recipe, flags.sources));
  OrFail(RecordImported(model, flags.out, "cpu", IsaName(BestIsa()), std::max(1, AvailableCpus())));
  const std::string digest = StateDigest(model.layout, model.state).Hex();
  if (flags.output.json) {
    const nlohmann::ordered_json json = {{"run", flags.out},
                                         {"state", digest},
                                         {"tensors", model.layout.tensors().size()},
                                         {"parameters", model.layout.parameters()},
                                         {"updates_left", UpdatesAhead(model)},
                                         {"notices", model.notices}};
    return PrintReport(json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  }
  for (const std::string& notice : model.notices) SayError("retrace: " + notice);
  if (flags.output.quiet) return;
  PrintReport(fmt::format(
      "{}@0: {} tensors, {} parameters, state {}\n{}", flags.out,
      model.layout.tensors().size(), model.layout.parameters(), digest, GoOnText(flags, model)));
}

}  // namespace

void AddImportCommand(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("import", "Make a run that begins at a model's safetensors files");
  auto flags = std::make_shared<ImportFlags>();
  command
      ->add_option("model", flags->sources.parameters,
                   "A folder, an index.json or a .safetensors file")
      ->required();
  command->add_option("-o,--out", flags->out, "Directory of the new run")->required();
  command->add_option("--recipe", flags->recipe, "The recipe; the folder's recipe.toml by default");
  command->add_option("--set", flags->overrides, "KEY=VALUE of the recipe; may be repeated")
      ->allow_extra_args(false);
  CLI::Option* m = command->add_option("--m", flags->sources.m, "Adam's first moment, likewise");
  CLI::Option* v = command->add_option("--v", flags->sources.v, "Adam's second moment, likewise");
  m->needs(v);
  v->needs(m);
  CLI::Option* t = WholeIn(
      command->add_option("--adam-t", flags->sources.adam_t, "Updates that m and v have seen"), 0);
  command->add_flag("--fresh", flags->sources.fresh, "Zero moments and counters")
      ->excludes(m)
      ->excludes(v)
      ->excludes(t);
  AddOutputFlags(command, &flags->output, true);
  command->footer(kExamples);
  command->callback([flags] { RunImport(*flags); });
}

}  // namespace retrace
